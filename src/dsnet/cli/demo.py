"""``dsnet demo``: route images by a trained network that comes with the package, and measure the gain."""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet import runtime
from dsnet.calibration.calibration import Calibration
from dsnet.core.files import write_text
from dsnet.core.settings import to_plain
from dsnet.core.timer import time_interleaved
from dsnet.data.dataset import ImageDataset
from dsnet.errors import DsnetError, printable
from dsnet.models.loading import build_network, save_checkpoint
from dsnet.models.shipped import ShippedWeights, load_shipped, shipped_weights
from dsnet.report.demo import Example, Measured, demo_page, headline, measured_rows
from dsnet.report.page import png_bytes
from dsnet.report.text import table
from dsnet.routing import Routed
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import OperatingPoint, RoutedOutput
from dsnet.runtime.plan import Plan
from dsnet.training.config import TrainConfig
from dsnet.training.run_dir import locked, settings_of, write_config
from dsnet.training.stage2.calibrate import calibrate_run
from dsnet.training.stage2.trained_run import TrainedRun

__all__ = ["run"]

WEIGHTS = "fashion_mnist_resnet"
DATA = "fashion_mnist_sample"  # training split: to calibrate on; test split: to judge and measure on
CALIBRATION_IMAGES = 2000  # in the training split
HOLD_OUT = 0.95  # share of the images to calibrate on: all that a run may hold out, but for a rest
BATCH = 128  # images at a time; the plan splits them into the buckets that take the least time
BUCKETS = (8, 16, 32, 64)
CALIBRATION_BATCH = 32  # feature maps that fit the cache
ROUNDS = 3
SHARES = (0.1, 0.2, 0.4, 0.6)  # budgets besides the one that is shown in detail, of the largest route's cost
EXAMPLES = 8  # images of every route on the page
MISTAKES = 2  # of these, where there are any
FILES = 2  # test images of every class that are written as files


def run(args: argparse.Namespace) -> int:
    """Calibrate the shipped network, measure it routed and at single routes, and write a report."""
    args.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    # More threads gain little on small images, and their times vary more.
    torch.set_num_threads(args.threads if isinstance(args.threads, int) else 1)
    try:
        page = _run_steps(args.out, args.images)
    finally:
        torch.set_num_threads(threads)
    report = args.out / "report.html"
    write_text(report, page)
    print(printable(f"\nReport: {report}"))
    print(printable(f"Test images, by class: {args.out / 'images'}"))
    return 0


@contextmanager
def _step(title: str) -> Iterator[None]:
    print(title, flush=True)
    start = time.perf_counter()
    yield
    print(f"  {time.perf_counter() - start:.1f} s", flush=True)


def _run_steps(out: Path, images: int | None) -> str:
    """Run all steps and return the page."""
    weights = shipped_weights(WEIGHTS)
    folder = out / "supernet"
    with _step(f"1. {weights.summary}: weights that come with dsnet, as a run in {printable(str(folder))}"):
        _unpack(weights, folder, images)
    with _step("2. Calibration: which cascade of routes keeps which budget"):
        calibrated = calibrate_run(folder, name="final", device="cpu", batch=CALIBRATION_BATCH)
    opened, calibration = calibrated.run, calibrated.calibration
    test = opened.test if images is None else opened.test.subset(torch.arange(min(images, len(opened.test))))
    main = _as_accurate(calibration)
    routed = Routed(opened.model, calibration.routers["cascade"], main.cost)
    with _step(f"3. {len(test)} other images: the time and the accuracy of every route and of the cascade"):
        plan = runtime.compile(
            routed,
            backend="eager",
            routes=range(len(opened.model.space)),
            batch_buckets=BUCKETS,
        )
        budgets = sorted({main.cost, *_budgets(calibration)})
        measured = _measure(opened, test, plan, calibration.costs, budgets)
    result = measured[main.cost]
    singles = [measured[route.number] for route in opened.model.space]
    rows = [*singles, *(measured[budget] for budget in budgets)]
    print("\n" + table(*measured_rows(rows, singles[-1]), left=("",)))
    print("\nCascade: its budget in multiply-adds, as a share of the largest route's. Difference: in points.")
    print(f"\n{headline(result, singles[-1])}\n")
    _write_images(test, out / "images")
    return demo_page(
        weights=weights,
        made_by="dsnet demo" if images is None else f"dsnet demo --images {images}",
        calibrated_on=calibration.images,
        singles=singles,
        routed=[measured[budget] for budget in budgets],
        main=result,
        folder=out,
        batch=BATCH,
        rounds=ROUNDS,
        examples=_examples(test, routed, result.output),
    )


def _unpack(weights: ShippedWeights, folder: Path, images: int | None) -> None:
    """Write the shipped weights as a run, in place of the one of an earlier demo."""
    checkpoint = load_shipped(weights.name)
    model = build_network(checkpoint)
    if folder.exists():
        if not (folder / "recipe.json").is_file():
            raise DsnetError(f"{folder} exists and is not a run of the demo; choose another --out")
        with locked(folder):  # another demo may be at work in it
            shutil.rmtree(folder)
    config = settings_of(TrainConfig, checkpoint.data["recipe"], weights.folder / "card.json")
    share = HOLD_OUT if images is None else min(HOLD_OUT, images / CALIBRATION_IMAGES)
    # The images that it was trained on do not come with the package; all commands find these instead.
    data = replace(config.data, name=DATA, root=None, hold_out=share)
    config = replace(config, data=data, run=replace(config.run, device="auto"))
    write_config(folder, config)
    own = {**checkpoint.own_data, "recipe": to_plain(config), "weights": weights.name}
    save_checkpoint(folder, "final", model, step=checkpoint.data["step"], data=own)


def _as_accurate(calibration: Calibration) -> OperatingPoint:
    """Return the cheapest setting of the cascade that is as accurate as the largest route.

    Both are judged on the images of the calibration. Where no setting is, return the most accurate one.
    """
    curve = calibration.routers["cascade"].curve
    goal = calibration.routers["single"].curve[-1].accuracy
    enough = [point for point in curve if point.accuracy >= goal]
    return min(enough, key=lambda p: p.cost) if enough else max(curve, key=lambda p: p.accuracy)


def _budgets(calibration: Calibration) -> list[float]:
    low, high = calibration.budget_range("cascade")
    budgets = [share * calibration.costs.largest for share in SHARES]
    return [budget for budget in budgets if low <= budget <= high]


class _Call(NamedTuple):
    """A way to run images, and what it is called."""

    name: str
    run: Callable[[Tensor], RoutedOutput]
    image_size: int | None = None


@torch.inference_mode()
def _measure(
    opened: TrainedRun, test: ImageDataset, plan: Plan, costs: CostTable, budgets: list[float]
) -> Mapping[float, Measured]:
    """Run the plan at single routes and at budgets on all test images, in turns, by route or budget."""
    space = opened.model.space
    calls: dict[float, _Call] = {
        route.number: _Call(
            f"route {route.number} ({route.image_size} px)",
            functools.partial(_at_route, plan, route.number),
            route.image_size,
        )
        for route in space
    }
    for budget in budgets:
        name = f"cascade at {budget / costs.largest:.0%}"
        calls[budget] = _Call(name, plan.at(budget).run)
    outputs: dict[float, dict[int, RoutedOutput]] = {key: {} for key in calls}
    times: dict[float, float] = dict.fromkeys(calls, 0.0)
    labels = []

    def keep(key: float, number: int, x: Tensor) -> None:
        outputs[key][number] = calls[key].run(x)

    for number, (x, y) in enumerate(opened.seen(test, BATCH)):
        timed = {key: functools.partial(keep, key, number, x) for key in calls}
        samples = time_interleaved(timed, x.device, rounds=ROUNDS, warm_up=int(number == 0))
        labels.append(y)
        for key in calls:
            times[key] += statistics.median(samples[key])
    right = torch.cat(labels)
    results = {}
    for key, call in calls.items():
        joined = RoutedOutput(*(torch.cat(column) for column in zip(*outputs[key].values(), strict=True)))
        correct = joined.logits.argmax(1) == right
        results[key] = Measured(call.name, times[key] / len(right), correct, joined, call.image_size)
    return results


def _at_route(plan: Plan, route: int, x: Tensor) -> RoutedOutput:
    return RoutedOutput(plan(x, route), torch.full((len(x),), route))


def _examples(test: ImageDataset, routed: Routed, output: RoutedOutput) -> list[Example]:
    """Return test images of every route that answered, some wrong predictions first."""
    raw, labels = next(test.batches([torch.arange(len(test))], full=False))
    predicted = output.logits.argmax(1)
    examples = []
    for route in sorted(set(output.routes.tolist())):
        wrong, right = (
            ((output.routes == route) & same).nonzero()[:, 0]
            for same in (predicted != labels, predicted == labels)
        )
        chosen = torch.cat([wrong[:MISTAKES], right])[:EXAMPLES]
        examples += [
            Example(
                image=raw[0, i].float() / 255,
                path=routed.path(route),
                label=test.classes[int(labels[i])],
                predicted=test.classes[int(predicted[i])],
            )
            for i in chosen.tolist()
        ]
    return examples


def _write_images(test: ImageDataset, folder: Path) -> None:
    """Write the first test images of every class as files to try `dsnet predict` on: dress-1.png."""
    folder.mkdir(exist_ok=True)
    written: Counter[int] = Counter()
    images, labels = next(test.batches([torch.arange(len(test))], full=False))
    for image, label in zip(images[0], labels.tolist(), strict=True):
        if written[label] < FILES:
            written[label] += 1
            path = folder / f"{test.classes[label]}-{written[label]}.png"
            path.write_bytes(png_bytes(image.float() / 255))
