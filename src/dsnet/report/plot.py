"""Curves and bars as SVG pictures, in light and dark, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsnet.report.page import escape
from dsnet.report.text import human

__all__ = [
    "NARROW",
    "WIDE",
    "Bar",
    "Point",
    "Size",
    "accuracy_plot",
    "bar_plot",
    "for_any_width",
    "line_plot",
]

COLOURS = ("#2f6fdb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5c940d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A picture's size and margins in its own units; text has 13 of them, whatever the size."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    title: int  # where the title begins
    ticks: int  # on an axis, at most


WIDE = Size(width=560, height=380, left=58, right=30, bottom=54, title=58, ticks=6)
NARROW = Size(width=360, height=330, left=54, right=32, bottom=50, title=10, ticks=4)  # of a phone

_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #59636e } .title { font-size: 15px; fill: #1b1f24 }
.grid { stroke: #d1d9e0; stroke-width: 1 } .back { fill: #fff }
@media (prefers-color-scheme: dark) { text { fill: #9198a1 } .title { fill: #e6edf3 }
.grid { stroke: #3d444d } .back { fill: #0d1117 } }
</style>"""


class Point(NamedTuple):
    """What a route costs and reaches."""

    madds: float
    accuracy: float  # share, 0 to 1
    label: str = ""


def for_any_width(draw: Callable[[Size], str]) -> str:
    """A picture for a page: drawn twice, of which the style shows the one whose text is legible."""
    return f'<div class="roomy">{draw(WIDE)}</div>\n<div class="narrow">{draw(NARROW)}</div>\n'


def accuracy_plot(
    title: str, curves: Mapping[str, Sequence[Point]], *, unit: str = "madds", size: Size = WIDE
) -> str:
    """Accuracy against cost: one curve a name; hover over a point for its label."""

    def shown(cost: float) -> str:
        return f"{cost:.3g} ms" if unit == "ms" else human(cost)

    dots = {
        name: [
            _Dot(p.madds, 100 * p.accuracy, f"{name} {p.label}: {p.accuracy:.2%} at {shown(p.madds)}")
            for p in curve
        ]
        for name, curve in curves.items()
    }
    axis = "milliseconds an image" if unit == "ms" else "multiply-adds an image"
    return _chart(title, dots, size, axis=axis, x_text=shown, y_text=lambda y: f"{y:g} %", least=1.0)


def line_plot(
    title: str,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    axis: str,
    percent: bool = False,
    size: Size = WIDE,
) -> str:
    """Numbers against steps or epochs: one line a name."""

    def text(value: float) -> str:
        return f"{value:g} %" if percent else f"{value:g}"

    dots = {
        name: [_Dot(x, y, f"{name}: {y:.4g} at {x:g}") for x, y in curve] for name, curve in curves.items()
    }
    return _chart(title, dots, size, axis=axis, x_text=lambda x: f"{x:g}", y_text=text, radius=1.5)


class Bar(NamedTuple):
    """A share of the whole, and what to say of it."""

    share: float
    label: str


def bar_plot(
    title: str,
    groups: Mapping[str, Sequence[Bar]],
    names: Sequence[str],
    *,
    axis: str,
    size: Size = WIDE,
) -> str:
    """Groups of bars side by side, one a name, in percent; hover over a bar for its label."""
    legend, top = _legend(list(names), size)
    bottom = size.height - size.bottom
    ticks = _ticks(0, max(1.0, *(bar.share for bars in groups.values() for bar in bars)))

    def y(share: float) -> float:
        return bottom - share / ticks[-1] * (bottom - top)

    parts = [*_frame(title, axis, size), *_rows(ticks, y, lambda share: f"{100 * share:g} %", size)]
    room = (size.width - size.left - size.right) / len(groups)
    width = min(0.8 * room / len(names), 48)
    for number, (group, bars) in enumerate(groups.items()):
        middle = size.left + (number + 0.5) * room
        parts.append(f'<text x="{middle:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(group)}</text>')
        for place, bar in enumerate(bars):
            left, colour = middle + (place - len(bars) / 2) * width, COLOURS[place % len(COLOURS)]
            parts.append(
                f'<rect class="bar" x="{left + 1:.1f}" y="{y(bar.share):.1f}" width="{width - 2:.1f}" '
                f'height="{y(0) - y(bar.share):.1f}" fill="{colour}">'
                f"<title>{escape(bar.label)}</title></rect>"
            )
            if width >= 26:  # else there is no room for a number
                parts.append(
                    f'<text x="{left + width / 2:.1f}" y="{y(bar.share) - 5:.1f}" text-anchor="middle">'
                    f"{100 * bar.share:.0f}</text>"
                )
    return "\n".join([*parts, *legend]) + "\n</svg>\n"


class _Dot(NamedTuple):
    x: float
    y: float
    tip: str


def _chart(
    title: str,
    curves: Mapping[str, Sequence[_Dot]],
    size: Size,
    *,
    axis: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    least: float = 0.0,
    radius: float = 4,
) -> str:
    """Points joined from left to right; the y axis spans at least ``least``."""
    legend, top = _legend(list(curves), size)
    bottom, right = size.height - size.bottom, size.width - size.right
    points = [point for curve in curves.values() for point in curve]
    x_ticks = _ticks(min(p.x for p in points), max(p.x for p in points), size.ticks)
    y_ticks = _ticks(min(p.y for p in points), max(p.y for p in points), least=least)

    def x(value: float) -> float:
        return size.left + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (right - size.left)

    def y(value: float) -> float:
        return bottom - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (bottom - top)

    parts = [*_frame(title, axis, size), *_rows(y_ticks, y, y_text, size)]
    for tick in x_ticks:
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{x_text(tick)}</text>')
    for number, curve in enumerate(curves.values()):
        colour = COLOURS[number % len(COLOURS)]
        ordered = sorted(curve)
        way = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in ordered)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="{radius:g}" fill="{colour}">'
            f"<title>{escape(p.tip)}</title></circle>"
            for p in ordered
        ]
    return "\n".join([*parts, *legend]) + "\n</svg>\n"


def _frame(title: str, axis: str, size: Size) -> list[str]:
    """The picture's beginning: style, background, title, and what the x axis shows."""
    middle, box = (size.left + size.width - size.right) / 2, f"0 0 {size.width} {size.height}"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">{_STYLE}',
        f"<title>{escape(title)}</title>",
        f'<rect class="back" width="{size.width}" height="{size.height}"/>',
        f'<text class="title" x="{size.title}" y="22">{escape(title)}</text>',
        f'<text x="{middle}" y="{size.height - 14}" text-anchor="middle">{escape(axis)}</text>',
    ]


def _rows(
    ticks: Sequence[float], y: Callable[[float], float], text: Callable[[float], str], size: Size
) -> list[str]:
    """The lines of the y axis, with their numbers."""
    parts = []
    for tick in ticks:
        at = f'y1="{y(tick):.1f}" y2="{y(tick):.1f}"'
        parts.append(f'<line class="grid" x1="{size.left}" x2="{size.width - size.right}" {at}/>')
        parts.append(f'<text x="{size.left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{text(tick)}</text>')
    return parts


def _legend(names: list[str], size: Size) -> tuple[list[str], int]:
    """A line or more of names with their colours, none for a single curve; and where the grid begins."""
    parts: list[str] = []
    at, line = size.title, 40
    for number, name in enumerate(names if len(names) > 1 else ()):
        width = 30 + 7 * len(name)
        if at + width > size.width and at > size.title:
            at, line = size.title, line + 18
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<circle cx="{at + 5}" cy="{line - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{at + 14}" y="{line}">{escape(name)}</text>')
        at += width
    return parts, line + 12


def _ticks(low: float, high: float, most: int = 6, least: float = 0) -> list[float]:
    """Round numbers that enclose the span, widened where it is narrower than ``least`` or nothing."""
    if high - low <= least:
        more = max(least, 0.1 * abs(high) if high == low else 0.0, 1e-9)
        low, high = low - more / 2, high + more / 2
    span = high - low
    power = 10 ** math.floor(math.log10(span / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 10) for number in range(first, last + 1)]
