"""The page of `dsnet demo`: accuracy against cost, images by route, measured time, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from dsnet.calibration.compare import Comparison
from dsnet.report.comparison import answered_section, gated_rows, router_curves, router_section, row_at
from dsnet.report.page import bar_chart, escape, image_tag, page
from dsnet.report.plot import accuracy_plot, line_plot
from dsnet.report.training import training_charts
from dsnet.routes import RouteSpace
from dsnet.routing.cost_table import CostTable

__all__ = ["Example", "demo_page"]


class Example(NamedTuple):
    """A test image and its prediction."""

    image: Tensor  # [3, H, W] in [0, 1]
    path: tuple[int, ...]  # the routes that ran; the last one answered
    label: str
    predicted: str


def demo_page(
    *,
    model: str,
    command: str,
    comparison: Comparison,
    curve: Comparison,
    costs: CostTable,
    space: RouteSpace,
    budget: float,
    router: str,
    examples: Sequence[Example],
    times: Mapping[str, float],
    stage1: Sequence[Mapping[str, Any]],
    stage2: Sequence[Mapping[str, Any]],
) -> str:
    """Build the page.

    Args:
        model: Name of the network.
        command: The command that made the page.
        comparison: Routers at the budgets of the table.
        curve: Routers at many budgets, for the chart.
        costs: Costs of the routes.
        space: Routes of the network.
        budget: The budget that is shown in detail.
        router: The router of the examples: the better one at this budget on held-out images.
        examples: Test images with their predictions.
        times: Milliseconds an image by name.
        stage1: Lines of ``metrics.jsonl`` of the supernet.
        stage2: Lines of ``metrics.jsonl`` of the gate.
    """
    best = row_at(comparison, router, budget)
    largest = max(comparison.singles, key=lambda point: point.cost)
    kinds = dict.fromkeys(row.router for row in gated_rows(comparison))
    gate_loss = {"loss": [(line["step"], line["loss"]) for line in stage2]}
    body = [
        f"<p><strong>{escape(model)}</strong> on handwritten digits. One set of weights, several routes; the "
        f"{router} sends each image down one of them. At <strong>{best.cost / costs.largest:.0%}</strong> of "
        f"the largest route's cost it gets <strong>{best.accuracy:.1%}</strong> of {comparison.images} test "
        f"images right; all images at the largest route: {largest.accuracy:.1%}. Made by "
        f"<code>{escape(command)}</code>.</p>",
        f"<p><strong>{escape(str(comparison.verdict))}</strong></p>",
        "<h2>Accuracy against cost</h2>",
        accuracy_plot(router_curves(curve, space), unit=costs.unit).html(),
        "<p>Single routes: all images at the same route of the supernet. Stand-alone: a network of that size "
        "trained by itself, for as long. Gate and cascade: one checkpoint at many budgets. Oracle: the "
        "cheapest route that is right, which nobody can know beforehand. With "
        f"{comparison.images} test images the standard error of an accuracy is about "
        f"{100 * best.error:.1f} points: small differences are chance.</p>",
        router_section(comparison, costs, space),
        *(answered_section(row_at(comparison, kind, budget), costs, space) for kind in kinds),
        f"<h2>Images by route ({router})</h2>",
        _gallery(examples),
        "<h2>Measured time</h2>",
        "<p>Milliseconds an image, batch of 256, one CPU thread, medians; the routes took turns.</p>",
        bar_chart(list(times), list(times.values()), [f"{ms:.3f} ms" for ms in times.values()]),
        *training_charts(stage1),
        line_plot("Stage II: the gate's loss", gate_loss, axis="step").html(),
    ]
    return page("Easy images cost little", *body)


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
