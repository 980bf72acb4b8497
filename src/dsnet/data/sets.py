"""The sets by name: ``load("cifar10", "train")``.

Files are looked for under ``root``, else under the folder that the environment variable DSNET_DATA names, in
the layout that their publishers give them. ``digits`` comes with scikit-learn and needs no files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.data.files import Decoder, read_cifar_batch, read_class_folders, read_idx, read_parquet
from dsnet.data.images import ImageSet
from dsnet.errors import DsnetError

__all__ = ["SETS", "Split", "data_root", "load"]

Split = Literal["train", "test"]


def data_root(root: str | Path | None = None) -> Path:
    """The folder given, else that of DSNET_DATA."""
    given = root if root is not None else os.environ.get("DSNET_DATA")
    if given is None:
        raise DsnetError("where is the data? Give a folder, or set the environment variable DSNET_DATA to it")
    return Path(given)


def load(name: str, split: Split, *, root: str | Path | None = None, size: int | None = None) -> ImageSet:
    """A set by name, or a folder with ``train`` and ``test`` (or ``val``) inside, one folder a class.

    ``size`` is the side that files are decoded to (128 by default); sets of a fixed size ignore it.
    """
    if split not in ("train", "test"):
        raise DsnetError(f"unknown split {split!r}; possible: train, test")
    if name in SETS:
        return SETS[name](split, root, size)
    if Path(name).is_dir():
        return _class_folders(name, Path(name), split, size)
    raise DsnetError(f"there is no data set {name!r}: neither a folder nor one of {', '.join(SETS)}")


def _existing(tried: list[Path], what: str) -> Path:
    for path in tried:
        if path.exists():
            return path
    raise DsnetError(f"{what} is not there; looked for {' and '.join(map(str, tried))}")


def _digits(split: Split, root: str | Path | None, size: int | None) -> ImageSet:
    """1,797 grey digits of 8 × 8, enlarged to 16 × 16; a fifth of every class is the test split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DsnetError("digits come with scikit-learn: pip install 'dsnet[train]'") from None
    data = load_digits()
    grey = torch.from_numpy(data.images).float()[:, None] * (255 / 16)
    large = F.interpolate(grey, size=16, mode="bilinear", align_corners=False)
    images = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    names = tuple(str(digit) for digit in range(10))
    everything = ImageSet(
        name="digits", images=images, labels=torch.from_numpy(data.target).long(), classes=names
    )
    train, test = everything.hold_out(0.2, seed=0)
    return train if split == "train" else test


def _cifar10(split: Split, root: str | Path | None, size: int | None) -> ImageSet:
    folder = _existing([data_root(root) / "cifar-10-batches-py"], "CIFAR-10")
    files = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    parts = [read_cifar_batch(_existing([folder / f], "CIFAR-10"), b"labels") for f in files]
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    return _joined("cifar10", parts, names)


def _cifar100(split: Split, root: str | Path | None, size: int | None) -> ImageSet:
    path = _existing([data_root(root) / "cifar-100-python" / split], "CIFAR-100")
    return _joined("cifar100", [read_cifar_batch(path, b"fine_labels")], tuple(map(str, range(100))))


def _joined(name: str, parts: list[tuple[Tensor, Tensor]], classes: tuple[str, ...]) -> ImageSet:
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return ImageSet(name=name, images=images, labels=labels, classes=classes)


def _fashion_mnist(split: Split, root: str | Path | None, size: int | None) -> ImageSet:
    """28 × 28 grey, padded to 32."""
    base = data_root(root)
    stem = "train" if split == "train" else "t10k"

    def read(kind: str) -> Tensor:
        folders = [base / "fashion-mnist", base / "FashionMNIST" / "raw", base]
        files = (f"{stem}-{kind}.gz", f"{stem}-{kind}")
        return read_idx(_existing([folder / file for folder in folders for file in files], "Fashion-MNIST"))

    images = F.pad(read("images-idx3-ubyte"), (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1).contiguous()
    return ImageSet(
        name="fashion_mnist", images=images, labels=read("labels-idx1-ubyte").long(), classes=FASHION
    )


FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")

IMAGENETTE = (
    "tench",
    "English springer",
    "cassette player",
    "chain saw",
    "church",
    "French horn",
    "garbage truck",
    "gas pump",
    "golf ball",
    "parachute",
)


def _imagenette(split: Split, root: str | Path | None, size: int | None) -> ImageSet:
    """A Parquet file a split, or the published folders (imagenette2, imagenette2-160, imagenette2-320)."""
    base, part = data_root(root), "train" if split == "train" else "val"
    tables = [base / f"imagenette{s}-{part}.parquet" for s in ("128", "")]
    folders = [base / f"imagenette2{s}" / part for s in ("-160", "-320", "")]
    path = _existing([*tables, *folders], "Imagenette")
    if path.is_dir():
        images, labels, _ = read_class_folders(path, Decoder(size or 128))
    else:
        images, labels = read_parquet(path, Decoder(size or 128))
    return ImageSet(name="imagenette", images=images, labels=labels, classes=IMAGENETTE)


def _class_folders(name: str, folder: Path, split: Split, size: int | None) -> ImageSet:
    inside = ["train"] if split == "train" else ["test", "val"]
    path = _existing([folder / part for part in inside], f"the {split} split of {name}")
    images, labels, classes = read_class_folders(path, Decoder(size or 128))
    return ImageSet(name=name, images=images, labels=labels, classes=classes)


SETS: dict[str, Callable[[Split, str | Path | None, int | None], ImageSet]] = {
    "digits": _digits,
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "fashion_mnist": _fashion_mnist,
    "imagenette": _imagenette,
}
