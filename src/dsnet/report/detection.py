"""A detector's run as one page: what every route finds, at what cost, and some images to look at."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Sequence
from pathlib import Path

from dsnet.data.decode import DecodeError
from dsnet.detection.data.summary import SplitCounts, plural
from dsnet.detection.data.voc import FileProblem
from dsnet.detection.eval.evaluate import DetectionResult
from dsnet.detection.visualize import draw_detections
from dsnet.inference.detect import ImageDetections
from dsnet.report.page import bar_chart, command, escape, html_table, notes, page
from dsnet.report.plot import Point, accuracy_plot
from dsnet.report.text import bar, human, table

__all__ = ["detection_page", "detection_table"]

WIDE = 640  # pixels of an image on the page
FEW_IMAGES = 100  # to train with, below which little can be learnt
FEW_BOXES = 20  # of a class
FEW_TESTED = 100  # test images, below which figures are rough
LISTED = 50  # problems with files on the page
RULES = {"voc2007": "mAP 2007", "voc2010": "mAP 2010", "coco": "COCO"}


def detection_page(
    model: str,
    folder: Path,
    classes: Sequence[str],
    results: Sequence[DetectionResult],
    examples: Sequence[ImageDetections],
    *,
    train: SplitCounts | None = None,
    test: SplitCounts | None = None,
    problems: Sequence[FileProblem] = (),
) -> str:
    """The page of a run that has come to its end; with its images' counts it says what to think of them."""
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
        taken = ", ".join(f"{count} at route {route}" for route, count in gate.route_counts.items())
        reached = f"<strong>{100 * gate.mean['voc2007']:.1f}</strong>"
        text += (
            f" Each image at the route that its gate takes: {reached} with "
            f"{gate.madds / largest.madds:.0%} ({taken})."
        )
    run = shlex.quote(str(folder))
    at = "" if gate is not None else f" --route {largest.route}"
    warnings = [] if train is None or test is None else _notes(train, test, problems)
    body = [
        f"<p>{text}</p>",
        notes(warnings),
        "<h2>Precision against cost</h2>",
        _plot(routes, gate),
        _table(results),
        f"<h2>Classes</h2><p>Average precision {'with the gate' if gate else 'at the largest route'}.</p>",
        bar_chart(
            list(shown.classes), list(shown.classes.values()), [f"{ap:.1%}" for ap in shown.classes.values()]
        ),
        "<h2>Test images</h2>",
        *(_example(found, classes) for found in examples),
        *(["<h2>Problems with files</h2>", _problems(problems)] if problems else []),
        "<h2>What to do next</h2>",
        command(
            f"dsnet detect predict {run} photos --draw found{at}",
            "Boxes in your own images, as a table and drawn; --out boxes.jsonl writes them down.",
        ),
        command(f"dsnet detect evaluate {run} --data DIR --split test", "The same figures on other images."),
    ]
    return page(title, *body)


def _notes(train: SplitCounts, test: SplitCounts, problems: Sequence[FileProblem]) -> list[str]:
    """What looks wrong, in words."""
    notes = []
    for name, part in (("training", train), ("test", test)):
        if part.listed > part.images:
            notes.append(
                f"{part.listed - part.images:,} of {plural(part.listed, f'{name} image')} could not be used "
                "and took no part: Problems with files, below, says why."
            )
    if problems and train.listed == train.images and test.listed == test.images:
        notes.append(f"There are {plural(len(problems), 'problem')} with files, below.")
    if train.images < FEW_IMAGES:
        notes.append(
            f"{plural(train.images, 'training image')} are few: collect more of them before anything else."
        )
    few = [name for name, count in train.boxes.items() if count < FEW_BOXES]
    if few:
        named = ", ".join(few[:5]) + ", …" * (len(few) > 5)
        notes.append(
            f"{len(few)} of {len(train.boxes)} classes "
            f"{'has' if len(few) == 1 else 'have'} fewer than {FEW_BOXES} boxes to train with ({named})."
        )
    unseen = [name for name, count in test.boxes.items() if not count]
    if unseen:
        named = ", ".join(unseen[:5]) + ", …" * (len(unseen) > 5)
        notes.append(f"No test image shows {named}: the figures do not say how well that is found.")
    if test.images < FEW_TESTED:
        notes.append(f"With {plural(test.images, 'test image')} every figure here is a rough one.")
    return notes


def _problems(problems: Sequence[FileProblem]) -> str:
    shown = "".join(f"<li>{escape(str(file))}: {escape(what)}</li>" for file, what in problems[:LISTED])
    more = len(problems) - LISTED
    rest = f"<p>And {more:,} more, in problems.txt beside this page.</p>" if more > 0 else ""
    return f"<ul>{shown}</ul>{rest}"


def _plot(routes: Sequence[DetectionResult], gate: DetectionResult | None) -> str:
    curves = {"routes": [Point(r.madds, r.mean["voc2007"], f"route {r.route}") for r in routes]}
    if gate is not None:
        curves["gate"] = [Point(gate.madds, gate.mean["voc2007"])]
    return accuracy_plot(curves, title="mAP by VOC 2007's rule").html()


def _table(results: Sequence[DetectionResult]) -> str:
    return html_table(
        ("route", "MAdds", *RULES.values()),
        (
            (
                "gate" if r.route is None else str(r.route),
                human(r.madds),
                *(f"{100 * r.mean[rule]:.1f}" for rule in RULES),
            )
            for r in results
        ),
    )


def _example(found: ImageDetections, classes: Sequence[str]) -> str:
    try:
        image = draw_detections(found.path, found.detections, classes)
    except DecodeError:  # the file has changed since it was read; the page does without it
        return ""
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


def detection_table(results: Sequence[DetectionResult]) -> str:
    """Routes and gate with their precision, for a terminal."""
    largest = max(result.madds for result in results)
    kinds = list(results[0].classes)
    shown = kinds if len(kinds) <= 5 else []
    rows = [
        [
            "gate" if result.route is None else str(result.route),
            human(round(result.madds)),
            bar(result.madds, largest),
            *(f"{100 * result.mean[rule]:.1f}" for rule in ("voc2007", "voc2010", "coco")),
            *(f"{100 * result.classes[kind]:.1f}" for kind in shown),
        ]
        for result in results
    ]
    header = ["route", "MAdds", "cost", "mAP 2007", "mAP 2010", "COCO", *shown]
    text = table(header, rows, left=("cost",))
    gate = results[-1]
    if gate.route is None:
        taken = ", ".join(f"{count} at {route}" for route, count in gate.route_counts.items())
        text += f"\n\nThe gate ran {taken}."
    return text
