"""A training run in words: what it has before it, and one page on what it reached and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dsnet.calibration.difficulty import GateReport
from dsnet.data.inspect import DatasetSummary
from dsnet.report.page import bar_chart, command, escape, html_table, notes, page
from dsnet.report.plot import Point, accuracy_plot, line_plot
from dsnet.report.text import human, roughly
from dsnet.training.config import TrainConfig
from dsnet.training.estimate import Estimate
from dsnet.training.results import Images, Outcome

__all__ = ["before_text", "low_accuracy", "training_charts", "training_page"]

FEW = 20  # images of a class below which little can be learnt of it
WORST = 10  # classes that are shown
LINES = 6  # of losses in a plot
RISE = 0.01  # of held-out accuracy in the last fifth of a run, from which on it still rises
LOW = 0.6  # share of the way from guessing to 100 % below which an accuracy is called low

Metrics = Sequence[Mapping[str, Any]]


def before_text(config: TrainConfig, found: DatasetSummary, ahead: Estimate) -> str:
    """What is about to be trained, on how much, and what that costs."""
    optim = config.optim
    watched = f" ({ahead.held_out} of them held out)" if ahead.held_out else ""
    duration = "" if ahead.seconds is None else f", {roughly(ahead.seconds)} on this machine"
    rows = [
        (
            "images",
            f"{found.images:,} to train with{watched}, {found.test:,} to test with; "
            f"{len(found.classes)} classes",
        ),
        ("network", f"{config.model} at {ahead.size} × {ahead.size} pixels"),
        (
            "training",
            f"{config.scheme.name}, {_count(optim.epochs, 'epoch')} of "
            f"{_count(ahead.steps // optim.epochs, 'step')} with {optim.batch} images: {ahead.steps:,} steps",
        ),
        ("cost", f"{human(ahead.madds)} multiply-adds{duration}"),
    ]
    if found.divided:
        whole = found.images + found.test
        told = f"{found.test:,} of the {whole:,} images, about a fifth of every class, are kept for the test"
        rows.insert(1, ("", told))
    if config.augment.flip:
        told = "at random; where left and right differ (letters, digits): --set augment.flip=false"
        rows.append(("mirrored", told))
    return "\n".join(f"{label:10}{text}" for label, text in rows)


def training_page(
    outcome: Outcome,
    config: TrainConfig,
    metrics: Metrics,
    *,
    gates: Sequence[GateReport] = (),
    verdict: str | None = None,
) -> str:
    """The page of a run that has come to its end or was stopped.

    ``metrics`` are the lines of ``metrics.jsonl``; ``gates`` is what the run's gates did with held-out
    images, where Stage II has trained them; ``verdict`` says whether routing pays, once it is calibrated.
    """
    assert outcome.images is not None
    trend = _trend(_checks(metrics), outcome.images.held_out)
    body = [_summary(outcome, config, outcome.images), notes(_notes(outcome, outcome.images))]
    if outcome.test:
        body += ["<h2>Accuracy against cost</h2>", _routes(outcome)]
        body += _gates(gates)
        body += _verdict(verdict)
        body += _classes(outcome, outcome.images)
    advice = _advice(outcome, config, trend, gated=bool(gates) or outcome.gated is not None)
    body += ["<h2>What to do next</h2>", *(command(*one) for one in advice)]
    body += training_charts(metrics)
    return page(_title(outcome, config), *body)


# --- what was reached ---------------------------------------------------------------------------------
def _title(outcome: Outcome, config: TrainConfig) -> str:
    name = Path(config.data.name).name or config.data.name
    if not outcome.test:
        return f"{name}: stopped after step {outcome.status.step} of {outcome.status.steps}"
    return f"{name}: {outcome.test[-1].accuracy:.1%} right"


def _summary(outcome: Outcome, config: TrainConfig, images: Images) -> str:
    held = f" ({images.held_out} of them held out)" if images.held_out else ""
    text = (
        f"<strong>{escape(config.model)}</strong> on {sum(images.counts):,} training images{held} of "
        f"{len(images.classes)} classes, {images.size} × {images.size} pixels; "
        f"{_count(config.optim.epochs, 'epoch')} by {escape(config.scheme.name)}."
    )
    if len(outcome.test) > 1:
        small, large = outcome.test[0], outcome.test[-1]
        text += (
            f" One set of weights, several routes: the largest gets <strong>{large.accuracy:.1%}</strong> of "
            f"{large.images:,} test images right, the smallest <strong>{small.accuracy:.1%}</strong> at "
            f"{small.madds / large.madds:.0%} of its cost."
        )
    if outcome.test:
        error = 100 * _error(outcome.test[-1].accuracy, outcome.test[-1].images)
        text += (
            f" With so many test images the standard error is {error:.1f} points; guessing gets "
            f"{_guessing(outcome, images)[0]:.1%}."
        )
    return f"<p>{text}</p>"


def _routes(outcome: Outcome) -> str:
    curves = {"routes": [Point(r.madds, r.accuracy, f"route {r.route}") for r in outcome.test]}
    if outcome.gated is not None:
        curves["gated"] = [Point(outcome.gated.madds, outcome.gated.accuracy)]
    largest = outcome.test[-1].madds
    rows = (
        (str(r.route), f"{r.accuracy:.1%}", human(r.madds), f"{r.madds / largest:.0%}", human(r.params))
        for r in outcome.test
    )
    return accuracy_plot(curves).html() + html_table(("route", "right", "MAdds", "share", "params"), rows)


def _gates(gates: Sequence[GateReport]) -> list[str]:
    if not gates:
        return []
    count = "a trained gate" if len(gates) == 1 else f"{len(gates)} trained gates"
    parts = [f"<h2>The gate</h2><p>The checkpoint <code>gated</code> of this run has {count}.</p>"]
    for report in gates:
        total = sum(report.choice_counts.values())
        which = "It" if len(gates) == 1 else f"Gate {report.gate}"
        shares = ", ".join(f"{choice}: {count / total:.0%}" for choice, count in report.choice_counts.items())
        parts.append(f"<p>{which} decides for {total:,} held-out images, choice by choice: {shares}.</p>")
    return parts


def _verdict(text: str | None) -> list[str]:
    if text is None:
        return []
    judged = "Both were chosen on these images: dsnet evaluate --routed judges them on the test images."
    return [f"<h2>Does routing pay?</h2><p><strong>{escape(text)}</strong> {escape(judged)}</p>"]


def _classes(outcome: Outcome, images: Images) -> list[str]:
    found = outcome.classes
    if found is None:
        return []
    tested = [at for at, count in enumerate(found.images) if count]
    worst = sorted(tested, key=lambda at: found.correct[at] / found.images[at])[:WORST]
    every = "All classes" if len(worst) == len(images.classes) else f"The {len(worst)} worst classes"
    shares = [found.correct[at] / found.images[at] for at in worst]
    captions = [f"{share:.0%} of {found.images[at]}" for at, share in zip(worst, shares, strict=True)]
    parts = [
        f"<h2>{every}</h2>",
        f"<p>Right answers at route {found.route}, the worst class first.</p>",
        bar_chart([_short(images.classes[at]) for at in worst], shares, captions),
    ]
    if found.confused:
        parts.append("<p>Most often taken for another:</p><ul>")
        for true, taken, count in found.confused[:5]:
            told = f"{images.classes[true]} for {images.classes[taken]}: {count} of {found.images[true]}"
            parts.append(f"<li>{escape(told)}</li>")
        parts.append("</ul>")
    return parts


def training_charts(metrics: Metrics) -> list[str]:
    """Build charts of held-out accuracy and losses from the lines of ``metrics.jsonl``, with a heading."""
    parts, checks = [], _checks(metrics)
    if len(checks) > 1:
        routes = [name for name in checks[-1] if name.startswith("route_")]
        accuracies = {
            name.replace("_", " "): [(line["epoch"] + 1, 100 * line[name]) for line in checks if name in line]
            for name in routes
        }
        parts.append(line_plot("Held-out accuracy", accuracies, axis="epoch", percent=True).html())
    steps = [line for line in metrics if "loss" in line]
    if len(steps) > 1:
        terms = list(dict.fromkeys(name for line in steps for name in line if "/" in name))[:LINES]
        losses = {name: [(line["step"], line[name]) for line in steps if name in line] for name in terms}
        parts.append(line_plot("Losses, network by network", losses, axis="step").html())
    return ["<h2>Training</h2>", *parts] if parts else []


def _checks(metrics: Metrics) -> Metrics:
    return [line for line in metrics if {"score", "epoch"} <= line.keys()]


# --- what to think of it ------------------------------------------------------------------------------
def _notes(outcome: Outcome, images: Images) -> list[str]:
    """What looks wrong, in words."""
    notes = []
    if _lost(outcome, images):
        guess, how = _guessing(outcome, images)
        notes.append(
            f"{outcome.test[-1].accuracy:.1%} is hardly better than {how} ({guess:.1%}). The run may be too "
            "short, the images too few, the labels mixed up, or the classes not told apart by what one sees."
        )
    low = low_accuracy(outcome)
    if low is not None:
        notes.append(low)
    few = [name for name, count in zip(images.classes, images.counts, strict=True) if count < FEW]
    if few:
        named = ", ".join(map(_short, few[:5])) + ", …" * (len(few) > 5)
        notes.append(
            f"{_count(len(few), 'class')} of {len(images.classes)} "
            f"{'has' if len(few) == 1 else 'have'} fewer than {FEW} training images ({named}): collect more "
            "of them before anything else."
        )
    if min(images.counts) and max(images.counts) > 10 * min(images.counts):
        notes.append(
            f"Classes have from {min(images.counts)} to {max(images.counts)} training images: rare ones are "
            "learnt worse than the accuracy says."
        )
    if images.damaged:
        notes.append(f"{_count(images.damaged, 'image')} could not be read and took no part.")
    if images.test < 100:
        notes.append(f"With {_count(images.test, 'test image')} every accuracy here is a rough one.")
    if images.held_out == 0:
        notes.append("No images were held out: routers cannot be trained or calibrated.")
    return notes


def low_accuracy(outcome: Outcome) -> str | None:
    """Return a warning where the largest route is better than guessing but far from reliable."""
    images = outcome.images
    if images is None or not outcome.test or _lost(outcome, images):
        return None
    largest, (guess, _) = outcome.test[-1], _guessing(outcome, images)
    if largest.accuracy >= guess + LOW * (1 - guess):
        return None
    mean = sum(images.counts) / len(images.classes)
    return (
        f"Accuracy is low: the largest route gets {largest.accuracy:.1%} of the test images right, with "
        f"{mean:.0f} training images a class on average. A longer run, more images, or a start from a "
        "network that was trained on many images (dsnet transfer --help) may help."
    )


def _lost(outcome: Outcome, images: Images) -> bool:
    """Whether the largest route does no better than guessing, or by so little that it may be chance."""
    if not outcome.test:
        return False
    largest, (guess, _) = outcome.test[-1], _guessing(outcome, images)
    return largest.accuracy < guess + max(0.1 * (1 - guess), 2 * _error(guess, largest.images))


def _guessing(outcome: Outcome, images: Images) -> tuple[float, str]:
    """What one gets right without looking, and how."""
    if outcome.classes is None:
        return 1 / max(1, len(images.classes)), "guessing"
    counts = outcome.classes.images
    most = max(range(len(counts)), key=counts.__getitem__)
    return counts[most] / sum(counts), f"always answering {images.classes[most]}"


def _trend(checks: Metrics, held_out: int) -> float | None:
    """By how much the held-out accuracy rose in the last fifth of the run; none: nobody knows."""
    if len(checks) < 5:
        return None
    last = checks[-1]
    before = [line["score"] for line in checks if line["step"] <= 0.8 * last["step"]]
    rise = float(last["score"] - max(before))
    return rise if rise > _error(last["score"], held_out) else min(rise, 0.0)


# --- what to do ---------------------------------------------------------------------------------------
class _Advice(NamedTuple):
    command: str
    why: str


def _advice(outcome: Outcome, config: TrainConfig, rises: float | None, *, gated: bool) -> list[_Advice]:
    assert outcome.images is not None
    run = shlex.quote(str(outcome.folder))
    recipe = shlex.quote(str(outcome.folder / "recipe.json"))
    if not outcome.test:
        return [_Advice(f"dsnet train {recipe} --out {run} --resume", "Goes on where the run stopped.")]
    advice = [
        _Advice(
            f"dsnet predict {run} photo.jpg --route {outcome.test[-1].route} --top 3",
            "What a picture shows, at the largest route.",
        )
    ]
    if len(outcome.test) > 1:
        advice += _routing(outcome, run, recipe, gated=gated)
    advice += _longer(outcome, config, recipe, rises)
    return advice


def _routing(outcome: Outcome, run: str, recipe: str, *, gated: bool) -> list[_Advice]:
    assert outcome.images is not None
    if outcome.images.held_out == 0:
        out = shlex.quote(f"{outcome.folder}-held")
        return [
            _Advice(
                f"dsnet train {recipe} --set data.hold_out=0.2 --out {out}",
                "Routers need images that the weights have not seen: hold some out.",
            )
        ]
    least = outcome.test[0].madds / outcome.test[-1].madds
    budget = f"{min(95, 5 * math.ceil(20 * (least + 0.3 * (1 - least))))}%"
    gate = _Advice(
        f"dsnet gate {run} --set goal=value",
        "Trains the gate, so that easy images take cheap routes. The weights stay as they are.",
    )
    return [
        *([] if gated else [gate]),
        _Advice(f"dsnet calibrate {run}", "Finds the settings for every budget, on held-out images."),
        _Advice(
            f"dsnet evaluate {run} --routed --plot routers.html",
            "Whether routing pays: gate and cascade beside single routes of the same cost.",
        ),
        _Advice(
            f"dsnet predict {run} photo.jpg --budget {budget}",
            f"Every image at its own route, for {budget} of the largest route's cost on average.",
        ),
        _Advice(
            f"dsnet bench {run} --mix measured --budget {budget}",
            "What that saves in milliseconds on this machine.",
        ),
    ]


def _longer(outcome: Outcome, config: TrainConfig, recipe: str, rises: float | None) -> list[_Advice]:
    assert outcome.images is not None
    out, epochs = shlex.quote(f"{outcome.folder}-longer"), 2 * config.optim.epochs
    longer = f"dsnet train {recipe} --set optim.epochs={epochs} --out {out}"
    if _lost(outcome, outcome.images):
        return [_Advice(longer, "A run twice as long shows whether there is something to learn.")]
    if rises is None:
        return []
    if rises > RISE:
        told = f"Held-out accuracy rose by {100 * rises:.1f} points in the last fifth of the run"
        return [_Advice(longer, f"{told}: a longer one may reach more.")]
    again = shlex.quote(f"{outcome.folder}-again")
    return [
        _Advice(
            longer,
            "Held-out accuracy always flattens at the end of a run, because the learning rate ends near "
            "zero: that does not tell whether more epochs would help. A run twice as long shows it. More "
            "images, or a network that was trained on many (dsnet transfer --help), often help more.",
        ),
        _Advice(
            f"dsnet train {recipe} --set run.seed=1 --out {again}",
            "The same settings with another seed show how much is chance.",
        ),
    ]


# --- small things -------------------------------------------------------------------------------------
def _error(share: float, count: int) -> float:
    return math.sqrt(max(share * (1 - share), 0.0) / max(count, 1))


def _count(number: int, what: str) -> str:
    plural = "classes" if what == "class" else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
