"""The results of a run, and their file ``results.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsnet.core.formats import RESULTS
from dsnet.core.schema import check, read_json
from dsnet.core.settings import from_plain
from dsnet.errors import DsnetError
from dsnet.training.evaluation import ClassResults, GatedResult, RouteResult
from dsnet.training.loop import RunStatus

__all__ = ["Images", "Outcome", "read_outcome", "results_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a run."""

    classes: tuple[str, ...]
    counts: tuple[int, ...]  # training images of each class, including those held out
    held_out: int
    test: int
    size: int  # pixels a side
    damaged: int = 0  # that could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a run; without accuracies if it was stopped."""

    folder: Path
    status: RunStatus
    first: bool = True  # whether this process reports
    held_out: tuple[tuple[RouteResult | None, RouteResult], ...] = ()  # before and after re-calibration
    test: tuple[RouteResult, ...] = ()
    gated: GatedResult | None = None  # on the test split, if the gates were trained too
    classes: ClassResults | None = None  # of the largest route, on the test split
    images: Images | None = None


def results_of(outcome: Outcome) -> dict[str, Any]:
    """Return the results of a finished run as JSON types."""
    gated, classes, images = outcome.gated, outcome.classes, outcome.images
    return {
        "steps": outcome.status.steps,
        "held_out": [[None if b is None else b.to_dict(), a.to_dict()] for b, a in outcome.held_out],
        "test": [{**r.to_dict(), "accuracy": r.accuracy} for r in outcome.test],
        "gated": None if gated is None else {**asdict(gated), "accuracy": gated.accuracy},
        "classes": None if classes is None else asdict(classes),
        "images": None if images is None else asdict(images),
    }


def read_outcome(folder: Path) -> Outcome | None:
    """Read the results of a finished run; None if there are none, or not all that this version writes.

    Raises:
        DsnetError: The file is damaged.
    """
    path = folder / "results.json"
    if not path.is_file():
        return None
    plain = read_json(path)
    needed = ("steps", "held_out", "test", "images")
    if not isinstance(plain, dict) or any(plain.get(key) is None for key in needed):
        return None  # of another training loop, or of an earlier version
    check(RESULTS, plain, path)
    images, gated, classes = from_plain(Images, plain["images"]), plain.get("gated"), None
    if len(images.counts) != len(images.classes):
        raise DsnetError(
            f"{path}: images.counts has {len(images.counts)} values, expected {len(images.classes)}"
        )
    if plain.get("classes") is not None:
        classes = from_plain(ClassResults, plain["classes"])
        _check_classes(classes, len(images.classes), path)
    if gated is not None:
        taken = {int(route): count for route, count in gated.pop("taken").items()}
        gated = GatedResult(**_without_accuracy(gated), taken=taken)
    return Outcome(
        folder=folder,
        status=RunStatus(step=plain["steps"], steps=plain["steps"]),
        held_out=tuple((None if b is None else _route(b), _route(a)) for b, a in plain["held_out"]),
        test=tuple(map(_route, plain["test"])),
        gated=gated,
        classes=classes,
        images=images,
    )


def _check_classes(results: ClassResults, count: int, path: Path) -> None:
    """Raise if results by class are of another number of classes."""
    for key, values in (("images", results.images), ("correct", results.correct)):
        if len(values) != count:
            raise DsnetError(f"{path}: classes.{key} has {len(values)} values, expected {count}")
    for index, (label, prediction, _) in enumerate(results.confused):
        if max(label, prediction) >= count:
            raise DsnetError(f"{path}: classes.confused[{index}] has a class index of at least {count}")


def _route(plain: dict[str, Any]) -> RouteResult:
    return RouteResult(**_without_accuracy(plain))


def _without_accuracy(plain: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if key != "accuracy"}
