"""One page that tells what a run came to: curves, routes, pictures, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsnet.calibration.compare import Comparison
from dsnet.report.comparison import gated_rows, router_curves, router_section, row_at
from dsnet.report.page import bar_chart, escape, image_tag, page
from dsnet.report.plot import accuracy_plot, line_plot
from dsnet.routing.cost_table import CostTable
from dsnet.routing.router import format_cost

__all__ = ["Example", "Story", "story_page"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """An image and what became of it."""

    image: Tensor  # [3, H, W] in [0, 1]
    route: int
    ran: tuple[int, ...]  # all routes that ran
    label: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Story:
    """What the page tells."""

    model: str
    command: str
    costs: CostTable
    comparison: Comparison  # at some budgets
    curve: Comparison  # at many
    main: float  # the budget that is looked at closely
    picked: str  # the one of gate and cascade that was better there on held-out images
    examples: Sequence[Example]
    stage1: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    stage2: Sequence[Mapping[str, Any]]
    times: Mapping[str, float]  # milliseconds an image


def story_page(story: Story) -> str:
    """The whole page."""
    best = row_at(story.comparison, story.picked, story.main)
    largest = max(story.comparison.singles, key=lambda point: point.cost)
    share = best.cost / story.costs.largest
    kinds = dict.fromkeys(row.router for row in gated_rows(story.comparison))
    body = [
        f"<p><strong>{escape(story.model)}</strong> on handwritten digits. One set of weights, several "
        f"routes; the {story.picked} sends each image down one of them. At <strong>{share:.0%}</strong> of "
        f"the largest route's cost it gets <strong>{best.accuracy:.1%}</strong> of "
        f"{story.comparison.images} test images right; everyone at the largest route: "
        f"{largest.accuracy:.1%}. Made by <code>{escape(story.command)}</code>.</p>",
        f"<p><strong>{escape(str(story.comparison.verdict))}</strong></p>",
        "<h2>Accuracy against cost</h2>",
        accuracy_plot(router_curves(story.curve), unit=story.costs.unit).html(),
        "<p>Single routes: all images at the same route of the supernet. Stand-alone: a network of that size "
        "trained by itself, for as long. Gate and cascade: one checkpoint, one knob. Oracle: the cheapest "
        "route that is right, which nobody can know beforehand. With "
        f"{story.comparison.images} test images the standard error of an accuracy is about "
        f"{100 * best.error:.1f} points: small differences are chance.</p>",
        router_section(story.comparison, story.costs),
        f"<h2>Routes taken at {escape(format_cost(story.main, story.costs.unit))}</h2>",
        *(_histogram(story, kind) for kind in kinds),
        f"<h2>Images by route ({story.picked})</h2>",
        _gallery(story),
        "<h2>Measured time</h2>",
        "<p>Milliseconds an image, batch of 256, one CPU thread, medians; the routes took turns.</p>",
        bar_chart(
            list(story.times), list(story.times.values()), [f"{t:.3f} ms" for t in story.times.values()]
        ),
        "<h2>Training</h2>",
        _training(story),
    ]
    return page("Easy images cost little", *body)


def _histogram(story: Story, kind: str) -> str:
    row = row_at(story.comparison, kind, story.main)
    total = sum(row.route_counts.values())
    groups = ", ".join(
        f"{name} {'–' if value is None else f'{value:.0%}'}" for name, value in row.by_difficulty.items()
    )
    return f"<p><strong>{kind}</strong>: {row.accuracy:.1%} right ({groups})</p>" + bar_chart(
        [f"route {route}" for route in row.route_counts],
        list(row.route_counts.values()),
        [f"{count} images, {count / total:.0%}" for count in row.route_counts.values()],
    )


def _gallery(story: Story) -> str:
    parts = []
    for route in dict.fromkeys(example.route for example in story.examples):
        own = [example for example in story.examples if example.route == route]
        ran = " → ".join(map(str, own[0].ran))
        figures = "".join(
            f"<figure>{image_tag(e.image, e.label)}<figcaption>{_caption(e)}</figcaption></figure>"
            for e in own
        )
        parts.append(f"<p>Answered by route <strong>{route}</strong> (ran: {ran})</p>")
        parts.append(f'<div class="grid">{figures}</div>')
    return "\n".join(parts)


def _caption(example: Example) -> str:
    if example.answer == example.label:
        return escape(example.label)
    return f"<strong>{escape(example.answer)}</strong>, but is {escape(example.label)}"


def _training(story: Story) -> str:
    steps = [line for line in story.stage1 if "loss" in line]
    terms = [name for name in steps[0] if "/" in name]
    losses = {name: [(line["step"], line[name]) for line in steps if name in line] for name in terms}
    checks = [line for line in story.stage1 if "score" in line]
    routes = [name for name in checks[0] if name.startswith("route_")]
    reached = {
        name.replace("_", " "): [(line["epoch"] + 1, 100 * line[name]) for line in checks] for name in routes
    }
    gate = {"loss": [(line["step"], line["loss"]) for line in story.stage2]}
    charts = (
        line_plot("Stage I: losses of the sandwich's networks", losses, axis="step"),
        line_plot("Stage I: held-out accuracy", reached, axis="epoch", percent=True),
        line_plot("Stage II: the gate's loss", gate, axis="step"),
    )
    return "\n".join(chart.html() for chart in charts)
