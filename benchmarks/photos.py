"""Compare `dsnet train --data` on photos with a small residual network, at equal CPU time.

    DSNET_DATA=FOLDER python -m benchmarks.photos [--seeds 0 1 2] [--rates 0.05 0.1 0.2] [--json FILE]
    DSNET_DATA=FOLDER python -m benchmarks.photos --pretrained lite0.pth [--rates 0.005 0.02] [--json FILE]
                                                  [--ultralytics yolo11n-cls.yaml]

The photos are 100 training images of each of Imagenette's ten classes at 64 x 64 pixels. Accuracy is measured
on its 3,925 validation images. *dsnet* trains with the default settings for photos, with 10 % held out. Its
seconds are CPU seconds until the last step; `cpu_seconds_of_all` also counts decoding, re-calibration and the
test of every route. *resnet* is a plain residual network of 0.8M parameters. It trains on all photos for the
same CPU seconds with the same augmentation, once for each learning rate of `--rates`.

With ``--pretrained`` the photos have 128 pixels a side, and both start from EfficientNet-Lite0 with the
ImageNet weights of this file, whose tensors are taken by order: *dsnet* with its settings for a pretrained
network, and the network itself in a plain loop. 97 % of Imagenette's validation images are in ImageNet's
training set.

``--ultralytics`` adds a classifier of Ultralytics (package ultralytics): weights, or a network to train from
scratch. It trains on all photos with the default settings, for as many epochs as take the same CPU seconds;
two that are timed first are not counted. The accuracy is that after the last epoch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.script import make_parser, report
from benchmarks.timing import environment
from dsnet.core.settings import override, parse_assignments
from dsnet.data import load_dataset
from dsnet.data.dataset import ImageDataset
from dsnet.data.inspect import inspect_dataset
from dsnet.data.transforms.augment import Augment, normalise
from dsnet.models.convert.sources import import_timm, load_weights, timm_network
from dsnet.recipes.custom_data import fine_tuning_recipe, recipe_for
from dsnet.training.api import train
from dsnet.training.callbacks import Callback
from dsnet.training.config import DataConfig, TrainConfig

SIDE, EACH, CLASSES = 64, 100, 10
BATCH = 64
NETWORK, PRETRAINED_SIDE = "timm:tf_efficientnet_lite0", 128
LITE = ((0.498,) * 3, (0.502,) * 3)  # mean and deviation that its weights were trained with


def write_photos(folder: Path, side: int = SIDE) -> None:
    """Write train/CLASS/*.png and test/CLASS/*.png."""
    from PIL import Image

    for split in ("train", "test"):
        images = load_dataset("imagenette", split, size=side)
        counts = [0] * CLASSES
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        for batch, labels in images.batches(list(order.split(256)), full=False):
            for image, label in zip(batch[0], labels.tolist(), strict=True):
                counts[label] += 1
                if split == "train" and counts[label] > EACH:
                    continue
                file = folder / split / str(label) / f"{counts[label]:05}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, compress_level=1)


class _Clock(Callback):
    """Records the CPU time of the last step."""

    trained: float | None = None

    def progress(self, items: Iterable[Any], total: int, label: str) -> Iterator[Any]:
        if label == "re-calibrating" and self.trained is None:
            self.trained = time.process_time()
        return iter(items)


def default_config(photos: Path, weights: str | None, settings: dict[str, Any]) -> TrainConfig:
    """Return the default settings for these photos, of a pretrained network if weights are given."""
    found = inspect_dataset(str(photos))
    data = DataConfig(name=str(photos))
    known: dict[str, Any] = {"images": found.images, "classes": CLASSES, "side": found.side, "device": "cpu"}
    if weights is None:
        config = recipe_for(data, **known)
    else:
        data = replace(data, mean=LITE[0], std=LITE[1])
        config = fine_tuning_recipe(data, **known, model=NETWORK, weights=weights, by_order=True)
    return override(config, {"run.device": "cpu", **settings})


def run_dsnet(config: TrainConfig, seed: int, folder: Path) -> dict[str, Any]:
    """Train a supernet."""
    clock, begun = _Clock(), time.process_time()
    outcome = train(override(config, {"run.seed": seed}), folder, callback=clock)
    ended = time.process_time()
    assert clock.trained is not None
    return {
        "network": config.model,
        "seed": seed,
        "epochs": config.optim.epochs,
        "cpu_seconds": round(clock.trained - begun, 1),
        "cpu_seconds_of_all": round(ended - begun, 1),
        "test": {str(r.route): round(100 * r.accuracy, 2) for r in outcome.test},
        "params": outcome.test[-1].params,
    }


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width_in, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def small_resnet() -> nn.Sequential:
    """Four residual blocks on maps of 32, 16, 8 and 4 positions a side."""
    stem = (nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    blocks = (_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 128, 2), _Block(128, 176, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(176, CLASSES))


def pretrained_network(weights: str, seed: int) -> nn.Module:
    """Create EfficientNet-Lite0 with these weights and a new classifier."""
    network = timm_network(NETWORK.removeprefix("timm:"), num_classes=CLASSES, seed=seed)
    load_weights(network, weights, by_order=True)
    return network.train()


def run_plain(
    photos: Path, seed: int, seconds: float, rate: float, augment: Augment, weights: str | None = None
) -> dict[str, Any]:
    """Train a plain network for a number of CPU seconds; the schedule ends with them."""
    torch.manual_seed(seed)
    side, batch_size = (SIDE, BATCH) if weights is None else (PRETRAINED_SIDE, 32)
    images, test = (load_dataset(str(photos), split, size=side) for split in ("train", "test"))
    pixels, labels = _all(images)
    channels = images.statistics() if weights is None else LITE
    generator = torch.Generator().manual_seed(seed)
    net: nn.Module = small_resnet() if weights is None else pretrained_network(weights, seed)
    net = net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    begun, epochs = time.process_time(), 0
    while (done := (time.process_time() - begun) / seconds) < 1:
        for rows in torch.randperm(len(labels), generator=generator).split(batch_size)[
            : len(labels) // batch_size
        ]:
            done = min(1.0, (time.process_time() - begun) / seconds)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(
                    done / 0.1, 0.5 * (1 + torch.cos(torch.tensor(torch.pi * done)).item())
                )
            seen = normalise(augment(pixels[rows], generator), *channels)
            seen = seen.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(net(seen), labels[rows], label_smoothing=0.1).backward()
            optimizer.step()
        epochs += 1
    spent = time.process_time() - begun
    net.eval()
    pixels, labels = _all(test)
    with torch.no_grad():
        logits = torch.cat([net(normalise(part, *channels)) for part in pixels.split(256)])
    return {
        "network": "resnet" if weights is None else "plain loop",
        "seed": seed,
        "rate": rate,
        "epochs": epochs,
        "cpu_seconds": round(spent, 1),
        "test": {"0": round(100 * float((logits.argmax(1) == labels).float().mean()), 2)},
        "params": sum(p.numel() for p in net.parameters()),
    }


def run_ultralytics(
    photos: Path, seed: int, seconds: float, model: str, folder: Path, side: int = SIDE
) -> dict[str, Any]:
    """Train a classifier of Ultralytics for about so many CPU seconds, as its defaults say."""
    import_timm()  # torchvision can be imported then
    from ultralytics import YOLO

    def train_for(epochs: int) -> tuple[Any, list[float]]:
        """Return the network, and the CPU seconds at the start and after each epoch."""
        network, times = YOLO(model, task="classify"), []
        network.add_callback("on_train_start", lambda _: torch.set_num_threads(1))
        network.add_callback("on_train_start", lambda _: times.append(time.process_time()))
        network.add_callback("on_train_epoch_end", lambda _: times.append(time.process_time()))
        settings = {"imgsz": side, "device": "cpu", "workers": 0, "seed": seed}
        quiet = {"val": False, "plots": False, "project": str(folder), "name": str(epochs)}
        network.train(data=str(photos), epochs=epochs, **settings, **quiet)
        return network, times

    _, times = train_for(2)
    epochs = max(1, round(seconds / (times[2] - times[1])))
    network, times = train_for(epochs)
    found = network.trainer.metrics["metrics/accuracy_top1"]  # of the last epoch
    return {
        "network": f"Ultralytics {Path(model).stem}",
        "seed": seed,
        "epochs": epochs,
        "cpu_seconds": round(times[-1] - times[0], 1),
        "test": {"0": round(100 * found, 2)},
        "params": sum(p.numel() for p in network.model.parameters()),
    }


def _all(images: ImageDataset) -> tuple[Tensor, Tensor]:
    batches = list(images.batches(list(torch.arange(len(images)).split(256)), full=False))
    return torch.cat([x[0] for x, _ in batches]), torch.cat([y for _, y in batches])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="*", type=float, default=[0.05, 0.1, 0.2])
    parser.add_argument("--pretrained", metavar="FILE", help="ImageNet weights of EfficientNet-Lite0")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for dsnet's runs")
    parser.add_argument("--ultralytics", metavar="FILE", help="weights or a network of Ultralytics")
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {"benchmark": "photos", **environment(torch.device("cpu"))}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        write_photos(photos, PRETRAINED_SIDE if args.pretrained else SIDE)
        config = default_config(photos, args.pretrained, parse_assignments(args.set))
        for seed in args.seeds:
            rows.append(run_dsnet(config, seed, Path(folder) / f"run-{seed}"))
            report({**about, "runs": rows}, args.json)
            seconds = rows[-1]["cpu_seconds"]
            for rate in args.rates:
                rows.append(run_plain(photos, seed, seconds, rate, config.augment, args.pretrained))
                report({**about, "runs": rows}, args.json)
            if args.ultralytics:
                side = PRETRAINED_SIDE if args.pretrained else SIDE
                run = Path(folder) / f"ultralytics-{seed}"
                rows.append(run_ultralytics(photos, seed, seconds, args.ultralytics, run, side))
                report({**about, "runs": rows}, args.json)


if __name__ == "__main__":
    main()
