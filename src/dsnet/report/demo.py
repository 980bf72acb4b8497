"""The page of `dsnet demo`: the measured gain, accuracy against milliseconds, images by route."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.models.shipped import ShippedWeights
from dsnet.report.page import bar_chart, command, escape, html_table, image_tag, page
from dsnet.report.plot import Point, accuracy_plot, by_image_size
from dsnet.routing.policies import RoutedOutput

__all__ = ["Example", "Measured", "demo_page", "headline", "measured_rows"]

SURE = 2.0  # standard errors from which on a difference counts


class Example(NamedTuple):
    """A test image and its prediction."""

    image: Tensor  # [3, H, W] in [0, 1]
    path: tuple[int, ...]  # the routes that ran; the last one answered
    label: str
    predicted: str


class Measured(NamedTuple):
    """What one route, or a router at a budget, reached on the test images."""

    name: str
    ms: float  # an image
    correct: Tensor  # [N] booleans
    output: RoutedOutput
    image_size: int | None = None  # of a route, where routes differ in it

    @property
    def accuracy(self) -> float:
        """Share of the images that are right."""
        return float(self.correct.double().mean())

    def difference(self, other: Measured) -> tuple[float, float]:
        """Return the difference in accuracy from another, image by image, and its standard error."""
        by_image = self.correct.double() - other.correct.double()
        return float(by_image.mean()), float(by_image.std() / len(by_image) ** 0.5)


def headline(routed: Measured, largest: Measured) -> str:
    """Say in one sentence what routing gained, or that it gained nothing."""
    share, ours, theirs = f"{routed.ms / largest.ms:.0%}", f"{routed.accuracy:.1%}", f"{largest.accuracy:.1%}"
    difference, error = routed.difference(largest)
    if routed.ms >= largest.ms:
        return (
            f"No gain on this machine: routed, {ours} of the images are right in {share} of the time of the "
            f"largest route, which gets {theirs} right."
        )
    if difference < -SURE * error:
        return (
            f"Routing gets {ours} of the images right in {share} of the largest route's measured time on "
            f"this machine, but that route alone gets {theirs}: here routing trades accuracy for time."
        )
    return (
        f"Routing gets {ours} of the images right in {share} of the largest route's measured time on this "
        f"machine; that route alone gets {theirs}."
    )


def beside_single(routed: Measured, singles: Sequence[Measured]) -> str:
    """Compare with single routes for all images, chosen on the test images, which favours them."""
    as_good = [single for single in singles if single.accuracy >= routed.accuracy]
    within = [single for single in singles if single.ms <= routed.ms]
    difference, error = routed.difference(singles[-1])
    parts = [
        f"The difference from the largest route is {100 * difference:+.1f} ± {100 * error:.1f} points, image "
        "by image."
    ]
    if within:
        best = max(within, key=lambda single: single.accuracy)
        difference, error = routed.difference(best)
        parts.append(
            f"Of the single routes that take no longer, the best one, {best.name}, gets {best.accuracy:.1%} "
            f"right in {best.ms / singles[-1].ms:.0%} of the time: routing is {100 * difference:+.1f} ± "
            f"{100 * error:.1f} points."
        )
    if as_good:
        fastest = min(as_good, key=lambda single: single.ms)
        parts.append(
            f"The fastest single route that is at least as accurate here, {fastest.name}, takes "
            f"{fastest.ms / singles[-1].ms:.0%}."
        )
    else:
        parts.append("No single route is as accurate here.")
    return " ".join(parts)


def measured_rows(rows: Sequence[Measured], largest: Measured) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of a table of routes and routers."""
    header = ["", "accuracy", "difference", "ms an image", "of the largest"]
    cells = []
    for row in rows:
        difference, error = row.difference(largest)
        told = "–" if row is largest else f"{100 * difference:+.2f} ± {100 * error:.2f}"
        cells.append([row.name, f"{row.accuracy:.2%}", told, f"{row.ms:.3f}", f"{row.ms / largest.ms:.0%}"])
    return header, cells


def demo_page(
    *,
    weights: ShippedWeights,
    made_by: str,
    calibrated_on: int,
    singles: Sequence[Measured],
    routed: Sequence[Measured],
    main: Measured,
    folder: Path,
    batch: int,
    rounds: int,
    examples: Sequence[Example],
) -> str:
    """Build the page.

    Args:
        weights: The network.
        made_by: The command that made the page.
        calibrated_on: Number of images that the cascade was calibrated on.
        singles: All images at one route, for every route; the largest one last.
        routed: The cascade at several budgets.
        main: The one of them that the page leads with.
        folder: Where the demo wrote the run and test images.
        batch: Images in a batch.
        rounds: How often each batch was timed.
        examples: Test images with their predictions at ``main``.
    """
    largest, images = singles[-1], len(main.correct)
    sizes = (row.image_size for row in singles)
    curves = by_image_size("single routes", list(zip(sizes, map(_point, singles), strict=True)))
    curves["cascade"] = [_point(row) for row in routed]
    body = [
        f"<p><strong>{escape(headline(main, largest))}</strong></p>",
        f"<p>{escape(beside_single(main, singles))}</p>",
        "<h2>Accuracy against measured time</h2>",
        accuracy_plot(curves, unit="ms").html(),
        "<p>Single routes: all images at the same route of the network. Cascade: a small route answers all "
        "images that it is sure of, a larger one the others, at several budgets (shares of the largest "
        "route's multiply-adds). All of them are slices of one set of weights.</p>",
        html_table(*measured_rows([*singles, *routed], largest)),
        "<p>Difference: points from the largest route, image by image, ± standard error. The budgets were "
        f"set on {calibrated_on} images; accuracies and times are those of {images} others.</p>",
        _answered(main),
        "<h2>Images by route</h2>",
        "<p>Up to two mistakes of each route come first.</p>",
        _gallery(examples),
        "<h2>How it was measured</h2>",
        f"<p>{escape(_conditions(weights, made_by, batch, rounds))}</p>",
        _next_steps(folder),
    ]
    return page("Easy images cost little", *body)


def _point(row: Measured) -> Point:
    return Point(row.ms, row.accuracy, row.name)


def _answered(main: Measured) -> str:
    counts = torch.bincount(main.output.routes).tolist()
    taken = {route: count for route, count in enumerate(counts) if count}
    captions = [f"{count} images, {count / sum(counts):.0%}" for count in taken.values()]
    labels = [f"route {route}" for route in taken]
    title = f"<h2>Routes that answered: {escape(main.name)}</h2>"
    return title + bar_chart(labels, list(taken.values()), captions)


def _conditions(weights: ShippedWeights, made_by: str, batch: int, rounds: int) -> str:
    return (
        f"Made by {made_by}: the weights {weights.name} ({weights.summary}; SHA-256 {weights.sha256[:16]}…, "
        f"{weights.license}) as a plan of dsnet.runtime with backend eager. CPU threads: "
        f"{torch.get_num_threads()}. Images came {batch} at a time, which the plan splits into the sizes "
        f"that it measured as fastest. Routes and budgets took turns; the times are medians of {rounds} "
        f"rounds, resizing included. torch {torch.__version__}, {platform.machine()}, {platform.system()}. "
        "The images are a part of Fashion-MNIST (Zalando SE, MIT licence); the network was not trained on "
        "them."
    )


def _next_steps(folder: Path) -> str:
    words = ["dsnet", "predict", str(folder / "supernet"), str(folder / "images"), "--budget", "20%"]
    return "<h2>Go on</h2>" + command(shlex.join(words), "Class, route and cost of some of the test images.")


def _gallery(examples: Sequence[Example]) -> str:
    parts = []
    for path in dict.fromkeys(example.path for example in examples):
        figures = "".join(
            f"<figure>{image_tag(e.image, e.label)}<figcaption>{_caption(e)}</figcaption></figure>"
            for e in examples
            if e.path == path
        )
        ran = " → ".join(map(str, path))
        parts.append(f"<p>Answered by route <strong>{path[-1]}</strong> (ran: {ran})</p>")
        parts.append(f'<div class="grid">{figures}</div>')
    return "\n".join(parts)


def _caption(example: Example) -> str:
    if example.predicted == example.label:
        return escape(example.label)
    return f"<strong>{escape(example.predicted)}</strong>, but is {escape(example.label)}"
