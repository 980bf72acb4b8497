"""A detector's run as one page: what every route finds, at what cost, and some images to look at."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence
from pathlib import Path

from dsnet.detection.draw import drawn
from dsnet.detection.evaluate import DetectionResult
from dsnet.detection.predict import Found
from dsnet.report.page import bar_chart, escape, page
from dsnet.report.plot import Point, accuracy_plot
from dsnet.report.text import human

__all__ = ["detection_page"]

WIDE = 640  # pixels of an image on the page
RULES = {"voc2007": "mAP 2007", "voc2010": "mAP 2010", "coco": "COCO"}


def detection_page(
    model: str,
    folder: Path,
    classes: Sequence[str],
    results: Sequence[DetectionResult],
    examples: Sequence[Found],
) -> str:
    """The page of a run that has come to its end."""
    routes = [result for result in results if result.route is not None]
    gate = next((result for result in results if result.route is None), None)
    largest, shown = routes[-1], gate or routes[-1]
    title = f"{len(classes)} kinds of boxes: mAP {100 * shown.mean['voc2007']:.1f}"
    text = (
        f"<strong>{escape(model)}</strong> with an FSSD detector, on {largest.images:,} test images. The "
        f"largest route reaches {100 * largest.mean['voc2007']:.1f} (VOC 2007's rule) with "
        f"{human(largest.madds)} multiply-adds"
    )
    if len(routes) > 1:
        share = routes[0].madds / largest.madds
        text += f", the smallest {100 * routes[0].mean['voc2007']:.1f} with {share:.0%} of them"
    text += "."
    if gate is not None:
        taken = ", ".join(f"{count} at route {route}" for route, count in gate.taken.items())
        reached = f"<strong>{100 * gate.mean['voc2007']:.1f}</strong>"
        text += (
            f" Each image at the route that its gate takes: {reached} with "
            f"{gate.madds / largest.madds:.0%} ({taken})."
        )
    run = shlex.quote(str(folder))
    at = "" if gate is not None else f" --route {largest.route}"
    body = [
        f"<p>{text}</p>",
        "<h2>Precision against cost</h2>",
        _plot(routes, gate),
        _table(results),
        f"<h2>Classes</h2><p>Average precision {'with the gate' if gate else 'at the largest route'}.</p>",
        bar_chart(
            list(shown.classes), list(shown.classes.values()), [f"{ap:.1%}" for ap in shown.classes.values()]
        ),
        "<h2>Test images</h2>",
        *(_example(found, classes) for found in examples),
        "<h2>What to do next</h2>",
        f"<pre><code>{escape(f'dsnet detect predict {run} photos --draw found{at}')}</code></pre>"
        "<p>Boxes in your own images, as a table and drawn; --out boxes.jsonl writes them down.</p>",
        f"<pre><code>{escape(f'dsnet detect evaluate {run} --data DIR --split test')}</code></pre>"
        "<p>The same figures on other images.</p>",
    ]
    return page(title, "\n".join(body))


def _plot(routes: Sequence[DetectionResult], gate: DetectionResult | None) -> str:
    curves = {"routes": [Point(r.madds, r.mean["voc2007"], f"route {r.route}") for r in routes]}
    if gate is not None:
        curves["gate"] = [Point(gate.madds, gate.mean["voc2007"])]
    return accuracy_plot("mAP by VOC 2007's rule", curves)


def _table(results: Sequence[DetectionResult]) -> str:
    header = "".join(f"<th>{name}</th>" for name in ("route", "MAdds", *RULES.values()))
    rows = "".join(
        f"<tr><td>{'gate' if r.route is None else r.route}</td><td>{human(r.madds)}</td>"
        + "".join(f"<td>{100 * r.mean[rule]:.1f}</td>" for rule in RULES)
        + "</tr>"
        for r in results
    )
    return f'<div class="wide"><table><tr>{header}</tr>{rows}</table></div>'


def _example(found: Found, classes: Sequence[str]) -> str:
    image = drawn(found.path, found.detections, classes)
    image.thumbnail((WIDE, WIDE))
    written = io.BytesIO()
    image.save(written, "JPEG", quality=85)
    source = base64.b64encode(written.getvalue()).decode()
    caption = f"{Path(found.path).name}: route {found.route}, {human(found.madds)} multiply-adds"
    alt = escape(f"boxes found in {Path(found.path).name}")
    return (
        f'<figure><img style="max-width:100%" alt="{alt}" src="data:image/jpeg;base64,{source}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
