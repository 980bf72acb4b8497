"""A training run in words: what will be trained, and a page on the results and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsnet.calibration.difficulty import GateReport
from dsnet.data.inspect import DatasetSummary
from dsnet.report.page import bar_chart, command, escape, html_table, notes, page
from dsnet.report.plot import Point, accuracy_plot, by_image_size, line_plot
from dsnet.report.text import human, roughly
from dsnet.training.config import TrainConfig
from dsnet.training.estimate import Estimate
from dsnet.training.evaluation import RouteResult
from dsnet.training.results import Images, Outcome

__all__ = ["before_text", "low_accuracy", "result_curves", "training_charts", "training_page"]

FEW = 20  # images of a class below which little can be learnt of it
WORST = 10  # classes that are shown
LINES = 6  # losses in a chart
RISE = 0.01  # rise of held-out accuracy in the last fifth of a run above which it is still rising
LOW = 0.6  # share of the way from guessing to 100 % below which an accuracy is called low

Metrics = Sequence[Mapping[str, Any]]
Advice = tuple[str, str]  # a command, and what it is for


def before_text(config: TrainConfig, dataset: DatasetSummary, estimate: Estimate) -> str:
    """Describe what will be trained, on how much data, and what that costs."""
    optim = config.optim
    held_out = f" ({estimate.held_out} of them held out)" if estimate.held_out else ""
    duration = "" if estimate.seconds is None else f", {roughly(estimate.seconds)} on this machine"
    rows = [
        (
            "images",
            f"{dataset.images:,} to train with{held_out}, {dataset.test:,} to test with; "
            f"{len(dataset.classes)} classes",
        ),
        ("network", f"{config.model} at {_sides(config, estimate.size)}"),
        (
            "training",
            f"{config.scheme.name}, {_count(optim.epochs, 'epoch')} of "
            f"{_count(estimate.steps // optim.epochs, 'step')} with {optim.batch} images: "
            f"{estimate.steps:,} steps",
        ),
        ("cost", f"{human(estimate.madds)} multiply-adds{duration}"),
    ]
    if dataset.divided:
        count = f"{dataset.test:,} of the {dataset.images + dataset.test:,} images"
        rows.insert(1, ("", f"{count}, about a fifth of every class, are kept for the test"))
    if config.augment.flip:
        text = "at random; where left and right differ (letters, digits): --set augment.flip=false"
        rows.append(("mirrored", text))
    return "\n".join(f"{label:10}{text}" for label, text in rows)


def training_page(
    outcome: Outcome,
    config: TrainConfig,
    metrics: Metrics,
    *,
    gates: Sequence[GateReport] = (),
    verdict: str | None = None,
) -> str:
    """Build the page of a run that is finished or was stopped.

    Args:
        outcome: Results of the run.
        config: Its settings.
        metrics: Lines of its ``metrics.jsonl``.
        gates: Decisions of its trained gates on held-out images.
        verdict: Whether routing pays, once the run is calibrated.
    """
    assert outcome.images is not None
    name = Path(config.data.name).name or config.data.name
    title = f"{name}: stopped after step {outcome.status.step} of {outcome.status.steps}"
    body = [_summary(outcome, config, outcome.images), notes(_notes(outcome, outcome.images))]
    if outcome.test:
        title = f"{name}: {outcome.test[-1].accuracy:.1%} right"
        body += ["<h2>Accuracy against cost</h2>", _routes(outcome), *_gates(gates)]
        if verdict is not None:
            judged = "Both were chosen on these images: dsnet evaluate --routed judges them on test images."
            body.append(
                f"<h2>Does routing pay?</h2><p><strong>{escape(verdict)}</strong> {escape(judged)}</p>"
            )
        body += _classes(outcome, outcome.images)
    advice = _advice(outcome, config, outcome.images, metrics, gated=bool(gates or outcome.gated))
    body += ["<h2>What to do next</h2>", *(command(*each) for each in advice), *training_charts(metrics)]
    return page(title, *body)


# --- results ------------------------------------------------------------------------------------------
def _summary(outcome: Outcome, config: TrainConfig, images: Images) -> str:
    held_out = f" ({images.held_out} of them held out)" if images.held_out else ""
    text = (
        f"<strong>{escape(config.model)}</strong> on {sum(images.counts):,} training images{held_out} of "
        f"{len(images.classes)} classes, {_sides(config, images.size)}; "
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


def _sides(config: TrainConfig, size: int) -> str:
    """Return the sizes of the images in words."""
    sizes = config.options.get("image_sizes")
    if isinstance(sizes, list | tuple) and len(sizes) > 1:
        return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} pixels a side"
    return f"{size} × {size} pixels"


def _routes(outcome: Outcome) -> str:
    curves = result_curves(outcome.test, "routes")
    sized = outcome.test[0].image_size is not None
    if outcome.gated is not None:
        curves["gated"] = [Point(outcome.gated.madds, outcome.gated.accuracy)]
    largest = outcome.test[-1].madds
    rows = (
        (
            str(r.route),
            *[f"{r.image_size} px"] * sized,
            f"{r.accuracy:.1%}",
            human(r.madds),
            f"{r.madds / largest:.0%}",
            human(r.params),
        )
        for r in outcome.test
    )
    header = ("route", *["image"] * sized, "right", "MAdds", "share", "params")
    return accuracy_plot(curves).html() + html_table(header, rows)


def result_curves(results: Sequence[RouteResult], name: str) -> dict[str, list[Point]]:
    """Return curves of an accuracy plot: one of all routes, or one for each image size of theirs."""
    points = [(r.image_size, Point(r.madds, r.accuracy, f"route {r.route}")) for r in results]
    return by_image_size(name, points)


def _gates(gates: Sequence[GateReport]) -> list[str]:
    if not gates:
        return []
    count = "a trained gate" if len(gates) == 1 else f"{len(gates)} trained gates"
    parts = [f"<h2>The gate</h2><p>The checkpoint <code>gated</code> of this run has {count}.</p>"]
    for report in gates:
        total = sum(report.choice_counts.values())
        name = "It" if len(gates) == 1 else f"Gate {report.gate}"
        shares = ", ".join(f"{choice}: {count / total:.0%}" for choice, count in report.choice_counts.items())
        parts.append(f"<p>{name} decides for {total:,} held-out images, choice by choice: {shares}.</p>")
    return parts


def _classes(outcome: Outcome, images: Images) -> list[str]:
    results = outcome.classes
    if results is None:
        return []
    shares = {
        label: right / count
        for label, (right, count) in enumerate(zip(results.correct, results.images, strict=True))
        if count
    }
    worst = sorted(shares, key=lambda label: shares[label])[:WORST]
    classes = "All classes" if len(worst) == len(images.classes) else f"The {len(worst)} worst classes"
    parts = [
        f"<h2>{classes}</h2>",
        f"<p>Share of images that route {results.route} gets right, the worst class first.</p>",
        bar_chart(
            [_short(images.classes[label]) for label in worst],
            [shares[label] for label in worst],
            [f"{shares[label]:.0%} of {results.images[label]}" for label in worst],
        ),
    ]
    if results.confused:
        items = (
            f"{images.classes[label]} for {images.classes[predicted]}: {count} of {results.images[label]}"
            for label, predicted, count in results.confused[:5]
        )
        listed = "".join(f"<li>{escape(item)}</li>" for item in items)
        parts.append(f"<p>Most often taken for another:</p><ul>{listed}</ul>")
    return parts


def training_charts(metrics: Metrics) -> list[str]:
    """Build charts of held-out accuracy and losses from the lines of ``metrics.jsonl``, with a heading."""
    parts, validations = [], _validations(metrics)
    if len(validations) > 1:
        accuracies = {
            name.replace("_", " "): [
                (line["epoch"] + 1, 100 * line[name]) for line in validations if name in line
            ]
            for name in validations[-1]
            if name.startswith("route_")
        }
        parts.append(line_plot("Held-out accuracy", accuracies, axis="epoch", percent=True).html())
    steps = [line for line in metrics if "loss" in line]
    if len(steps) > 1:
        terms = list(dict.fromkeys(name for line in steps for name in line if "/" in name))[:LINES]
        losses = {name: [(line["step"], line[name]) for line in steps if name in line] for name in terms}
        parts.append(line_plot("Losses, network by network", losses, axis="step").html())
    return ["<h2>Training</h2>", *parts] if parts else []


def _validations(metrics: Metrics) -> Metrics:
    return [line for line in metrics if {"score", "epoch"} <= line.keys()]


# --- warnings -----------------------------------------------------------------------------------------
def _notes(outcome: Outcome, images: Images) -> list[str]:
    """Return warnings about the results and the data."""
    texts = []
    if _no_better_than_guessing(outcome, images):
        share, guess = _guessing(outcome, images)
        texts.append(
            f"{outcome.test[-1].accuracy:.1%} is hardly better than {guess} ({share:.1%}). The run may be "
            "too short, the images too few, the labels mixed up, or the classes may look the same."
        )
    low = low_accuracy(outcome)
    if low is not None:
        texts.append(low)
    few = [name for name, count in zip(images.classes, images.counts, strict=True) if count < FEW]
    if few:
        names = ", ".join(map(_short, few[:5])) + ", …" * (len(few) > 5)
        texts.append(
            f"{_count(len(few), 'class')} of {len(images.classes)} "
            f"{'has' if len(few) == 1 else 'have'} fewer than {FEW} training images ({names}): collect more "
            "of them before anything else."
        )
    if min(images.counts) and max(images.counts) > 10 * min(images.counts):
        texts.append(
            f"Classes have from {min(images.counts)} to {max(images.counts)} training images: rare ones are "
            "learnt worse than the accuracy says."
        )
    if images.damaged:
        texts.append(f"{_count(images.damaged, 'image')} could not be read and took no part.")
    if images.test < 100:
        texts.append(f"With {_count(images.test, 'test image')} every accuracy here is a rough one.")
    if images.held_out == 0:
        texts.append("No images were held out: routers cannot be trained or calibrated.")
    return texts


def low_accuracy(outcome: Outcome) -> str | None:
    """Return a warning if the largest route is better than guessing but far from reliable."""
    images = outcome.images
    if images is None or not outcome.test or _no_better_than_guessing(outcome, images):
        return None
    accuracy, (guessing, _) = outcome.test[-1].accuracy, _guessing(outcome, images)
    if accuracy >= guessing + LOW * (1 - guessing):
        return None
    mean = sum(images.counts) / len(images.classes)
    return (
        f"Accuracy is low: the largest route gets {accuracy:.1%} of the test images right, with {mean:.0f} "
        "training images a class on average. A longer run, more images, or a start from a network that was "
        "trained on many images (dsnet transfer --help) may help."
    )


def _no_better_than_guessing(outcome: Outcome, images: Images) -> bool:
    """Return whether the largest route is no better than guessing, or by so little that it may be chance."""
    if not outcome.test:
        return False
    largest, (guessing, _) = outcome.test[-1], _guessing(outcome, images)
    margin = max(0.1 * (1 - guessing), 2 * _error(guessing, largest.images))
    return largest.accuracy < guessing + margin


def _guessing(outcome: Outcome, images: Images) -> tuple[float, str]:
    """Return the accuracy of guessing, and how one guesses best."""
    if outcome.classes is None:
        return 1 / max(1, len(images.classes)), "guessing"
    counts = outcome.classes.images
    commonest = max(range(len(counts)), key=counts.__getitem__)
    return counts[commonest] / sum(counts), f"always answering {images.classes[commonest]}"


# --- advice -------------------------------------------------------------------------------------------
def _advice(
    outcome: Outcome, config: TrainConfig, images: Images, metrics: Metrics, *, gated: bool
) -> list[Advice]:
    run = shlex.quote(str(outcome.folder))
    recipe = shlex.quote(str(outcome.folder / "recipe.json"))
    if not outcome.test:
        return [(f"dsnet train {recipe} --out {run} --resume", "Continues the run.")]
    predict = f"dsnet predict {run} photo.jpg --route {outcome.test[-1].route} --top 3"
    advice = [(predict, "Shows the classes of an image, at the largest route.")]
    if len(outcome.test) > 1 and images.held_out == 0:
        out = shlex.quote(f"{outcome.folder}-held")
        hold_out = f"dsnet train {recipe} --set data.hold_out=0.2 --out {out}"
        advice.append((hold_out, "Routers need images that the weights have not seen: hold some out."))
    elif len(outcome.test) > 1:
        advice += _routing_advice(outcome, run, gated=gated)
    return advice + _training_advice(outcome, config, images, recipe, _rise(metrics, images.held_out))


def _routing_advice(outcome: Outcome, run: str, *, gated: bool) -> list[Advice]:
    lowest = outcome.test[0].madds / outcome.test[-1].madds
    budget = f"{min(95, 5 * math.ceil(20 * (lowest + 0.3 * (1 - lowest))))}%"
    gate = (
        f"dsnet gate {run} --set goal=value",
        "Trains the gate, so that easy images take cheap routes. The weights stay as they are.",
    )
    return [
        *([] if gated else [gate]),
        (f"dsnet calibrate {run}", "Finds the settings for every budget, on held-out images."),
        (
            f"dsnet evaluate {run} --routed --plot routers.html",
            "Shows whether routing pays: gate and cascade beside single routes of the same cost.",
        ),
        (
            f"dsnet predict {run} photo.jpg --budget {budget}",
            f"Runs every image at its own route, for {budget} of the largest route's cost on average.",
        ),
        (
            f"dsnet bench {run} --mix measured --budget {budget}",
            "Measures what that saves in milliseconds on this machine.",
        ),
    ]


def _training_advice(
    outcome: Outcome, config: TrainConfig, images: Images, recipe: str, rise: float | None
) -> list[Advice]:
    out = shlex.quote(f"{outcome.folder}-longer")
    longer = f"dsnet train {recipe} --set optim.epochs={2 * config.optim.epochs} --out {out}"
    if _no_better_than_guessing(outcome, images):
        return [(longer, "A run twice as long shows whether there is something to learn.")]
    if rise is None:
        return []
    if rise > RISE:
        rose = f"Held-out accuracy rose by {100 * rise:.1f} points in the last fifth of the run"
        return [(longer, f"{rose}: a longer one may reach more.")]
    again = shlex.quote(f"{outcome.folder}-again")
    return [
        (
            longer,
            "Held-out accuracy always flattens at the end of a run, because the learning rate ends near "
            "zero: that does not tell whether more epochs would help. A run twice as long shows it. More "
            "images, or a network that was trained on many (dsnet transfer --help), often help more.",
        ),
        (
            f"dsnet train {recipe} --set run.seed=1 --out {again}",
            "The same settings with another seed show how much is chance.",
        ),
    ]


def _rise(metrics: Metrics, held_out: int) -> float | None:
    """Return the rise of held-out accuracy in the last fifth of the run; None if there are too few values."""
    validations = _validations(metrics)
    if len(validations) < 5:
        return None
    last = validations[-1]
    before = [line["score"] for line in validations if line["step"] <= 0.8 * last["step"]]
    rise = float(last["score"] - max(before))
    return rise if rise > _error(last["score"], held_out) else min(rise, 0.0)


def _error(share: float, count: int) -> float:
    """Return the standard error of a share of ``count`` images."""
    return math.sqrt(max(share * (1 - share), 0.0) / max(count, 1))


def _count(number: int, noun: str) -> str:
    plural = "classes" if noun == "class" else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:23]}…"
