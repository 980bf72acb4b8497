"""``dsnet demo``: all steps on digits, from training to a budget, with a report."""

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

import torch

from dsnet.calibration import collect
from dsnet.calibration.compare import compare
from dsnet.cli.progress import TrainingProgress
from dsnet.core.files import write_text
from dsnet.core.formats import RESULTS
from dsnet.core.metrics_log import read_metrics
from dsnet.core.schema import read_json
from dsnet.core.timer import time_interleaved
from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError, printable
from dsnet.models import Supernet, create_model
from dsnet.recipes import get_recipe
from dsnet.report.comparison import router_table
from dsnet.report.demo import Example, demo_page
from dsnet.report.page import png_bytes
from dsnet.report.text import table
from dsnet.routing import OperatingPoint, Routed
from dsnet.training import GateConfig, train_gate
from dsnet.training.api import train
from dsnet.training.config import TrainConfig
from dsnet.training.loop import RunStatus
from dsnet.training.run_dir import locked
from dsnet.training.stage2.calibrate import calibrate_run
from dsnet.training.stage2.trained_run import TrainedRun

__all__ = ["run"]

BUDGETS = (0.18, 0.2, 0.25, 0.3, 0.4)  # shares of the largest route's cost
MAIN_BUDGET = 0.2  # shown in detail
EXAMPLES = 8  # images of every route on the page
FILES = 2  # test images of every class that are written as files


def run(args: argparse.Namespace) -> int:
    """Train, calibrate and evaluate a small supernet on digits, and write a report."""
    args.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    # Small networks: more threads only wait for each other.
    torch.set_num_threads(args.threads if isinstance(args.threads, int) else 1)
    try:
        page = _run_steps(args.out, args.epochs)
    finally:
        torch.set_num_threads(threads)
    report = args.out / "report.html"
    write_text(report, page)
    print(printable(f"\nReport: {report}"))
    print(printable(f"Test images, by digit: {args.out / 'images'}"))
    return 0


@contextmanager
def _step(title: str) -> Iterator[None]:
    print(title, flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def _run_steps(out: Path, epochs: int) -> str:
    """Run all steps and return the page."""
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
        _check_finished(train_gate(folder, gate, device="cpu", callback=TrainingProgress(quiet=True)).status)
    with _step("4. Calibration on held-out images: which settings keep which budget"):
        calibrated = calibrate_run(folder, name="gated", device="cpu")
        opened, calibration = calibrated.run, calibrated.calibration
    costs = calibration.costs
    budget = MAIN_BUDGET * costs.largest
    with _step("5. Evaluation on test images"):
        outputs = collect(opened.model, opened.seen(opened.test))
        comparison = compare(outputs, calibration, [share * costs.largest for share in BUDGETS], alone)
        low, high = calibration.budget_range()
        curve = compare(outputs, calibration, [low + i / 24 * (high - low) for i in range(25)], alone)
    _write_images(opened, out / "images")
    print("\n" + table(*router_table(comparison, costs, opened.model.space), left=("router",)))
    print(
        "Budgets and mean costs are shares of the largest route's cost. Best single route: within the\n"
        "budget, chosen on held-out images; difference in points, ± standard error. Stand-alone: at the\n"
        f"same mean cost.\n\n{comparison.verdict}\n"
    )
    with _step("6. Measured time"):
        router = calibration.pick(budget, ("gate", "cascade")).kind
        routed = Routed(opened.model, calibration.routers[router], budget)
        times = _times(opened, routed)
    return demo_page(
        model=config.model,
        command=f"dsnet demo --epochs {epochs}",
        comparison=comparison,
        curve=curve,
        costs=costs,
        space=opened.model.space,
        budget=budget,
        router=router,
        examples=_examples(opened, routed),
        times=times,
        stage1=read_metrics(folder / "metrics.jsonl"),
        stage2=read_metrics(folder / "gated.stage2" / "metrics.jsonl"),
    )


def _train(config: TrainConfig, folder: Path) -> None:
    """Train a network, in place of the one of an earlier demo."""
    if folder.exists():
        if not (folder / "recipe.json").is_file():
            raise DsnetError(f"{folder} exists and is not a run of the demo; choose another --out")
        with locked(folder):  # another demo may be at work in it
            shutil.rmtree(folder)
    _check_finished(train(config, folder, callback=TrainingProgress(quiet=True)).status)


def _check_finished(status: RunStatus) -> None:
    """Stop the demo if training was stopped: half-trained networks make no report."""
    if not status.finished:
        raise KeyboardInterrupt


def _stand_alone(config: TrainConfig, out: Path) -> list[OperatingPoint]:
    points = []
    model: Supernet = create_model(config.model, device="meta")
    for route in range(len(model.space)):
        folder = out / f"alone-{route}"
        alone = replace(config.scheme, name="label", add=False, route=route)
        optim = replace(config.optim, lr=0.2)  # the better one for a single loss
        _train(replace(config, scheme=alone, optim=optim), folder)
        (result,) = read_json(folder / "results.json", RESULTS)["test"]
        points.append(OperatingPoint(cost=result["madds"], accuracy=result["accuracy"], routes=(route,)))
    return points


@torch.inference_mode()
def _times(opened: TrainedRun, routed: Routed) -> dict[str, float]:
    """Return median milliseconds an image of every route and of the router, timed in turns."""
    x, _ = next(opened.seen(opened.test, 256))
    calls: dict[str, Callable[[], object]] = {
        f"route {route.number}": functools.partial(opened.model, x, route) for route in opened.model.space
    }
    calls[f"routed, {MAIN_BUDGET:.0%} of the cost"] = functools.partial(routed, x)
    times = time_interleaved(calls, x.device, rounds=15, warm_up=2)
    return {name: statistics.median(samples) / len(x) for name, samples in times.items()}


@torch.inference_mode()
def _examples(opened: TrainedRun, routed: Routed) -> list[Example]:
    """Return test images of every route that answered, wrong predictions first."""
    x, labels = next(opened.seen(opened.test, len(opened.test)))
    raw, _ = next(opened.test.batches([torch.arange(len(opened.test))], full=False))
    output = routed.run(x)
    predicted = output.logits.argmax(1)
    examples = []
    for route in sorted(set(output.routes.tolist())):
        rows = (output.routes == route).nonzero()[:, 0]
        wrong = predicted[rows] != labels[rows]
        chosen = rows[wrong.long().argsort(descending=True, stable=True)[:EXAMPLES]]
        examples += [
            Example(
                image=raw[0, i].float() / 255,
                path=routed.path(route),
                label=opened.test.classes[int(labels[i])],
                predicted=opened.test.classes[int(predicted[i])],
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
