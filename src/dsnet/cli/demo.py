"""``dsnet demo``: the whole story on digits, from training to a budget, and a report to look at."""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsnet.calibration import collect
from dsnet.calibration.compare import Comparison, compare
from dsnet.cli.progress import TrainingProgress
from dsnet.core.files import write_text
from dsnet.core.formats import RESULTS
from dsnet.core.metrics_log import read_metrics
from dsnet.core.schema import read_json
from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.recipes import get_recipe
from dsnet.report.comparison import router_table
from dsnet.report.page import png_bytes
from dsnet.report.routing import Example, Story, story_page
from dsnet.report.text import table
from dsnet.routing import CostTable, OperatingPoint, Routed
from dsnet.training import GateConfig, train_gate
from dsnet.training.api import train
from dsnet.training.config import TrainConfig
from dsnet.training.loop import RunStatus
from dsnet.training.run_dir import locked
from dsnet.training.stage2.api import TrainedRun, calibrate_run

__all__ = ["run"]

BUDGETS = (0.18, 0.2, 0.25, 0.3, 0.4)  # of the largest route's cost
MAIN = 0.2
SHOWN = 8  # example images of every route
IMAGES = "images"  # folder of test images as files
FILES = 2  # of every class


def run(args: argparse.Namespace) -> int:
    """Runs the demo."""
    args.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    # Small networks: more threads only wait for each other.
    torch.set_num_threads(args.threads if isinstance(args.threads, int) else 1)
    try:
        story = _tell(args.out, args.epochs)
    finally:
        torch.set_num_threads(threads)
    report = args.out / "report.html"
    write_text(report, story_page(story))
    print(f"\nReport: {report}")
    print(f"Test images, by digit: {args.out / IMAGES}")
    return 0


@contextmanager
def _step(what: str) -> Iterator[None]:
    print(what, flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def _tell(out: Path, epochs: int) -> Story:
    recipe = get_recipe("digits_mbnet").config
    config = replace(
        recipe,
        augment=Augment(padding=1),
        scheme=replace(recipe.scheme, name="ib+label", add=True),
        optim=replace(recipe.optim, epochs=epochs, lr=0.1),
        run=replace(recipe.run, device="cpu"),
    )
    folder = out / "supernet"
    with _step(f"1. Stage I: {config.model} on digits, {epochs} epochs, all routes together"):
        _train(config, folder)
    with _step("2. The same routes as stand-alone networks, to compare with"):
        alone = _stand_alone(config, out)
    with _step("3. Stage II: the gate learns the chance that each route is right"):
        gate = GateConfig(goal="value", first_layer="separate", width=64, lr=0.2, epochs=30)
        _whole(train_gate(folder, gate, device="cpu", callback=TrainingProgress(quiet=True)).status)
    with _step("4. Calibration on held-out images: which settings keep which budget"):
        done = calibrate_run(folder, name="gated", device="cpu")
        opened, calibration = done.run, done.calibration
    costs = calibration.costs
    with _step("5. Evaluation on test images"):
        outputs = collect(opened.model, opened.seen(opened.test))
        budgets = [share * costs.largest for share in BUDGETS]
        found = compare(outputs, calibration, budgets, alone)
        low, high = calibration.budget_range()
        curve = compare(outputs, calibration, [low + i / 24 * (high - low) for i in range(25)], alone)
    _write_images(opened, out / IMAGES)
    _print_table(found, costs)
    with _step("6. Measured time"):
        pick = calibration.pick(MAIN * costs.largest, ("gate", "cascade")).kind
        routed = Routed(opened.model, calibration.routers[pick], MAIN * costs.largest)
        times = _times(opened, routed)
    return Story(
        model=config.model,
        command=f"dsnet demo --epochs {epochs}",
        costs=costs,
        comparison=found,
        curve=curve,
        main=MAIN * costs.largest,
        picked=pick,
        examples=_examples(opened, routed),
        stage1=_metrics(folder / "metrics.jsonl"),
        stage2=_metrics(folder / "gated.stage2" / "metrics.jsonl"),
        times=times,
    )


def _train(config: TrainConfig, folder: Path) -> None:
    """Anew, in place of what an earlier demo left."""
    if folder.exists():
        if not (folder / "recipe.json").is_file():
            raise DsnetError(f"{folder} is there already and is no run of the demo; choose another --out")
        with locked(folder):  # another demo may be at work in it
            shutil.rmtree(folder)
    _whole(train(config, folder, callback=TrainingProgress(quiet=True)).status)


def _whole(status: RunStatus) -> None:
    """Training that was told to stop ends the demo too: half-trained networks make no report."""
    if not status.finished:
        raise KeyboardInterrupt


def _stand_alone(config: TrainConfig, out: Path) -> list[OperatingPoint]:
    points = []
    model: Supernet = create_model(config.model, device="meta")
    for route in (route.number for route in model.space):
        folder = out / f"alone-{route}"
        alone = replace(config.scheme, name="label", add=False, route=route)
        optim = replace(config.optim, lr=0.2)  # the better one for a single loss
        _train(replace(config, scheme=alone, optim=optim), folder)
        (result,) = read_json(folder / "results.json", RESULTS)["test"]
        points.append(OperatingPoint(cost=result["madds"], accuracy=result["accuracy"], routes=(route,)))
    return points


def _print_table(found: Comparison, costs: CostTable) -> None:
    print("\n" + table(*router_table(found, costs), left=("router",)))
    print(
        "Budgets and mean costs are shares of the largest route's cost. Best single route: within the\n"
        "budget, chosen on held-out images; difference in points, ± standard error. Stand-alone: at the\n"
        "same mean cost."
    )
    print(f"\n{found.verdict}\n")


@torch.inference_mode()
def _times(opened: TrainedRun, routed: Routed, repeats: int = 15) -> dict[str, float]:
    """Median milliseconds an image, of every route and routed; they take turns."""
    x, _ = next(opened.seen(opened.test, 256))
    calls: dict[str, Callable[[], object]] = {
        f"route {route.number}": functools.partial(opened.model, x, route) for route in opened.model.space
    }
    calls[f"routed, {MAIN:.0%} of the cost"] = functools.partial(routed, x)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= 2:  # the first ones warm up
                samples[name].append(1e3 * (time.perf_counter() - start) / len(x))
    return {name: statistics.median(taken) for name, taken in samples.items()}


@torch.inference_mode()
def _examples(opened: TrainedRun, routed: Routed) -> list[Example]:
    """Test images by the route that answered them, wrong answers first."""
    x, labels = next(opened.seen(opened.test, len(opened.test)))
    raw, _ = next(opened.test.batches([torch.arange(len(opened.test))], full=False))
    output = routed.run(x)
    answers = output.logits.argmax(1)
    examples = []
    for route in sorted(set(output.routes.tolist())):
        at = (output.routes == route).nonzero()[:, 0]
        wrong = answers[at] != labels[at]
        chosen = at[wrong.long().argsort(descending=True, stable=True)[:SHOWN]]
        examples += [
            Example(
                image=raw[0, i].float() / 255,
                route=route,
                ran=routed.path(route),
                label=opened.test.classes[int(labels[i])],
                answer=opened.test.classes[int(answers[i])],
            )
            for i in chosen.tolist()
        ]
    return examples


def _write_images(opened: TrainedRun, folder: Path) -> None:
    """Write the first test images of every class as files to try `dsnet predict` on: digit-7-1.png."""
    folder.mkdir(exist_ok=True)
    written: Counter[int] = Counter()
    images, labels = next(opened.test.batches([torch.arange(len(opened.test))], full=False))
    for image, label in zip(images[0], labels.tolist(), strict=True):
        if written[label] < FILES:
            written[label] += 1
            path = folder / f"digit-{opened.test.classes[label]}-{written[label]}.png"
            path.write_bytes(png_bytes(image.float() / 255))


def _metrics(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path)
