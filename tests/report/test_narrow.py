"""Pages on a phone, 375 pixels wide: charts are legible and tables scroll."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dsnet.detection.eval.evaluate import DetectionResult
from dsnet.report.bench import bench_page
from dsnet.report.detection import detection_page
from dsnet.report.page import bar_chart, html_table, page
from dsnet.report.plot import (
    NARROW,
    WIDE,
    Bar,
    Chart,
    Point,
    accuracy_plot,
    bar_plot,
    line_plot,
)
from tests.support.bench_result import bench_result

ROOM = 375 - 2 * 16  # pixels beside the page's padding
LEGIBLE = 11  # pixels of text
GLYPH = 7.2  # units that a character takes, of text of 13


def accuracies() -> Chart:
    names = ("single routes", "stand-alone", "gate", "cascade", "oracle")
    curves = {
        name: [Point(1.2345e8 * n, 0.7 + 0.02 * n, f"route {n}") for n in range(1, 9)] for name in names
    }
    return accuracy_plot(curves)


def milliseconds() -> Chart:
    return accuracy_plot({"routes": [Point(0.123, 0.97), Point(0.124, 0.9712)]}, unit="ms", title="A title")


def losses() -> Chart:
    curves = {f"loss of a network/{n}": [(step, 1 / step) for step in range(1, 90000, 999)] for n in range(6)}
    return line_plot("Stage I: losses of the sandwich's networks", curves, axis="step")


def bars() -> Chart:
    groups = {f"batch {n}": [Bar(0.2 * i, "a bar") for i in range(1, 4)] for n in (1, 16, 256)}
    return bar_plot(groups, ("multiply-adds", "ideal time", "measured time"), axis="percent")


@pytest.mark.parametrize("make_chart", [accuracies, milliseconds, losses, bars])
def test_chart_text_is_legible_and_inside_the_picture_on_a_phone(make_chart: Callable[[], Chart]) -> None:
    shown = make_chart().html()
    narrow = shown.split('<div class="narrow">')[1]
    width = int(re.findall(r'viewBox="0 0 (\d+) \d+"', narrow)[0])
    size = int(re.findall(r"text \{ font: (\d+)px", narrow)[0])
    assert size * ROOM / width >= LEGIBLE
    for x_text, anchor, text in re.findall(
        r'<text(?: class="title")? x="([\d.]+)" y="[\d.]+"( text-anchor="\w+")?>(.*?)<', narrow
    ):
        extent = GLYPH * len(text)
        left = float(x_text) - extent * (1 if "end" in anchor else 0.5 if "middle" in anchor else 0)
        assert left >= 0, text
        assert left + extent <= width + 1, text
    ticks = re.findall(r'<text x="([\d.]+)" y="(\d+)" text-anchor="middle">([^<]+)<', narrow)
    below = [(float(x), text) for x, y, text in ticks if int(y) == NARROW.height - NARROW.bottom + 18]
    for (x, text), (following, other) in itertools.pairwise(below):
        assert x + GLYPH * len(text) / 2 <= following - GLYPH * len(other) / 2, (text, other)


def test_a_page_shows_one_of_the_two_sizes_of_a_chart() -> None:
    shown = page("t", accuracies().html())
    assert re.findall(r'viewBox="0 0 (\d+)', shown) == [str(WIDE.width), str(NARROW.width)]
    style = shown.split("<style>")[1].split("</style>")[0]
    outside, small = style.split("@media (max-width")
    assert ".narrow { display: none }" in outside
    assert ".roomy { display: none } .narrow { display: block }" in small
    assert accuracies().svg().startswith("<svg")


def result(route: int | None) -> DetectionResult:
    mean = {"voc2007": 0.5, "voc2010": 0.5, "coco": 0.2}
    return DetectionResult(
        route=route, madds=1e9, mean=mean, classes={"red": 0.5}, images=6, route_counts={0: 6}
    )


@pytest.mark.parametrize(
    "shown",
    [
        bench_page(bench_result()),
        detection_page("net", Path("run"), ["red"], [result(0), result(None)], []),
        page("t", html_table(["a", "b <c>"], [["1", "2"]])),
    ],
)
def test_every_table_scrolls_sideways_and_shows_it(shown: str) -> None:
    assert shown.count("<table") == len(re.findall(r'<div class="wide"[^>]*><table', shown)) > 0
    style = shown.split("<style>")[1].split("</style>")[0]
    wide = style.split(".wide {")[1].split("}")[0]
    assert "overflow-x: auto" in wide
    assert "var(--shade)" in wide
    assert re.search(r"td:first-child, th:first-child \{ position: sticky; left: 0", style)
    assert "<b <c>" not in shown


def test_bars_keep_their_proportions_on_a_phone() -> None:
    shown = bar_chart(["a long name", "b"], [220.0, 110.0], ["220 images", "110 images"])
    assert re.findall(r"calc\(([\d.]+) \* var\(--room\)\)", shown) == ["1.000", "0.500"]
