"""Measure cascades of two pretrained networks on ImageNet's validation images, beside each network alone.

    DSNET_DATA=FOLDER python -m benchmarks.imagenet_cascade NAME=FILE… [--outputs FOLDER] [--rounds 100]
                                                            [--json FILE]

NAME and FILE are those of `benchmarks.pretrained`, the most expensive network last. Nothing is trained. All
networks are members of one `dsnet.cascade`, each at its image size. It takes images of the largest size, so
all networks see resized copies of the same images. Outputs are recorded once, on `imagenet5k-calibration` and
on `imagenet5k-test`; ``--outputs`` keeps them in a folder for the next call.

Pairs and thresholds are chosen on the calibration images, figures are those of the test images:

- *as accurate*: for each pair the cheapest threshold at which it is at least as accurate as its larger
  network alone, where that is cheaper than this network
- *as expensive*: for each network the most accurate of all pairs and thresholds of at most its multiply-adds
- *any pair*: for each network the cheapest of all pairs and thresholds with at least its accuracy. Where the
  pair does not end in the network, both accuracies are those of different networks on 2,500 images, so this
  choice is noisy; the table leaves it out

Intervals contain 95 % of the values of a paired bootstrap over the test images.

Each network is timed by OpenVINO on one image of its size. Resizing an image for it is timed in PyTorch with
one thread. The milliseconds of a cascade are computed: resizing + first network + share of images that go on
× (resizing + second network). An image that a network gets alone is expected at its size: resizing counts in
cascades only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.pretrained import BATCH, CPU, WARM_UP, Source, parse_source
from benchmarks.script import add_json, report
from benchmarks.timing import environment
from dsnet.benchmark.results import Spread
from dsnet.calibration import calibrate
from dsnet.core.timer import time_interleaved, timed
from dsnet.data import load_dataset
from dsnet.data.registry import DatasetRequest
from dsnet.data.transforms.augment import normalise
from dsnet.extract import extract
from dsnet.models._cascade import cascade
from dsnet.models.composite import CompositeNetwork
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import CascadePolicy, OperatingPoint, margin
from dsnet.routing.route_outputs import Array, RouteOutputs, simulate
from dsnet.runtime import get_backend

SAMPLES = 10_000  # of the bootstrap
BACKEND = "openvino"


# --- outputs --------------------------------------------------------------------------------------------
def build(sources: Sequence[Source]) -> CompositeNetwork:
    """Make one network of all given ones."""
    networks = [source.network for source in sources]
    return cascade(
        [source.build() for source in sources],
        sizes=[network.side for network in networks],
        normalisations=[network.channels for network in networks],
        name="+".join(network.title for network in networks),
    )


def images(split: str, size: int, source: Source) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images, normalised for a network, and labels."""
    folder = DatasetRequest(split="test").folder
    data = load_dataset(str(folder / f"imagenet5k-{split}.parquet"), "test", size=size)
    start = time.monotonic()
    batches = list(torch.arange(len(data)).split(BATCH))
    for done, (batch, labels) in enumerate(data.batches(batches, full=False)):
        if done % 16 == 0:
            print(f"{split}: {done * BATCH} images, {time.monotonic() - start:.0f} s", flush=True)
        x = normalise(batch[0], *source.network.channels)
        yield x, labels


Program = Callable[[Tensor], tuple[Tensor, ...]]


class Programs:
    """The routes of a network as programs of OpenVINO for batches of `BATCH` images."""

    def __init__(self, model: CompositeNetwork) -> None:
        self.model = model
        self.programs = []
        for route in model.space:
            side = model.at(route)[0].input_spec.image_size
            self.programs.append(compile_network(extract(model, route), torch.zeros(BATCH, 3, side, side)))

    def __call__(self, x: Tensor, route: int) -> Tensor:
        """Compute logits [B, classes] of images of the whole network, at most `BATCH`."""
        inputs = self.model.members[self.model.member_of(route)].images(x)
        missing = BATCH - len(x)
        padded = torch.cat([inputs, inputs[-1:].expand(missing, -1, -1, -1)]) if missing else inputs
        return self.programs[route](padded)[0][: len(x)]


def compile_network(network: nn.Module, example: Tensor) -> Program:
    """Compile a network for images like the example."""
    return get_backend(BACKEND).convert(network, example)(example)


@torch.inference_mode()
def record(model: CompositeNetwork, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Record what `dsnet.calibration.collect` records, by OpenVINO, which takes a third of the time.

    The first batch runs in PyTorch too; ``error`` is the largest relative difference of its logits.
    """
    programs, error = Programs(model), 0.0
    labels, predicted, margins = [], [], []
    for x, targets in batches:
        logits = [programs(x, route.number) for route in model.space]
        if not labels:
            for route, found in zip(model.space, logits, strict=True):
                expected = model(x, route)
                error = max(error, float((found - expected).norm() / expected.norm()))
        labels.append(targets)
        predicted.append(torch.stack([z.argmax(1) for z in logits], 1))
        margins.append(torch.stack([margin(z) for z in logits], 1))
    return {
        "labels": torch.cat(labels),
        "predicted": torch.cat(predicted),
        "margins": torch.cat(margins),
        "error": error,
    }


def outputs_on(
    split: str, model: CompositeNetwork, sources: Sequence[Source], folder: Path | None
) -> tuple[RouteOutputs, float]:
    """Record the outputs of all routes, or read those that an earlier call recorded; see `record`."""
    file = None if folder is None else folder / f"{split}.pt"
    if file is not None and file.exists():
        kept = torch.load(file, weights_only=True)
        if kept.pop("name") != model.name:
            raise SystemExit(f"{file} has the outputs of other networks; delete it")
    else:
        kept = record(model, images(split, model.input_spec.image_size, sources[-1]))
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"name": model.name, **kept}, file)
    error = kept.pop("error")
    size = model.input_spec.image_size
    outputs = RouteOutputs(
        space=model.space,
        routes=model.space.routes,
        options=((0,),),
        scores=(torch.zeros(1, len(kept["labels"]), 1),),
        image_size=(size, size),
        digest=f"imagenet5k-{split}",
        **kept,
    )
    return outputs, error


def of_routes(outputs: RouteOutputs, numbers: Sequence[int]) -> RouteOutputs:
    """Return the outputs of some routes."""
    columns = [outputs.column(number) for number in numbers]
    return replace(
        outputs,
        routes=tuple(outputs.routes[column] for column in columns),
        predicted=outputs.predicted[:, columns],
        margins=outputs.margins[:, columns],
    )


# --- pairs ----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Pair:
    """A cascade of two networks at a threshold."""

    routes: tuple[int, ...]
    point: OperatingPoint


def pairs_of(outputs: RouteOutputs, costs: CostTable) -> list[Pair]:
    """Calibrate every pair of networks; return its operating points."""
    found = []
    for numbers in itertools.combinations([route.number for route in outputs.routes], 2):
        router = calibrate(of_routes(outputs, numbers), costs, gate=False).router("cascade")
        found += [Pair(numbers, point) for point in router.curve if point.routes == numbers]
    return found


def as_accurate(pairs: Sequence[Pair], accuracy: float) -> Pair | None:
    """Return the cheapest pair with at least this accuracy on the calibration images."""
    enough = [pair for pair in pairs if pair.point.accuracy >= accuracy - 1e-9]
    return min(enough, key=lambda pair: pair.point.cost, default=None)


def as_expensive(pairs: Sequence[Pair], cost: float) -> Pair | None:
    """Return the most accurate pair of at most this mean cost on the calibration images."""
    within = [pair for pair in pairs if pair.point.cost <= cost * (1 + 1e-9)]
    return max(within, key=lambda pair: (pair.point.accuracy, -pair.point.cost), default=None)


def choose(pairs: Sequence[Pair], outputs: RouteOutputs, costs: CostTable) -> Iterator[tuple[str, int, Pair]]:
    """Yield (goal, network to compare with, pair), chosen on calibration images; see the docstring above."""
    accuracies = outputs.correct.double().mean(0).tolist()
    every = sorted({pair.routes for pair in pairs})
    choices: list[tuple[str, int, Pair | None]] = [
        ("as accurate", n[1], as_accurate([p for p in pairs if p.routes == n], accuracies[n[1]]))
        for n in every
    ]
    for number, accuracy in enumerate(accuracies):
        choices.append(("as expensive", number, as_expensive(pairs, costs.of((number,)))))
        choices.append(("any pair", number, as_accurate(pairs, accuracy)))
    for goal, number, pair in sorted(choices, key=lambda c: (c[0], c[1])):
        if pair is not None and pair.point.cost <= costs.of((number,)) * (1 + 1e-9):
            yield goal, number, pair


def evaluate(pair: Pair, other: int, outputs: RouteOutputs, costs: CostTable) -> dict[str, Any]:
    """Compare a pair with a network alone on test images."""
    (threshold,) = pair.point.parameters
    policy = CascadePolicy(costs=costs, routes=pair.routes, thresholds=(threshold,))
    simulation = simulate(policy, outputs)
    correct = simulation.correct.double()
    alone = outputs.correct[:, outputs.column(other)].double()
    whole = costs.of((other,))
    values = torch.stack([100 * (correct - alone), simulation.costs / whole], 1).numpy()
    low, high = bootstrap(values)
    return {
        "routes": list(pair.routes),
        "beside": other,
        "threshold": threshold,
        "calibration": {"madds": pair.point.cost, "top1": 100 * pair.point.accuracy},
        "go_on": float((simulation.columns == outputs.column(pair.routes[1])).double().mean()),
        "madds": simulation.cost,
        "ratio": simulation.cost / whole,
        "ratio_interval": [low[1], high[1]],
        "top1": 100 * simulation.accuracy,
        "difference": 100 * float((correct - alone).mean()),
        "difference_interval": [low[0], high[0]],
    }


def bootstrap(values: Array) -> tuple[list[float], list[float]]:
    """Return the 2.5 % and 97.5 % quantiles of means over images drawn with replacement.

    Args:
        values: Values [images, columns].
    """
    count = len(values)
    generator = np.random.default_rng(0)
    parts = []
    for _ in range(SAMPLES // 500):
        drawn = generator.multinomial(count, np.full(count, 1 / count), size=500)
        parts.append(drawn @ values / count)
    low, high = np.quantile(np.concatenate(parts), (0.025, 0.975), axis=0)
    return low.tolist(), high.tolist()


# --- time -----------------------------------------------------------------------------------------------
@torch.inference_mode()
def time_networks(model: CompositeNetwork, rounds: int) -> dict[str, Any]:
    """Time every network on one image of its size, and resizing an image for it."""
    load = os.getloadavg()
    x = torch.randn(1, *model.input_spec.shape(), generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], object]] = {}
    for route in model.space:
        member = model.members[model.member_of(route)]
        image = member.images(x).contiguous()
        calls[f"alone {route.number}"] = partial(compile_network(extract(model, route), image), image)
        if member.images(x) is not x:
            calls[f"resize {route.number}"] = partial(member.images, x)

    def clock(call: Callable[[], object], device: torch.device) -> float:
        call()
        return timed(call, device)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of resizing; programs have theirs
    samples = time_interleaved(calls, CPU, rounds=rounds, warm_up=WARM_UP, clock=clock)
    torch.set_num_threads(threads)
    return {
        "rounds": rounds,
        "cores": os.cpu_count(),
        "load": {"before": load, "after": os.getloadavg()},
        "times": {name: asdict(Spread.of(milliseconds)) for name, milliseconds in samples.items()},
    }


def cascade_ms(row: dict[str, Any], times: dict[str, Any]) -> float:
    """Compute the mean milliseconds of an image in a cascade; see the module's docstring."""

    def ms(route: int) -> float:
        parts = (times.get(f"{part} {route}") for part in ("alone", "resize"))
        return sum(float(part["median"]) for part in parts if part is not None)

    first, second = row["routes"]
    return ms(first) + float(row["go_on"]) * ms(second)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="+", type=parse_source, metavar="NAME=FILE")
    parser.add_argument("--outputs", type=Path, metavar="FOLDER", help="keep the recorded outputs here")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    add_json(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model = build(args.networks)
    costs = CostTable.of_model(model)
    calibration, first_error = outputs_on("calibration", model, args.networks, args.outputs)
    test, second_error = outputs_on("test", model, args.networks, args.outputs)
    pairs = pairs_of(calibration, costs)
    timing = time_networks(model, args.rounds)
    networks = [
        {
            "title": args.networks[model.member_of(route)].network.title,
            "side": route.image_size,
            "madds": costs.of(route.choices),
            "calibration": 100 * float(calibration.correct[:, route.number].double().mean()),
            "top1": 100 * float(test.correct[:, route.number].double().mean()),
        }
        for route in model.space
    ]
    rows = []
    for goal, other, pair in choose(pairs, calibration, costs):
        row = evaluate(pair, other, test, costs)
        rows.append({"goal": goal, **row, "ms": cascade_ms(row, timing["times"])})
    results = {
        "backend": BACKEND,
        "images": {"calibration": len(calibration), "test": len(test)},
        "error": max(first_error, second_error),
        **timing,
        "networks": networks,
        "results": rows,
    }
    report({"benchmark": "imagenet-cascade", **environment(CPU), **results}, args.json)


if __name__ == "__main__":
    main()
