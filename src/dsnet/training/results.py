"""What a run had and what it came to, as ``results.json`` keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsnet.training.evaluate import ClassResults, GatedResult, RouteResult
from dsnet.training.loop import Ending

__all__ = ["Images", "Outcome", "read_outcome", "results_of"]


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
    ending: Ending
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
        "steps": outcome.ending.steps,
        "held_out": [[None if b is None else asdict(b), asdict(a)] for b, a in outcome.held_out],
        "test": [{**asdict(r), "accuracy": r.accuracy} for r in outcome.test],
        "gated": None if gated is None else {**asdict(gated), "accuracy": gated.accuracy},
        "classes": None if classes is None else asdict(classes),
        "images": None if images is None else asdict(images),
    }


def read_outcome(folder: Path) -> Outcome | None:
    """What the finished run in ``folder`` came to; none where its files do not say all of it."""
    try:
        plain = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        classes = plain["classes"]
        return Outcome(
            folder=folder,
            ending=Ending(step=plain["steps"], steps=plain["steps"]),
            held_out=tuple((None if b is None else _route(b), _route(a)) for b, a in plain["held_out"]),
            test=tuple(map(_route, plain["test"])),
            gated=None if plain["gated"] is None else _gated(plain["gated"]),
            classes=None if classes is None else ClassResults(**_tuples(classes)),
            images=Images(**_tuples(plain["images"])),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
