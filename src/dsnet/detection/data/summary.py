"""How many images and boxes there are, and what a run has before it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsnet.detection.data.dataset import Pictures
from dsnet.detection.data.voc import DetectionSet
from dsnet.detection.train.config import DetectConfig

__all__ = ["Counted", "ahead_text", "count_boxes", "plural", "unfilled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a split has."""

    listed: int  # images that it names
    images: int  # of them that can be used
    boxes: Mapping[str, int]  # by class, without those marked as difficult
    difficult: int = 0  # boxes


def count_boxes(found: DetectionSet | Pictures) -> Counted:
    """Images and boxes of a split."""
    truths = found.truths if isinstance(found, Pictures) else [item.truth for item in found.items]
    boxes, difficult = dict.fromkeys(found.classes, 0), 0
    for truth in truths:
        hard = truth.ignored()
        difficult += int(hard.sum())
        for kind in truth.classes[~hard].tolist():
            boxes[found.classes[kind]] += 1
    listed = max(found.listed, len(truths))
    return Counted(listed=listed, images=len(truths), boxes=boxes, difficult=difficult)


def ahead_text(config: DetectConfig, train: Counted, test: Counted, *, routes: int) -> str:
    """What is about to be trained, and on how much."""
    optim, gate = config.optim, config.gate
    steps = train.images // optim.batch
    training = (
        f"{plural(optim.epochs, 'epoch')} of {plural(steps, 'step')} with {optim.batch} images: "
        f"{plural(steps * optim.epochs, 'step')}"
    )
    if not steps:
        training = unfilled(train.images, optim.batch)
    rows = [
        ("images", f"{train.images:,} to train with, {test.images:,} to test with; none are held out"),
        ("classes", f"{len(train.boxes)}: {', '.join(train.boxes)}"),
        ("boxes", f"to train with {_boxes(train)}"),
        ("", f"to test with {_boxes(test)}"),
        (
            "network",
            f"{config.model} at {config.data.size} × {config.data.size} pixels, {plural(routes, 'route')}",
        ),
        ("training", training),
        ("after it", _after(gate.epochs if routes > 1 else 0, -(-train.images // gate.batch))),
    ]
    left_out = [
        f"{part.listed - part.images:,} of {plural(part.listed, f'{name} image')}"
        for name, part in (("training", train), ("test", test))
        if part.listed > part.images
    ]
    if left_out:
        rows.insert(1, ("left out", " and ".join(left_out)))
    return "\n".join(f"{label:10}{text}" for label, text in rows)


def _after(epochs: int, steps: int) -> str:
    gate = f", the gate ({plural(epochs, 'epoch')} of {plural(steps, 'step')})" if epochs else ""
    return f"statistics of all routes, figures on the test images{gate}"


def _boxes(part: Counted) -> str:
    kinds = ", ".join(f"{count:,} {name}" for name, count in part.boxes.items())
    hard = f"; {part.difficult:,} more are marked as difficult" if part.difficult else ""
    return f"{sum(part.boxes.values()):,}: {kinds}{hard}"


def unfilled(images: int, batch: int) -> str:
    """What is wrong where there are fewer images than a batch has."""
    return f"{plural(images, 'training image')} do not fill a batch of {batch}: lower optim.batch"


def plural(number: int, what: str) -> str:
    """``plural(1, "step")`` → ``"1 step"``; ``plural(2000, "step")`` → ``"2,000 steps"``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
