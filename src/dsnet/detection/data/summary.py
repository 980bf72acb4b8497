"""Counts of images and boxes, and a description of the training run ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsnet.detection.data.dataset import DetectionDataset
from dsnet.detection.data.voc import FileProblem, VocAnnotations
from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import printable

__all__ = ["SplitCounts", "batch_too_large", "count_split", "describe_run", "plural", "report_problems"]

MAX_REPORTED = 5  # problems with files


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounts:
    """The images and boxes of a split."""

    listed: int  # images in the split
    images: int  # usable ones
    boxes: Mapping[str, int]  # by class, without difficult ones
    difficult: int = 0  # boxes


def count_split(split: VocAnnotations | DetectionDataset) -> SplitCounts:
    """Count the images and boxes of a split."""
    truths = split.truths if isinstance(split, DetectionDataset) else [item.truth for item in split.items]
    boxes, difficult = dict.fromkeys(split.classes, 0), 0
    for truth in truths:
        ignored = truth.ignored()
        difficult += int(ignored.sum())
        for label in truth.classes[~ignored].tolist():
            boxes[split.classes[label]] += 1
    return SplitCounts(
        listed=max(split.listed, len(truths)), images=len(truths), boxes=boxes, difficult=difficult
    )


def describe_run(config: DetectionConfig, train: SplitCounts, test: SplitCounts, *, routes: int) -> str:
    """Describe in a few lines what will be trained, and on how much data."""
    optim, gate = config.optim, config.gate
    steps = train.images // optim.batch
    training = (
        f"{plural(optim.epochs, 'epoch')} of {plural(steps, 'step')} with {optim.batch} images: "
        f"{plural(steps * optim.epochs, 'step')}"
    )
    if not steps:
        training = batch_too_large(train.images, optim.batch)
    side = config.data.size
    gate_epochs, gate_steps = gate.epochs if routes > 1 else 0, -(-train.images // gate.batch)
    gate_text = f", the gate ({plural(gate_epochs, 'epoch')} of {plural(gate_steps, 'step')})"
    rows = [
        ("images", f"{train.images:,} to train with, {test.images:,} to test with; none are held out"),
        ("classes", f"{len(train.boxes)}: {', '.join(train.boxes)}"),
        ("boxes", f"to train with {_describe_boxes(train)}"),
        ("", f"to test with {_describe_boxes(test)}"),
        ("network", f"{config.model} at {side} × {side} pixels, {plural(routes, 'route')}"),
        ("training", training),
        (
            "after it",
            f"statistics of all routes, figures on the test images{gate_text if gate_epochs else ''}",
        ),
    ]
    left_out = [
        f"{split.listed - split.images:,} of {plural(split.listed, f'{name} image')}"
        for name, split in (("training", train), ("test", test))
        if split.listed > split.images
    ]
    if left_out:
        rows.insert(1, ("left out", " and ".join(left_out)))
    return "\n".join(f"{label:10}{text}" for label, text in rows)


def _describe_boxes(split: SplitCounts) -> str:
    by_class = ", ".join(f"{count:,} {name}" for name, count in split.boxes.items())
    difficult = f"; {split.difficult:,} more are marked as difficult" if split.difficult else ""
    return f"{sum(split.boxes.values()):,}: {by_class}{difficult}"


def report_problems(problems: Sequence[FileProblem], rest: str, report: Callable[[str], None]) -> None:
    """Report the first problems one by one, and the number of further ones; ``rest`` says where they are."""
    for problem in problems[:MAX_REPORTED]:
        report(printable(f"{problem.file}: {problem.what}", 1000))
    if len(problems) > MAX_REPORTED:
        report(f"and {len(problems) - MAX_REPORTED} more problems with files: {rest}")


def batch_too_large(images: int, batch: int) -> str:
    """Describe the problem of fewer images than a batch has."""
    return f"{plural(images, 'training image')} do not fill a batch of {batch}: lower optim.batch"


def plural(count: int, noun: str) -> str:
    """Format a count: ``plural(2000, "step")`` is ``"2,000 steps"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
