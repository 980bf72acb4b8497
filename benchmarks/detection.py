"""Measure detectors: accuracy of every route, time of a training step, time of mixed batches.

    python -m benchmarks.detection train --data DIR [--recipes bccd_mbnet bccd_ds_mbnet …] [--seeds 0 1 2]
                                         [--set KEY=VALUE …] [--keep DIR] [--json FILE]
    python -m benchmarks.detection steps --data DIR [--recipes …] [--set KEY=VALUE …] [--json FILE]
    python -m benchmarks.detection speed [--model ds_mbnet] [--size 320] [--batch 64] [--routes S]
                                         [--backend cudagraphs] [--precision bfloat16] [--json FILE]

*train*: each row is a run of `dsnet detect train`, with mean average precision on the test split and the
multiply-adds of the whole detector.

*steps*: milliseconds of a training step. *ready* is the forward and backward pass and the optimizer on a
batch that is ready; a whole step also draws, crops and matches its batch. *busy* is the share of a step in
which the GPU computes.

*speed*: a plan for a mixed batch. *ideal* is each route's stand-alone detector, compiled by the same backend,
on whole batches, weighted by the mix. Decoding and NMS are timed until the boxes are in memory of the host
(*found*) and until they are arrays for every image (*boxes*). The score threshold gives --found boxes an
image on average.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

import dsnet
from benchmarks.script import add_json, earlier_runs, report
from benchmarks.timing import environment, interleaved, write_json
from dsnet import runtime
from dsnet.cli.progress import TrainingProgress
from dsnet.core.cuda_graphs import stream_pool
from dsnet.core.device import pick_device
from dsnet.core.settings import override, parse_assignments, to_plain
from dsnet.detection.deploy._partition import pack_detector
from dsnet.detection.deploy.plan import DetectorPlan
from dsnet.detection.model.fssd import Detector
from dsnet.detection.train._task import DetectorTask, calibrate_detector_bn
from dsnet.detection.train.api import train_detector
from dsnet.detection.train.config import DetectionConfig
from dsnet.detection.train.setup import make_detector, open_datasets
from dsnet.recipes import get_recipe
from dsnet.report.text import table
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.forced_routes import assigned_call, sample_routes
from dsnet.training import GateConfig
from dsnet.training.callbacks import Callback

if TYPE_CHECKING:
    from dsnet.runtime.executors.ragged.executor import RaggedExecutor  # needs Triton

WARM_UP = 80  # steps, enough to draw every route and capture its graph
BCCD = ("bccd_mbnet", "bccd_ds_mbnet", "bccd_ds_mbnet_plus")


def run_train(args: argparse.Namespace) -> None:
    runs = earlier_runs(args.json)
    done = {(run["recipe"], run["seed"]) for run in runs}
    about = {"benchmark": "detection", **environment(pick_device("auto"))}
    for seed in args.seeds:
        for name in args.recipes:
            if (name, seed) in done:
                continue
            trained = _trained(_config(name, args, seed), args.keep, f"{name}-{seed}")
            if not trained["results"]:  # interrupted
                return
            runs.append({"recipe": name, "seed": seed, "commit": about["commit"], **trained})
            report({**about, "runs": runs}, args.json)


def _config(name: str, args: argparse.Namespace, seed: int) -> DetectionConfig:
    config = get_recipe(name, DetectionConfig).config
    config = replace(config, data=replace(config.data, root=args.data))
    return override(config, {**parse_assignments(args.set), "run.seed": seed})


def _trained(config: DetectionConfig, keep: Path | None, name: str) -> dict[str, Any]:
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcome = train_detector(config, (keep or Path(folder)) / name, callback=TrainingProgress())
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "config": to_plain(config),
        "seconds": seconds,
        "results": [result.to_dict() for result in outcome.results],
    }


def run_steps(args: argparse.Namespace) -> None:
    device, rows = pick_device("auto"), []
    for name in args.recipes:
        config = _config(name, args, 0)
        training = _training(config, device)
        whole, ready = step_times(training)
        row = {"recipe": name, "batch": config.optim.batch, "size": config.data.size}
        rows.append({**row, "step_ms": round(whole, 2), "ready_ms": round(ready, 2)})
        if device.type == "cuda":
            kernels = kernel_times(training)
            rows[-1]["kernels_ms"] = round(sum(kernels.values()), 2)
            rows[-1]["busy"] = round(sum(kernels.values()) / whole, 3)
            rows[-1]["most"] = [[key[:80], round(ms, 2)] for key, ms in list(kernels.items())[:12]]
        print(rows[-1], flush=True)
        if args.json:
            write_json(args.json, {"benchmark": "detection steps", **environment(device), "results": rows})


def _training(config: DetectionConfig, device: torch.device) -> DetectorTask:
    train, _, _ = open_datasets(config, device, Callback())
    task = DetectorTask(config, make_detector(config, train, None, Path(), device), train)
    task.begin_epoch()
    return task


def _batches(task: DetectorTask) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    return (batch for epoch in itertools.count() for batch in task.batches(epoch, 0))


def _optimizer_step(task: DetectorTask, batch: Any, step: int) -> None:  # noqa: ANN401
    """Make a step as the training loop does."""
    task.optimizer.zero_grad(set_to_none=False)
    task.step(batch, step)
    if task.config.optim.clip:
        nn.utils.clip_grad_norm_(task.detector.parameters(), task.config.optim.clip)
    task.optimizer.step()


def step_times(task: DetectorTask, steps: int = 20) -> tuple[float, float]:
    """Time a whole training step, and one on a batch that is ready."""
    batches = _batches(task)
    measured = []
    for source in (batches, itertools.repeat(next(batches))):
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                _wait(task.data.device)
                begun = time.perf_counter()
            _optimizer_step(task, next(source), step)
        _wait(task.data.device)
        measured.append(1e3 * (time.perf_counter() - begun) / steps)
    return measured[0], measured[1]


def kernel_times(task: DetectorTask, steps: int = 5) -> dict[str, float]:
    """Return milliseconds a step by kernel, the longest first."""
    from torch.profiler import ProfilerActivity

    batches = _batches(task)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for step in range(steps):
            _optimizer_step(task, next(batches), step)
        _wait(task.data.device)
    times = {event.key: event.self_device_time_total / 1e3 / steps for event in seen.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Alone(nn.Module):
    """The stand-alone detector of one route."""

    def __init__(self, front: nn.Module, behind: nn.Module) -> None:
        super().__init__()
        self.front, self.behind = front, behind

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.behind(self.front(x)[0]))


def _alone(detector: Detector, number: int, plan: DetectorPlan, x: Tensor) -> Callable[[], object]:
    """Return a call of a route's stand-alone detector on a whole batch, compiled as the plan was."""
    compiled = plan.network
    if compiled.backend == "triton":  # as a plan that holds nothing else, its program without the host's part
        own = runtime.compile(
            detector,
            device=compiled.device,
            backend="triton",
            precision=str(compiled.precision).removeprefix("torch."),
            image_size=compiled.image_size,
            batch_buckets=[len(x)],
            routes=[number],
        )
        own(x, number)  # its programs read these images from now on
        program = cast("RaggedExecutor", own.network.executor).programs["assigned", len(x)]
        return lambda: (program(), own)[0]  # whose memory it works in
    parts = pack_detector(
        detector,
        [number],
        image_size=compiled.image_size,
        precision=compiled.precision,
        device=compiled.device,
    )
    module = _Alone(parts[()].module, parts[number,].module)
    call = get_backend(compiled.backend).convert(module, x)(x)
    if not compiled.executor.asynchronous:
        return lambda: call(x)
    return stream_pool(compiled.device, 1).capture(lambda: (call(x), None)[1], 0)


def _score_for(count: int, plan: DetectorPlan, row: Tensor) -> float:
    """Return the score threshold that leaves this many boxes of a batch."""
    every = plan.boxes(row, score=0.0)
    scores = sorted((float(score) for found in every for score in found.scores), reverse=True)
    return scores[min(count, len(scores) - 1)]


@torch.no_grad()
def run_speed(args: argparse.Namespace) -> None:
    device = pick_device("auto")
    network: dsnet.Supernet = dsnet.create_model(args.model, generator=torch.Generator().manual_seed(0))
    network.reset_routing(GateConfig(space=args.routes).routes(network))
    detector = Detector(network, 3).to(device).eval()
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[args.precision]
    x = torch.randn(args.batch, 3, args.size, args.size, device=device)
    calibrate_detector_bn(detector, [x[:8]])
    detector.eval()
    routes = list(network.gate(0).choices)
    plan = runtime.compile(
        detector,
        device=device,
        backend=args.backend,
        precision=args.precision,
        image_size=args.size,
        batch_buckets=sorted({1, 2, 4, 8, 16, 32, args.batch}),
        routes=routes,
    )
    x = x.to(dtype)
    shares = {number: 1 / len(routes) for number in routes}
    routes_of_images = [network.space.resolve(number) for number in sample_routes(shares, args.batch)]
    calls: dict[str, Any] = {}
    gated = assigned_call(plan.network, routes_of_images)
    calls["plan"] = lambda: gated(x)
    for number in routes:
        calls[f"alone {number}"] = _alone(detector, number, plan, x)
    row = plan.plan(x)
    score = _score_for(args.found * args.batch, plan, row)
    found_now = sum(len(found.scores) for found in plan.boxes(row, score=score)) / args.batch
    calls["boxes"] = lambda: plan.boxes(row, score=score)
    calls["plan, boxes"] = lambda: plan.boxes(gated(x).logits, score=score)
    if plan.decoder is not None and plan.decoder.graphs:
        *_, last = plan.decoder.graphs.values()
        calls["found"] = last.replay
    times = interleaved(calls, repeats=args.repeats, device=device)
    ideal = sum(shares[number] * times[f"alone {number}"].median for number in routes)
    gated_ms, all_ms = times["plan"].median, times["plan, boxes"].median
    found = {
        "model": args.model,
        "batch": args.batch,
        "size": args.size,
        "backend": args.backend,
        "precision": args.precision,
        "times": {name: asdict(spread) for name, spread in times.items()},
        "ideal": ideal,
        "ratio": ideal / gated_ms,
        "boxes_an_image": found_now,
        "boxes_share": 1 - gated_ms / all_ms,  # of a call that gives boxes
    }
    if "found" in times:
        found["found_share"] = times["found"].median / all_ms
    print(table(["call", "ms"], [[name, f"{t.median:.2f}"] for name, t in times.items()], left=("call",)))
    print(f"ideal {ideal:.2f} ms; ideal / plan {found['ratio']:.3f}; {found_now:.1f} boxes an image")
    print(f"boxes {found['boxes_share']:.1%} of all, found {found.get('found_share', 0):.1%}")
    if args.json:
        write_json(args.json, {"benchmark": "detection speed", **environment(device), **found})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(required=True)
    train, one = steps.add_parser("train"), steps.add_parser("steps")
    for parser_of, step in ((train, run_train), (one, run_steps)):
        parser_of.add_argument("--data", required=True)
        parser_of.add_argument("--recipes", nargs="+", default=list(BCCD))
        parser_of.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
        add_json(parser_of)
        parser_of.set_defaults(step=step)
    train.add_argument("--seeds", nargs="+", type=int, default=[0])
    train.add_argument("--keep", type=Path, metavar="DIR")
    speed = steps.add_parser("speed")
    speed.add_argument("--model", default="ds_mbnet")
    speed.add_argument("--size", type=int, default=320)
    speed.add_argument("--batch", type=int, default=64)
    speed.add_argument("--routes", default="S")
    speed.add_argument("--backend", default="cudagraphs")
    speed.add_argument("--precision", default="bfloat16")
    speed.add_argument("--found", type=int, default=20)
    speed.add_argument("--repeats", type=int, default=20)
    add_json(speed)
    speed.set_defaults(step=run_speed)
    args = parser.parse_args()
    args.step(args)


if __name__ == "__main__":
    main()
