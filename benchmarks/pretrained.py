"""Measure what `dsnet.convert` makes of pretrained networks: exactness, the order of channels, and time.

    DSNET_DATA=FOLDER python -m benchmarks.pretrained exact NAME=FILE… [--images 5000] [--json FILE]
    DSNET_DATA=FOLDER python -m benchmarks.pretrained importance NAME=FILE [--images 2000] [--json FILE]
    python -m benchmarks.pretrained latency NAME=FILE [--rounds 200] [--json FILE]

NAME is ``lite0``, ``lite1``, ``lite2`` (EfficientNet-Lite) or ``mobilenetv2``, FILE its ImageNet weights: a
state dict whose tensors stand in the order of timm's network. Nothing is trained.

*exact* compares the largest route with the original network on ImageNet's validation images, image by image.

*importance* compares orders of channels. A route keeps the first channels of every group, so its accuracy
depends on which ones are first. For each order the network is converted, the batch-norm statistics of all
routes are computed anew on training images, and every route is evaluated. Classes are Imagenette's ten, by
their rows of the original classifier. 97 % of Imagenette's validation images are in ImageNet's training set,
which the weights were trained on: these figures compare orders with each other and say nothing about
accuracy on new images. The largest route is the same network in every order; statistics of ten classes fit
its weights worse than those of ImageNet, so it is less accurate than the original network. Orders:

- *unsorted*: as in the original network
- *weights*: by the weights that read a channel, the default of `dsnet.convert`
- *activations*: by these weights times the channel's mean activation on the re-calibration images
- *Torch-Pruning*: by an importance of that library, for the same groups of channels. Its Taylor importance
  takes gradients of the cross-entropy with the network's own predictions. No order sees a label.

*latency* times one image by OpenVINO: the original network, every route extracted as a network of its own,
and every route inside the plan, where the gate is computed and its decision replaced. All are timed in turn,
round after round, each call right after an untimed one of the same network.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.script import add_json, report
from benchmarks.timing import environment
from dsnet.benchmark.results import Spread
from dsnet.calibration import collect
from dsnet.core.timer import time_interleaved, timed
from dsnet.cost import madds
from dsnet.data import load_dataset
from dsnet.data.registry import DatasetRequest, Split
from dsnet.data.transforms.augment import normalise
from dsnet.extract import extract
from dsnet.models.convert import convert
from dsnet.models.convert._analysis import analyse
from dsnet.models.convert._axes import Group, groups_of
from dsnet.models.convert._importance import sorted_weights
from dsnet.models.convert._tracing import trace
from dsnet.models.convert.network import ConvertedNetwork
from dsnet.models.convert.sources import load_weights, timm_network
from dsnet.runtime import compile as compile_plan
from dsnet.runtime import get_backend
from dsnet.runtime.forced_routes import assigned_call
from dsnet.training.bn_calibration import recalibrate

CPU = torch.device("cpu")
BATCH = 16  # larger batches are slower on few cores
CALIBRATION_BATCH = 128
SIDE = 128  # of Imagenette's images
IMAGENETTE = (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)  # its classes in ImageNet
TAYLOR_IMAGES = 256
WARM_UP = 10  # rounds
TORCH_PRUNING = ("magnitude, p = 1", "magnitude, p = 2", "batch-norm scale", "Taylor")

Channels = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation, of values in [0, 1]
LITE: Channels = ((127 / 255,) * 3, (128 / 255,) * 3)
IMAGENET: Channels = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Network(NamedTuple):
    """A pretrained network: what it is called, its images, and how their values are normalised."""

    title: str
    timm: str
    side: int
    channels: Channels


NETWORKS = {
    "lite0": Network("EfficientNet-Lite0", "tf_efficientnet_lite0", 224, LITE),
    "lite1": Network("EfficientNet-Lite1", "tf_efficientnet_lite1", 240, LITE),
    "lite2": Network("EfficientNet-Lite2", "tf_efficientnet_lite2", 260, LITE),
    "mobilenetv2": Network("MobileNetV2", "mobilenetv2_100", 224, IMAGENET),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A network and the file of its weights."""

    network: Network
    weights: Path

    def build(self) -> nn.Module:
        """Build the original network."""
        network = timm_network(self.network.timm)
        load_weights(network, self.weights, by_order=True)
        return network.requires_grad_(False)


def parse_source(text: str) -> Source:
    """Parse NAME=FILE."""
    name, _, file = text.partition("=")
    if name not in NETWORKS or not file:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE with NAME one of {', '.join(NETWORKS)}")
    return Source(NETWORKS[name], Path(file))


# --- exact ----------------------------------------------------------------------------------------------
def validation_images(side: int, count: int) -> tuple[Tensor, Tensor]:
    """Return images [N, 3, side, side] of bytes and labels: the test half first, then the other."""
    folder = DatasetRequest(split="test").folder
    images, labels = [], []
    for part in ("test", "calibration"):
        if sum(map(len, labels)) < count:
            data = load_dataset(str(folder / f"imagenet5k-{part}.parquet"), "test", size=side)
            generator = torch.Generator().manual_seed(0)
            order = torch.randperm(len(data), generator=generator)[: count - sum(map(len, labels))]
            for batch, targets in data.batches(list(order.sort()[0].split(256)), full=False):
                images.append(batch[0])
                labels.append(targets)
    return torch.cat(images), torch.cat(labels)


@torch.inference_mode()
def compare_predictions(source: Source, count: int) -> dict[str, Any]:
    """Compare the largest route with the original network on validation images."""
    side = source.network.side
    images, labels = validation_images(side, count)
    original = source.build()
    example = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    model = convert(original, example).to(memory_format=torch.channels_last)
    original = original.to(memory_format=torch.channels_last)
    right = {"original": 0, "converted": 0}
    differ, largest = 0, 0.0
    for batch, targets in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        x = normalise(batch, *source.network.channels).contiguous(memory_format=torch.channels_last)
        expected, actual = original(x), model(x, model.space.largest)
        right["original"] += int((expected.argmax(1) == targets).sum())
        right["converted"] += int((actual.argmax(1) == targets).sum())
        differ += int((expected.argmax(1) != actual.argmax(1)).sum())
        errors = (actual - expected).norm(dim=1) / expected.norm(dim=1)
        largest = max(largest, float(errors.max()))
    return {
        "network": source.network.title,
        "side": side,
        "images": len(labels),
        "top1": {name: 100 * number / len(labels) for name, number in right.items()},
        "differ": differ,
        "largest_error": largest,
    }


def run_exact(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare every given network with its conversion."""
    rows = []
    for source in args.networks:
        rows.append(compare_predictions(source, args.images))
        yield {"results": rows}


# --- importance -----------------------------------------------------------------------------------------
class Images(NamedTuple):
    """Normalised images, and their labels."""

    pixels: Tensor
    labels: Tensor

    @classmethod
    def load(cls, split: Split, count: int, seed: int, channels: Channels) -> Images:
        """Draw images of Imagenette."""
        data = load_dataset("imagenette", split, size=SIDE)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count]
        found = list(data.batches(list(order.split(256)), full=False))
        pixels = normalise(torch.cat([batch[0] for batch, _ in found]), *channels)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        return cls(pixels, torch.cat([labels for _, labels in found]))

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels."""
        return zip(self.pixels.split(size), self.labels.split(size), strict=True)


def ten_classes(network: nn.Module) -> nn.Module:
    """Keep the rows of the classifier that belong to Imagenette's classes."""
    old: Any = network.get_submodule("classifier")
    new = nn.Linear(old.in_features, len(IMAGENETTE)).eval().requires_grad_(False)
    new.weight.copy_(old.weight[list(IMAGENETTE)])
    new.bias.copy_(old.bias[list(IMAGENETTE)])
    network.set_submodule("classifier", new)
    return network


def torch_pruning_scores(
    network: nn.Module, importance: str, layers: list[str], example: Tensor, images: Tensor
) -> dict[str, Tensor]:
    """Return Torch-Pruning's importance of the output channels of layers, and of all that depends on them.

    Args:
        network: The original network.
        importance: One of `TORCH_PRUNING`.
        layers: Names of convolutions.
        example: Images to trace the network with.
        images: Images for gradients.
    """
    import torch_pruning

    scorers = {
        "magnitude, p = 1": lambda: torch_pruning.importance.GroupMagnitudeImportance(p=1),
        "magnitude, p = 2": lambda: torch_pruning.importance.GroupMagnitudeImportance(p=2),
        "batch-norm scale": torch_pruning.importance.BNScaleImportance,
        "Taylor": torch_pruning.importance.GroupTaylorImportance,
    }
    scorer = scorers[importance]()
    network.requires_grad_(True)
    with torch.enable_grad():
        graph = torch_pruning.DependencyGraph().build_dependency(network, example_inputs=example)
        if importance == "Taylor":
            for part in images[:TAYLOR_IMAGES].split(BATCH):
                logits = network(part)
                F.cross_entropy(logits, logits.argmax(1), reduction="sum").backward()
    scores = {}
    for name in layers:
        layer: Any = network.get_submodule(name)
        channels = list(range(layer.out_channels))
        group = graph.get_pruning_group(layer, torch_pruning.prune_conv_out_channels, idxs=channels)
        scores[name] = scorer(group).detach()
    network.zero_grad(set_to_none=True)
    network.requires_grad_(False)
    return scores


def sort_channels(network: nn.Module, scores: Mapping[str, Tensor], example: Tensor) -> None:
    """Sort the output channels of layers by falling score; the network computes the same as before."""
    analysis = analyse(trace(network, torch.cat([example, example])))
    order: dict[Group, Tensor] = {}
    for name, values in scores.items():
        (group,) = groups_of(analysis.weights[f"{name}.weight"][0])
        order[group] = values.argsort(descending=True, stable=True)
    network.load_state_dict(sorted_weights(analysis, network.state_dict(), order))


def convert_ordered(source: Source, order: str, images: Images) -> ConvertedNetwork:
    """Convert the network with its channels in an order, see the module's docstring."""
    network = ten_classes(source.build())
    example = images.pixels[:1].contiguous()
    if order in ("unsorted", "weights"):
        return convert(network, example, sort=order == "weights")
    if order == "activations":
        return convert(network, example, batches=(x for x, _ in images.batches(BATCH)))
    layers = [group.name for group in convert(network, example, sort=False).conversion.sliced]
    scores = torch_pruning_scores(network, order, layers, example, images.pixels)
    sort_channels(network, scores, example)
    return convert(network, example, sort=False)


def run_importance(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Evaluate every route with the channels in every order."""
    (source,) = args.networks
    test = Images.load("test", args.images, 0, source.network.channels)
    original = ten_classes(source.build()).to(memory_format=torch.channels_last)
    with torch.inference_mode():
        right = [int((original(x).argmax(1) == y).sum()) for x, y in test.batches(BATCH)]
    rows: list[dict[str, Any]] = []
    costs: dict[str, int] = {}
    for seed in args.seeds:
        train = Images.load("train", args.calibration, seed, source.network.channels)
        for order in ("unsorted", "weights", "activations", *TORCH_PRUNING):
            model = convert_ordered(source, order, train).to(memory_format=torch.channels_last)
            recalibrate(model, (x for x, _ in train.batches(CALIBRATION_BATCH)))
            with torch.inference_mode():
                outputs = collect(model, test.batches(BATCH), list(model.space))
            correct = (outputs.predicted == outputs.labels[:, None]).double().mean(0)
            accuracies = {
                str(route.number): 100 * float(share)
                for route, share in zip(outputs.routes, correct, strict=True)
            }
            costs = {str(route.number): madds(model, route) for route in outputs.routes}
            rows.append({"order": order, "seed": seed, "test": accuracies})
            print(rows[-1], flush=True)
        yield {
            "network": source.network.title,
            "side": SIDE,
            "images": len(test.labels),
            "calibration": args.calibration,
            "original": 100 * sum(right) / len(test.labels),
            "madds": costs,
            "runs": rows,
        }


# --- latency --------------------------------------------------------------------------------------------
@torch.inference_mode()
def time_routes(source: Source, rounds: int) -> dict[str, Any]:
    """Time the original network, every route alone and every route in the plan."""
    load = os.getloadavg()
    side = source.network.side
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    original = source.build()
    model = convert(original, x)
    routes = list(model.space)
    backend = get_backend("openvino")
    networks = {"original": original} | {f"alone {r.number}": extract(model, r) for r in routes}
    programs = {name: backend.convert(network, x)(x) for name, network in networks.items()}
    calls: dict[str, Callable[[], object]] = {name: partial(run, x) for name, run in programs.items()}
    compiled = compile_plan(
        model, backend="openvino", batch_buckets=(1,), routes=[r.number for r in routes]
    ).network
    for route in routes:
        calls[f"plan {route.number}"] = partial(assigned_call(compiled, [route]), x)
    reference = original(x)
    largest = programs[f"alone {model.space.largest.number}"](x)[0]
    error = float((largest - reference).norm() / reference.norm())

    def clock(call: Callable[[], object], device: torch.device) -> float:
        call()
        return timed(call, device)

    samples = time_interleaved(calls, CPU, rounds=rounds, warm_up=WARM_UP, clock=clock)
    return {
        "network": source.network.title,
        "side": side,
        "backend": "openvino",
        "rounds": rounds,
        "cores": os.cpu_count(),
        "load": {"before": load, "after": os.getloadavg()},
        "error": error,
        "madds": {str(route.number): madds(model, route) for route in routes},
        "times": {name: asdict(Spread.of(milliseconds)) for name, milliseconds in samples.items()},
    }


def run_latency(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time a network's conversion."""
    (source,) = args.networks
    yield time_routes(source, args.rounds)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(required=True)
    exact = steps.add_parser("exact", help="the largest route beside the original network")
    exact.set_defaults(run=run_exact, benchmark="pretrained-exact")
    exact.add_argument("--images", type=int, default=5000, help="validation images, at most 5000")
    importance = steps.add_parser("importance", help="accuracy of routes by the order of channels")
    importance.set_defaults(run=run_importance, benchmark="pretrained-importance")
    importance.add_argument("--images", type=int, default=2000, help="validation images, at most 3925")
    importance.add_argument("--calibration", type=int, default=1024, help="training images")
    importance.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the training images")
    latency = steps.add_parser("latency", help="milliseconds of one image by OpenVINO")
    latency.set_defaults(run=run_latency, benchmark="pretrained-latency")
    latency.add_argument("--rounds", type=int, default=200)
    for step, threads in ((exact, 1), (importance, 1), (latency, 2)):
        step.add_argument(
            "networks", nargs="+" if step is exact else 1, type=parse_source, metavar="NAME=FILE"
        )
        step.add_argument("--threads", type=int, default=threads)
        add_json(step)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    about = {"benchmark": args.benchmark, **environment(CPU)}
    for results in args.run(args):
        report({**about, **results}, args.json)


if __name__ == "__main__":
    main()
