"""Line and bar charts as SVG: light and dark, legible on a phone, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dsnet.report.page import escape
from dsnet.report.text import human

__all__ = [
    "NARROW",
    "WIDE",
    "Bar",
    "Chart",
    "Point",
    "Size",
    "accuracy_plot",
    "bar_plot",
    "by_image_size",
    "line_plot",
]

MAX_SIZES = 3  # image sizes that get a curve, and a colour, of their own
COLOURS = ("#2f6fdb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5c940d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size and margins of a picture in SVG units; text is 13 units high at any size."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    title: int  # x of the title
    ticks: int  # on an axis, at most


WIDE = Size(width=560, height=380, left=58, right=30, bottom=54, title=58, ticks=6)
NARROW = Size(width=360, height=330, left=54, right=32, bottom=50, title=10, ticks=4)  # for a phone

_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #59636e } .title { font-size: 15px; fill: #1b1f24 }
.grid { stroke: #d1d9e0; stroke-width: 1 } .back { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #9198a1 } .title { fill: #e6edf3 }
.grid { stroke: #3d444d } .back { fill: #0d1117 } }
</style>"""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that can be drawn at any size."""

    draw: Callable[[str, Size], str]
    title: str = ""

    def svg(self, title: str | None = None, size: Size = WIDE) -> str:
        """Draw an SVG file."""
        return self.draw(self.title if title is None else title, size)

    def html(self) -> str:
        """Draw the chart for a page: at two sizes, of which the page's style shows the legible one."""
        wide, narrow = self.svg(), self.svg(size=NARROW)
        return f'<div class="roomy">{wide}</div>\n<div class="narrow">{narrow}</div>\n'


class Point(NamedTuple):
    """Cost and accuracy of a route or a router."""

    madds: float
    accuracy: float  # share, 0 to 1
    label: str = ""


def by_image_size(name: str, points: Sequence[tuple[int | None, Point]]) -> dict[str, list[Point]]:
    """Return points of routes as a curve for each image size; as one where sizes are many or the same.

    Args:
        name: Name of the curve, or of what its names begin with.
        points: The image size of each route (None: routes do not differ in it) and its point.
    """
    one = len({size for size, _ in points}) > MAX_SIZES
    curves: dict[str, list[Point]] = {}
    for size, point in points:
        curve = name if size is None or one else f"{name}, {size} px"
        label = f"{point.label} ({size} px)" if one else point.label
        curves.setdefault(curve, []).append(point._replace(label=label))
    return curves


class Bar(NamedTuple):
    """A share, and the text shown when the mouse is over its bar."""

    share: float
    label: str


class _Dot(NamedTuple):
    x: float
    y: float
    label: str


def accuracy_plot(curves: Mapping[str, Sequence[Point]], *, unit: str = "madds", title: str = "") -> Chart:
    """Plot accuracy against cost, one curve per name; hover over a point for its label."""

    def cost_text(cost: float) -> str:
        return f"{cost:.3g} ms" if unit == "ms" else human(cost)

    dots = {
        name: [
            _Dot(p.madds, 100 * p.accuracy, f"{name} {p.label}: {p.accuracy:.2%} at {cost_text(p.madds)}")
            for p in curve
        ]
        for name, curve in curves.items()
    }
    axis = "milliseconds an image" if unit == "ms" else "multiply-adds an image"
    draw = partial(_line_chart, dots, axis=axis, x_text=cost_text, percent=True, min_span=1.0, radius=4)
    return Chart(draw, title)


def line_plot(
    title: str, curves: Mapping[str, Sequence[tuple[float, float]]], *, axis: str, percent: bool = False
) -> Chart:
    """Plot values against steps or epochs, one line per name."""
    dots = {
        name: [_Dot(x, y, f"{name}: {y:.4g} at {x:g}") for x, y in curve] for name, curve in curves.items()
    }
    draw = partial(_line_chart, dots, axis=axis, x_text=_number, percent=percent, min_span=0.0, radius=1.5)
    return Chart(draw, title)


def bar_plot(groups: Mapping[str, Sequence[Bar]], names: Sequence[str], *, axis: str) -> Chart:
    """Plot groups of bars in percent, one bar per name; hover over a bar for its label."""
    return Chart(partial(_bar_chart, groups, names, axis))


def _line_chart(
    curves: Mapping[str, Sequence[_Dot]],
    title: str,
    size: Size,
    *,
    axis: str,
    x_text: Callable[[float], str],
    percent: bool,
    min_span: float,
    radius: float,
) -> str:
    points = [point for curve in curves.values() for point in curve]
    y_ticks = _ticks(min(p.y for p in points), max(p.y for p in points), min_span=min_span)
    parts, top, bottom, y = _frame(title, axis, size, list(curves), y_ticks, "%" if percent else "")
    x_ticks = _ticks(min(p.x for p in points), max(p.x for p in points), size.ticks)
    x = partial(_scaled, x_ticks, size.left, size.width - size.right)
    for tick in x_ticks:
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{x_text(tick)}</text>')
    for number, curve in enumerate(curves.values()):
        colour = COLOURS[number % len(COLOURS)]
        ordered = sorted(curve)
        line = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in ordered)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="{radius:g}" fill="{colour}">'
            f"<title>{escape(p.label)}</title></circle>"
            for p in ordered
        ]
    return "\n".join([*parts, "</svg>", ""])


def _bar_chart(
    groups: Mapping[str, Sequence[Bar]], names: Sequence[str], axis: str, title: str, size: Size
) -> str:
    ticks = _ticks(0, 100 * max(1.0, *(bar.share for bars in groups.values() for bar in bars)))
    parts, _, bottom, y = _frame(title, axis, size, names, ticks, "%")
    room = (size.width - size.left - size.right) / len(groups)
    width = min(0.8 * room / len(names), 48)
    for number, (group, bars) in enumerate(groups.items()):
        middle = size.left + (number + 0.5) * room
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(group)}</text>')
        for index, bar in enumerate(bars):
            left, top = middle + (index - len(bars) / 2) * width, y(100 * bar.share)
            parts.append(
                f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
                f'height="{bottom - top:.1f}" fill="{COLOURS[index % len(COLOURS)]}">'
                f"<title>{escape(bar.label)}</title></rect>"
            )
            if width >= 26:  # else there is no room for a number
                x = left + width / 2
                share = f"{100 * bar.share:.0f}"
                parts.append(f'<text x="{x:.1f}" y="{top - 5:.1f}" text-anchor="middle">{share}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _scaled(ticks: Sequence[float], start: float, stop: float, value: float) -> float:
    """Map the span of the ticks to the span from ``start`` to ``stop``."""
    return start + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (stop - start)


def _frame(
    title: str, axis: str, size: Size, names: Sequence[str], y_ticks: Sequence[float], unit: str
) -> tuple[list[str], int, int, Callable[[float], float]]:
    """Draw style, background, title, legend, the label of the x axis, and the y axis with its grid.

    Returns:
        The parts of the picture, top and bottom of the grid, and the function from values to heights.
    """
    right, view = size.width - size.right, f"0 0 {size.width} {size.height}"
    middle = (size.left + right) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img">{_STYLE}',
        f"<title>{escape(title)}</title>",
        f'<rect class="back" width="{size.width}" height="{size.height}"/>',
        f'<text class="title" x="{size.title}" y="22">{escape(title)}</text>',
        f'<text x="{middle}" y="{size.height - 14}" text-anchor="middle">{escape(axis)}</text>',
    ]
    x, top = size.title, 40
    for number, name in enumerate(names if len(names) > 1 else ()):  # in one or more lines
        width = 30 + 7 * len(name)
        if x + width > size.width and x > size.title:
            x, top = size.title, top + 18
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<circle cx="{x + 5}" cy="{top - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{top}">{escape(name)}</text>')
        x += width
    top, bottom = top + 12, size.height - size.bottom
    y = partial(_scaled, y_ticks, bottom, top)
    for tick in y_ticks:
        text = f"{_number(tick)} {unit}".rstrip()
        height = f'y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        parts.append(f'<line class="grid" x1="{size.left}" x2="{right}" {height}/>')
        parts.append(f'<text x="{size.left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    return parts, top, bottom, y


def _ticks(low: float, high: float, max_ticks: int = 6, min_span: float = 0) -> list[float]:
    """Round numbers that enclose the span from ``low`` to ``high``, widened to ``min_span``."""
    if high - low <= min_span:
        more = max(min_span, 0.1 * abs(high) if high == low else 0.0, 1e-9)
        low, high = low - more / 2, high + more / 2
    span = high - low
    power = 10 ** math.floor(math.log10(span / max_ticks))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= max_ticks)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _number(value: float) -> str:
    return f"{value:g}"
