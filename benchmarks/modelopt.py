"""Compare the routes of a converted network with networks that NVIDIA ModelOpt prunes to the same MAdds.

    python -m benchmarks.modelopt FOLDER --weights lite0.pth [--routes 0 1 2] [--rates 0.05 0.1] [--seeds 0]
                                  [--before 30] [--epochs 30] [--divisor 8] [--json FILE]

FOLDER holds `train*.parquet` and `test*.parquet`, or one folder a class. Both start from EfficientNet-Lite0
with the ImageNet weights of this file, whose tensors are taken by order, at 128 x 128 pixels.

ModelOpt searches for the widths of its pruned networks (FastNAS): it measures the accuracy for each width of
each group of channels with all others whole, on training images that are held out for it, and then prunes all
groups to the same loss of accuracy. So the network has to know the classes: it is fine-tuned for `--before`
epochs first. Each pruned network is then fine-tuned for `--epochs` epochs, with the settings of the
stand-alone networks of `benchmarks/recipes/pretrained-voc.json`. The first network of the results is not
pruned: the network after `--before` epochs.

ModelOpt does not know two of timm's layers, and finds nothing to prune in the network as it is. They are
replaced by layers of torch that compute the same: a convolution with TensorFlow's padding by a padding and a
convolution, a batch norm with an activation by a batch norm and an activation.

Conversion is timed on the CPU, for both, with the median of `CONVERSIONS` calls. A search is timed on the
device. The first one measures the accuracies, and later ones for the same seed read them.

Needs the packages nvidia-modelopt and torchprofile 0.0.4.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.script import make_parser, report
from benchmarks.timing import environment
from dsnet.cost import madds
from dsnet.data import load_dataset
from dsnet.data.registry import Split
from dsnet.data.transforms.augment import Augment, normalise
from dsnet.models.convert import convert
from dsnet.models.convert.sources import load_weights, timm_network
from dsnet.training.optim import make_optimizer, parameter_groups, scheduled_rate, set_learning_rate

SIDE, BATCH = 128, 256
LITE = ((0.498,) * 3, (0.502,) * 3)  # mean and deviation that the weights were trained with
WEIGHT_DECAY, SMOOTHING = 1e-4, 0.1
CONVERSIONS = 5
CALIBRATION_BATCH = 128


@dataclass(frozen=True, slots=True)
class Images:
    """Images [N, 3, side, side] of bytes and labels [N] on the device."""

    pixels: Tensor
    labels: Tensor

    @classmethod
    def load(cls, folder: str, split: Split, count: int | None, device: torch.device) -> Images:
        """Load a split, or ``count`` images of it."""
        data = load_dataset(folder, split, size=SIDE)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
        found = list(data.batches(list(order.split(1024)), full=False))
        pixels, labels = torch.cat([x[0] for x, _ in found]), torch.cat([y for _, y in found])
        return cls(pixels.to(device), labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, count: int) -> tuple[Images, Images]:
        """Return the first ``count`` images, and the others."""
        first, others = slice(None, count), slice(count, None)
        return Images(self.pixels[first], self.labels[first]), Images(
            self.pixels[others], self.labels[others]
        )

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield normalised images and labels."""
        for pixels, labels in zip(self.pixels.split(size), self.labels.split(size), strict=True):
            yield normalise(pixels, *LITE), labels


# --- the network ----------------------------------------------------------------------------------------
def pretrained_network(weights: Path, classes: int, seed: int) -> nn.Module:
    """Create EfficientNet-Lite0 with these weights and a new classifier, in eval mode."""
    network = timm_network("tf_efficientnet_lite0", num_classes=classes, seed=seed)
    load_weights(network, weights, by_order=True)
    return network


@torch.no_grad()
def replace_layers(network: nn.Module, example: Tensor) -> None:
    """Replace layers of timm that ModelOpt does not know by layers of torch that compute the same.

    Args:
        network: The network, in eval mode.
        example: Images of the only size that the network can be used with afterwards.
    """
    from timm.layers import BatchNormAct2d, Conv2dSame

    expected = network(example)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, Conv2dSame):
            network.set_submodule(name, _padded_convolution(network, name, example))
        elif isinstance(layer, BatchNormAct2d):
            norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum)
            norm.load_state_dict(layer.state_dict())
            parts = [norm] if isinstance(layer.act, nn.Identity) else [norm, layer.act]
            network.set_submodule(name, nn.Sequential(*parts).eval())
    torch.testing.assert_close(network(example), expected)


def _padded_convolution(network: nn.Module, name: str, example: Tensor) -> nn.Sequential:
    """Return a padding and a convolution in the place of a convolution with TensorFlow's padding."""
    layer: Any = network.get_submodule(name)
    sides: list[int] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: sides.append(inputs[0].shape[-1]))
    network(example)
    handle.remove()
    (side,), (kernel, _), (stride, _) = sides, layer.kernel_size, layer.stride
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    before, after = total // 2, total - total // 2
    bias = layer.bias is not None
    plain = nn.Conv2d(layer.in_channels, layer.out_channels, kernel, stride, groups=layer.groups, bias=bias)
    plain.load_state_dict(layer.state_dict())
    return nn.Sequential(nn.ZeroPad2d((before, after, before, after)), plain)


@torch.no_grad()
def count_madds(network: nn.Module) -> int:
    """Count the multiply-adds of convolutions and linear layers for one image."""
    device = next(network.parameters()).device
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, SIDE, SIDE, device=device))
    return counter.get_total_flops() // 2


# --- training and evaluation ----------------------------------------------------------------------------
def autocast(device: torch.device) -> Any:  # noqa: ANN401  (a context)
    """Run in bfloat16 on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def fine_tune(network: nn.Module, images: Images, *, epochs: int, rate: float, seed: int) -> float:
    """Fine-tune a network; return the seconds."""
    device = images.pixels.device
    network.to(memory_format=torch.channels_last).train()
    augment, generator = Augment(crop=(0.35, 1.0), flip=True), torch.Generator(device).manual_seed(seed)
    optimizer = make_optimizer("sgd", parameter_groups([network], WEIGHT_DECAY), lr=rate)
    each = len(images) // BATCH
    start = time.perf_counter()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator, device=device)
        for number, rows in enumerate(order.split(BATCH)[:each]):
            lr = scheduled_rate(rate, epoch * each + number, steps=epochs * each, warmup=each)
            set_learning_rate(optimizer, lr)
            x = normalise(augment(images.pixels[rows], generator), *LITE)
            optimizer.zero_grad(set_to_none=True)
            with autocast(device):
                logits = network(x.contiguous(memory_format=torch.channels_last))
            F.cross_entropy(logits.float(), images.labels[rows], label_smoothing=SMOOTHING).backward()
            optimizer.step()
    synchronize(device)
    network.eval().to(memory_format=torch.contiguous_format)
    return time.perf_counter() - start


@torch.no_grad()
def accuracy(network: nn.Module, images: Images) -> float:
    """Return the share of images that a network classifies correctly.

    While ModelOpt searches, its ``eval`` also computes the batch-norm statistics of the widths at hand.
    """
    network.eval()
    with autocast(images.pixels.device):
        right = sum(((network(x).argmax(1) == y).sum() for x, y in images.batches(1024)), torch.tensor(0))
    return int(right) / len(images)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- ModelOpt -------------------------------------------------------------------------------------------
def convert_for_pruning(network: nn.Module, divisor: int) -> Any:  # noqa: ANN401  (a module of ModelOpt)
    """Convert a network, in place, to ModelOpt's search space for FastNAS.

    Args:
        network: The network.
        divisor: Widths are multiples of it.
    """
    import modelopt.torch.nas as mtn
    import modelopt.torch.prune as mtp
    from modelopt.torch.prune.pruning import PruneModeRegistry

    config = mtp.fastnas.FastNASConfig()
    config["nn.Conv2d"]["*"]["channel_divisor"] = divisor
    config["nn.BatchNorm2d"]["*"]["feature_divisor"] = divisor
    return mtn.convert(network, [("fastnas", config)], registry=PruneModeRegistry)


def prune(
    network: nn.Module,
    share: float,
    calibration: Images,
    held_out: Images,
    *,
    divisor: int,
    checkpoint: Path,
) -> tuple[nn.Module, float]:
    """Prune a network by ModelOpt's FastNAS.

    Args:
        network: The network; it is not changed.
        share: The largest share of the multiply-adds to keep.
        calibration: Images for the batch-norm statistics of every network that is tried.
        held_out: Images to measure the accuracy on.
        divisor: Widths are multiples of it.
        checkpoint: A file that keeps the measured accuracies.

    Returns:
        The pruned network, and the seconds of the search.
    """
    import modelopt.torch.nas as mtn

    device = held_out.pixels.device
    converted = convert_for_pruning(copy.deepcopy(network), divisor)
    start = time.perf_counter()
    pruned, _ = mtn.search(
        converted,
        constraints={"flops": f"{100 * share}%"},
        dummy_input=torch.zeros(1, 3, SIDE, SIDE, device=device),
        config={
            "data_loader": list(calibration.batches(CALIBRATION_BATCH)),
            "score_func": lambda candidate: accuracy(candidate, held_out),
            "checkpoint": str(checkpoint),
            "verbose": False,
        },
    )
    synchronize(device)
    return pruned, time.perf_counter() - start


# --- the comparison -------------------------------------------------------------------------------------
def median_seconds(calls: Iterable[Callable[[], object]]) -> float:
    """Return the median time of calls."""
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def time_conversions(network: nn.Module, plain: nn.Module, divisor: int) -> dict[str, float]:
    """Time `dsnet.convert` for a network, and ModelOpt's conversion for it with replaced layers."""
    example = torch.zeros(1, 3, SIDE, SIDE)
    calls = [lambda: convert(network, example)] * CONVERSIONS
    ours = median_seconds(calls)
    copies = [copy.deepcopy(plain) for _ in range(CONVERSIONS)]
    theirs = median_seconds([lambda x=x: convert_for_pruning(x, divisor) for x in copies])
    return {"dsnet": round(ours, 3), "ModelOpt": round(theirs, 3)}


def compare(args: Any, device: torch.device) -> Iterator[dict[str, Any]]:  # noqa: ANN401  (arguments)
    """Prune to the MAdds of each route, and fine-tune; yield the figures so far after every network."""
    train, test = (Images.load(args.folder, s, args.images, device) for s in ("train", "test"))
    classes = int(train.labels.max()) + 1
    runs: list[dict[str, Any]] = []
    conversion: dict[str, float] = {}
    for seed in args.seeds:
        network = pretrained_network(args.weights, classes, seed)
        example = torch.randn(1, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        plain = copy.deepcopy(network)
        replace_layers(plain, example)
        supernet = convert(network, example)
        costs = {route.number: madds(supernet, route) for route in supernet.space}
        targets = {str(number): count for number, count in costs.items()}
        conversion = conversion or time_conversions(network, plain, args.divisor)
        plain.to(device)
        held_out, others = train.split(args.held_out)
        seconds = fine_tune(plain, others, epochs=args.before, rate=args.before_rate, seed=seed)
        common = {"seed": seed, "before": args.before}
        run = {"route": supernet.space.largest.number, "rate": args.before_rate, "epochs": 0}
        run |= {"madds": count_madds(plain), "training_seconds": round(seconds, 1)}
        runs.append({**common, **run, "test": round(100 * accuracy(plain, test), 2)})
        yield {"conversion_seconds": conversion, "madds": targets, "runs": runs}
        with tempfile.TemporaryDirectory() as folder:
            for route in args.routes:
                pruned, searched = prune(
                    plain,
                    costs[route] / costs[supernet.space.largest.number],
                    others.split(args.calibration)[0],
                    held_out,
                    divisor=args.divisor,
                    checkpoint=Path(folder) / "search.pth",
                )
                run = {"route": route, "madds": count_madds(pruned), "search_seconds": round(searched, 1)}
                run["test_before"] = round(100 * accuracy(pruned, test), 2)
                for rate in args.rates:
                    tuned = copy.deepcopy(pruned)
                    seconds = fine_tune(tuned, train, epochs=args.epochs, rate=rate, seed=seed)
                    run |= {"rate": rate, "epochs": args.epochs, "training_seconds": round(seconds, 1)}
                    runs.append({**common, **run, "test": round(100 * accuracy(tuned, test), 2)})
                    print(runs[-1], flush=True)
                    yield {"conversion_seconds": conversion, "madds": targets, "runs": runs}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", help="the images")
    parser.add_argument("--weights", type=Path, required=True, help="ImageNet weights of EfficientNet-Lite0")
    parser.add_argument("--routes", nargs="+", type=int, default=[0, 1, 2], help="whose MAdds to prune to")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.05], help="learning rates")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--before", type=int, default=30, help="epochs before pruning")
    parser.add_argument("--before-rate", type=float, default=0.05, help="their learning rate")
    parser.add_argument("--epochs", type=int, default=30, help="epochs after pruning")
    parser.add_argument("--divisor", type=int, default=8, help="widths are multiples of it")
    parser.add_argument("--held-out", type=int, default=2000, help="training images for the search")
    parser.add_argument("--calibration", type=int, default=1024, help="images for batch-norm statistics")
    parser.add_argument("--images", type=int, help="use so many images of each split")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"benchmark": "modelopt", **environment(device), "divisor": args.divisor}
    about["held_out"] = args.held_out
    for results in compare(args, device):
        report({**about, **results}, args.json)


if __name__ == "__main__":
    main()
