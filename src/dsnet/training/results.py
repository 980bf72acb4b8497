"""What a run had and what it came to, as ``results.json`` keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsnet.core.formats import RESULTS
from dsnet.core.schema import check, read_json
from dsnet.errors import DsnetError
from dsnet.training.evaluation import ClassResults, GatedResult, RouteResult
from dsnet.training.loop import RunStatus

__all__ = ["Images", "Outcome", "read_outcome", "results_of"]

NEEDED = ("steps", "held_out", "test", "images")


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """What a run was trained and tested on."""

    classes: tuple[str, ...]
    counts: tuple[int, ...]  # training images of every class, those held out among them
    held_out: int
    test: int
    size: int  # pixels a side
    damaged: int = 0  # that could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to."""

    folder: Path
    status: RunStatus
    first: bool = True  # whether this is the process that reports
    held_out: tuple[tuple[RouteResult | None, RouteResult], ...] = ()  # before and after re-calibration
    test: tuple[RouteResult, ...] = ()
    gated: GatedResult | None = None  # on the test split, where the gates were trained too
    classes: ClassResults | None = None  # the largest route's, on the test split
    images: Images | None = None


def results_of(outcome: Outcome) -> dict[str, Any]:
    """Plain data (JSON types) of a run that came to its end."""
    gated, classes, images = outcome.gated, outcome.classes, outcome.images
    return {
        "steps": outcome.status.steps,
        "held_out": [[None if b is None else asdict(b), asdict(a)] for b, a in outcome.held_out],
        "test": [{**asdict(r), "accuracy": r.accuracy} for r in outcome.test],
        "gated": None if gated is None else {**asdict(gated), "accuracy": gated.accuracy},
        "classes": None if classes is None else asdict(classes),
        "images": None if images is None else asdict(images),
    }


def read_outcome(folder: Path) -> Outcome | None:
    """What the finished run in ``folder`` came to; none where its files do not say all of it.

    A file that is damaged is an error.
    """
    path = folder / "results.json"
    if not path.is_file():
        return None
    plain = read_json(path)
    if not isinstance(plain, dict) or any(plain.get(key) is None for key in NEEDED):
        return None  # of a loop of one's own, or of an earlier version
    check(RESULTS, plain, path)
    classes, images = plain.get("classes"), plain["images"]
    if len(images["counts"]) != len(images["classes"]):
        raise DsnetError(f"{path}: images.counts has another length than images.classes")
    if classes is not None:
        _check_classes(classes, len(images["classes"]), path)
    return Outcome(
        folder=folder,
        status=RunStatus(step=plain["steps"], steps=plain["steps"]),
        held_out=tuple((None if b is None else _route(b), _route(a)) for b, a in plain["held_out"]),
        test=tuple(map(_route, plain["test"])),
        gated=None if plain.get("gated") is None else _gated(plain["gated"]),
        classes=None if classes is None else ClassResults(**_tuples(classes)),
        images=Images(**_tuples(images)),
    )


def _check_classes(plain: Mapping[str, Any], count: int, path: Path) -> None:
    """Raises where figures by class are not of so many classes."""
    for key in ("images", "correct"):
        if len(plain[key]) != count:
            raise DsnetError(f"{path}: classes.{key} has {len(plain[key])} values, expected {count}")
    for position, (label, answer, _) in enumerate(plain["confused"]):
        if max(label, answer) >= count:
            raise DsnetError(f"{path}: classes.confused[{position}] names a class beyond the {count}")


def _route(plain: Mapping[str, Any]) -> RouteResult:
    return RouteResult(**{key: value for key, value in plain.items() if key != "accuracy"})


def _gated(plain: Mapping[str, Any]) -> GatedResult:
    taken = {int(route): count for route, count in plain["taken"].items()}
    return GatedResult(correct=plain["correct"], images=plain["images"], madds=plain["madds"], taken=taken)


def _tuples(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Lists, as JSON has them, and lists in them as tuples."""
    return {
        key: tuple(tuple(each) if isinstance(each, list) else each for each in value)
        if isinstance(value, list)
        else value
        for key, value in plain.items()
    }
