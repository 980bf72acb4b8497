"""Sets of small images of a fixed size, always held in memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.data.in_memory import ImageSet
from dsnet.data.readers.cifar_idx import read_cifar_batch, read_idx
from dsnet.errors import DsnetError, install_hint, printable

__all__ = ["cifar10", "cifar100", "data_root", "digits", "existing", "fashion_mnist", "some_digits"]

FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")


def data_root(root: str | Path | None = None) -> Path:
    """The folder given, else that of DSNET_DATA."""
    given = root if root is not None else os.environ.get("DSNET_DATA")
    if given is None:
        raise DsnetError("where is the data? Give a folder, or set the environment variable DSNET_DATA to it")
    return Path(given)


def existing(tried: list[Path], what: str) -> Path:
    """The first of these paths that is there."""
    for path in tried:
        if os.path.exists(path):
            return path
    raise DsnetError(f"{what} is not there; looked for {printable(' and '.join(map(str, tried)), 1000)}")


def digits(split: str) -> ImageSet:
    """1,797 grey digits of 8 × 8, enlarged to 16 × 16; a fifth of every class is the test split."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DsnetError(f"digits come with scikit-learn: {install_hint('train')}") from None
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


def some_digits(split: str, first: int, last: int) -> ImageSet:
    """Those from ``first`` to ``last`` of the same split of `digits`, labelled from 0."""
    whole = digits(split)
    kept = whole.take(((whole.labels >= first) & (whole.labels <= last)).nonzero()[:, 0])
    return replace(
        kept,
        name=f"digits_{first}_to_{last}",
        labels=kept.labels - first,
        classes=whole.classes[first : last + 1],
    )


def cifar10(split: str, root: str | Path | None = None) -> ImageSet:
    """``cifar-10-batches-py`` as published."""
    folder = existing([data_root(root) / "cifar-10-batches-py"], "CIFAR-10")
    files = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    parts = [read_cifar_batch(existing([folder / f], "CIFAR-10"), b"labels") for f in files]
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    return _joined("cifar10", parts, names)


def cifar100(split: str, root: str | Path | None = None) -> ImageSet:
    """``cifar-100-python`` as published, with its fine labels."""
    path = existing([data_root(root) / "cifar-100-python" / split], "CIFAR-100")
    return _joined("cifar100", [read_cifar_batch(path, b"fine_labels")], tuple(map(str, range(100))))


def _joined(name: str, parts: list[tuple[Tensor, Tensor]], classes: tuple[str, ...]) -> ImageSet:
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return ImageSet(name=name, images=images, labels=labels, classes=classes)


def fashion_mnist(split: str, root: str | Path | None = None) -> ImageSet:
    """28 × 28 grey, padded to 32."""
    base = data_root(root)
    stem = "train" if split == "train" else "t10k"

    def read(kind: str, dimensions: int) -> Tensor:
        folders = [base / "fashion-mnist", base / "FashionMNIST" / "raw", base]
        files = (f"{stem}-{kind}.gz", f"{stem}-{kind}")
        path = existing([folder / file for folder in folders for file in files], "Fashion-MNIST")
        return read_idx(path, dimensions)

    grey, labels = read("images-idx3-ubyte", 3), read("labels-idx1-ubyte", 1)
    if grey.shape[1:] != (28, 28):
        sides = " × ".join(map(str, grey.shape[1:]))
        raise DsnetError(f"the {split} images of Fashion-MNIST in {base} must be 28 × 28 pixels, not {sides}")
    images = F.pad(grey, (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1).contiguous()
    return ImageSet(name="fashion_mnist", images=images, labels=labels.long(), classes=FASHION)
