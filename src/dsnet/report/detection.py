"""The page of a detector's run: precision and cost of every route, classes, and some test images."""

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

MAX_WIDTH = 640  # pixels of an image on the page
FEW_IMAGES = 100  # training images below which little can be learnt
FEW_BOXES = 20  # of a class
FEW_TESTED = 100  # test images below which figures are rough
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
    """Build the page of a finished run.

    Args:
        model: Name of the network.
        folder: Folder of the run.
        classes: Names of the classes.
        results: Results of the routes, cheapest first, and of the gate.
        examples: Detections in test images.
        train: Counts of the training images, for warnings (default: none).
        test: Counts of the test images, for warnings (default: none).
        problems: Problems with files.
    """
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
        counts = ", ".join(f"{count} at route {route}" for route, count in gate.route_counts.items())
        text += (
            f" With the gate, every image at its route: <strong>{100 * gate.mean['voc2007']:.1f}</strong> "
            f"with {gate.madds / largest.madds:.0%} ({counts})."
        )
    curves = {"routes": [Point(r.madds, r.mean["voc2007"], f"route {r.route}") for r in routes]}
    if gate is not None:
        curves["gate"] = [Point(gate.madds, gate.mean["voc2007"])]
    run = shlex.quote(str(folder))
    route_option = "" if gate is not None else f" --route {largest.route}"
    precisions = shown.classes
    body = [
        f"<p>{text}</p>",
        notes([] if train is None or test is None else _notes(train, test, problems)),
        "<h2>Precision against cost</h2>",
        accuracy_plot(curves, title="mAP by VOC 2007's rule").html(),
        html_table(("route", "MAdds", *RULES.values()), map(_cells, results)),
        f"<h2>Classes</h2><p>Average precision {'with the gate' if gate else 'at the largest route'}.</p>",
        bar_chart(list(precisions), list(precisions.values()), [f"{ap:.1%}" for ap in precisions.values()]),
        "<h2>Test images</h2>",
        *(_example(example, classes) for example in examples),
        *(["<h2>Problems with files</h2>", _problems(problems)] if problems else []),
        "<h2>What to do next</h2>",
        command(
            f"dsnet detect predict {run} photos --draw found{route_option}",
            "Boxes in your own images, as a table and drawn; --out boxes.jsonl writes them down.",
        ),
        command(f"dsnet detect evaluate {run} --data DIR --split test", "The same figures on other images."),
    ]
    return page(title, *body)


def _cells(result: DetectionResult) -> tuple[str, ...]:
    name = "gate" if result.route is None else str(result.route)
    return name, human(round(result.madds)), *(f"{100 * result.mean[rule]:.1f}" for rule in RULES)


def _notes(train: SplitCounts, test: SplitCounts, problems: Sequence[FileProblem]) -> list[str]:
    """Return warnings about the data."""
    texts = [
        f"{part.listed - part.images:,} of {plural(part.listed, f'{name} image')} could not be used and took "
        "no part: Problems with files, below, says why."
        for name, part in (("training", train), ("test", test))
        if part.listed > part.images
    ]
    if problems and not texts:
        texts.append(f"There are {plural(len(problems), 'problem')} with files, below.")
    if train.images < FEW_IMAGES:
        texts.append(
            f"{plural(train.images, 'training image')} are few: collect more of them before anything else."
        )
    few = [name for name, count in train.boxes.items() if count < FEW_BOXES]
    if few:
        texts.append(
            f"{len(few)} of {len(train.boxes)} classes {'has' if len(few) == 1 else 'have'} fewer than "
            f"{FEW_BOXES} boxes to train with ({_first(few)})."
        )
    unseen = [name for name, count in test.boxes.items() if not count]
    if unseen:
        texts.append(f"No test image shows {_first(unseen)}: the figures do not say how well that is found.")
    if test.images < FEW_TESTED:
        texts.append(f"With {plural(test.images, 'test image')} every figure here is a rough one.")
    return texts


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", …" * (len(names) > 5)


def _problems(problems: Sequence[FileProblem]) -> str:
    shown = "".join(f"<li>{escape(str(file))}: {escape(what)}</li>" for file, what in problems[:LISTED])
    more = len(problems) - LISTED
    rest = f"<p>And {more:,} more, in problems.txt beside this page.</p>" if more > 0 else ""
    return f"<ul>{shown}</ul>{rest}"


def _example(example: ImageDetections, classes: Sequence[str]) -> str:
    try:
        image = draw_detections(example.path, example.detections, classes)
    except DecodeError:  # the file has changed since it was read; the page is built without it
        return ""
    image.thumbnail((MAX_WIDTH, MAX_WIDTH))
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=85)
    source = base64.b64encode(jpeg.getvalue()).decode()
    name = Path(example.path).name
    caption = f"{name}: route {example.route}, {human(example.madds)} multiply-adds"
    return (
        f'<figure><img style="max-width:100%" alt="{escape(f"boxes found in {name}")}" '
        f'src="data:image/jpeg;base64,{source}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def detection_table(results: Sequence[DetectionResult]) -> str:
    """Format routes and gate with their precision, for a terminal."""
    largest = max(result.madds for result in results)
    classes = list(results[0].classes) if len(results[0].classes) <= 5 else []
    rows = []
    for result in results:
        name, madds, *means = _cells(result)
        precisions = [f"{100 * result.classes[label]:.1f}" for label in classes]
        rows.append([name, madds, bar(result.madds, largest), *means, *precisions])
    text = table(["route", "MAdds", "cost", *RULES.values(), *classes], rows, left=("cost",))
    gate = results[-1]
    if gate.route is None:
        counts = ", ".join(f"{count} at {route}" for route, count in gate.route_counts.items())
        text += f"\n\nThe gate ran {counts}."
    return text
