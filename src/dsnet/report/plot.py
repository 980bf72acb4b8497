"""Accuracy against cost as an SVG picture, in light and dark, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dsnet.report.page import escape
from dsnet.report.text import human

__all__ = ["Point", "accuracy_plot"]

COLOURS = ("#2f6fdb", "#d9480f", "#2b8a3e", "#862e9c", "#c2255c", "#5c940d")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 440, 70, 34, 48, 56

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


def accuracy_plot(title: str, curves: Mapping[str, Sequence[Point]], *, unit: str = "madds") -> str:
    """One curve a name, points joined from the cheapest to the dearest; hover for their labels."""
    axis = "milliseconds an image" if unit == "ms" else "multiply-adds an image"

    def shown(cost: float) -> str:
        return f"{cost:.3g} ms" if unit == "ms" else human(cost)

    points = [point for curve in curves.values() for point in curve]
    x_ticks = _ticks(min(p.madds for p in points), max(p.madds for p in points))
    y_ticks = _ticks(min(100 * p.accuracy for p in points), max(100 * p.accuracy for p in points), least=1)

    def x(madds: float) -> float:
        return LEFT + (madds - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def y(percent: float) -> float:
        return HEIGHT - BOTTOM - (percent - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{_STYLE}',
        f"<title>{escape(title)}</title>",
        f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="22">{escape(title)}</text>',
    ]
    for tick in x_ticks:
        parts.append(
            f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        parts.append(
            f'<text x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{shown(tick)}</text>'
        )
    for tick in y_ticks:
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} %</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 14}" text-anchor="middle">{axis}</text>'
    )
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        ordered = sorted(curve)
        way = " ".join(f"{x(p.madds):.1f},{y(100 * p.accuracy):.1f}" for p in ordered)
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for p in ordered:
            tip = f"{name} {p.label}: {p.accuracy:.2%} at {shown(p.madds)}"
            parts.append(
                f'<circle cx="{x(p.madds):.1f}" cy="{y(100 * p.accuracy):.1f}" r="4" fill="{colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
        if len(curves) > 1:
            at = LEFT + number * (WIDTH - LEFT - RIGHT) / len(curves)
            parts.append(f'<circle cx="{at + 5:.1f}" cy="36" r="4" fill="{colour}"/>')
            parts.append(f'<text x="{at + 14:.1f}" y="40">{escape(name)}</text>')
    return "\n".join(parts) + "\n</svg>\n"


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
