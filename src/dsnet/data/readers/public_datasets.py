"""Readers of public datasets in their published layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.lazy import LazyDataset
from dsnet.data.readers.cifar_idx import read_cifar_batch, read_idx
from dsnet.data.readers.folder import read_class_folders
from dsnet.data.readers.parquet import read_parquet
from dsnet.data.registry import DatasetRequest, existing_path, register_dataset
from dsnet.errors import DsnetError, install_hint

__all__ = [
    "cifar10",
    "cifar100",
    "digits",
    "digits_0_to_6",
    "digits_7_to_9",
    "fashion_mnist",
    "fashion_mnist_sample",
    "imagenet",
    "imagenette",
    "voc_crops",
]

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train"),
    "tvmonitor",
)
IMAGENETTE_CLASSES = (
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


@register_dataset("digits")
def digits(request: DatasetRequest) -> InMemoryDataset:
    """Read the 1,797 gray digits of scikit-learn, enlarged from 8 × 8 to 16 × 16.

    A fifth of each class is the test split.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DsnetError(f"digits come with scikit-learn: {install_hint('train')}") from None
    data = load_digits()
    gray = torch.from_numpy(data.images).float()[:, None] * (255 / 16)
    large = F.interpolate(gray, size=16, mode="bilinear", align_corners=False)
    images = large.round().clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    dataset = InMemoryDataset(
        name="digits",
        images=images,
        labels=torch.from_numpy(data.target).long(),
        classes=tuple(map(str, range(10))),
        resize=request.size,
    )
    train, test = dataset.hold_out(0.2, seed=0)
    return train if request.split == "train" else test


@register_dataset("digits_0_to_6")
def digits_0_to_6(request: DatasetRequest) -> InMemoryDataset:
    """Read the digits from 0 to 6."""
    return _digits_between(request, 0, 6)


@register_dataset("digits_7_to_9")
def digits_7_to_9(request: DatasetRequest) -> InMemoryDataset:
    """Read the digits from 7 to 9, labeled from 0."""
    return _digits_between(request, 7, 9)


def _digits_between(request: DatasetRequest, first: int, last: int) -> InMemoryDataset:
    everything = digits(request)
    subset = everything.subset(((everything.labels >= first) & (everything.labels <= last)).nonzero()[:, 0])
    return replace(
        subset,
        name=f"digits_{first}_to_{last}",
        labels=subset.labels - first,
        classes=everything.classes[first : last + 1],
    )


@register_dataset("cifar10")
def cifar10(request: DatasetRequest) -> InMemoryDataset:
    """Read ``cifar-10-batches-py`` as published."""
    folder = existing_path([request.folder / "cifar-10-batches-py"], "CIFAR-10")
    train = request.split == "train"
    files = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    parts = [read_cifar_batch(existing_path([folder / f], "CIFAR-10"), b"labels") for f in files]
    return _dataset("cifar10", parts, CIFAR10, request)


@register_dataset("cifar100")
def cifar100(request: DatasetRequest) -> InMemoryDataset:
    """Read ``cifar-100-python`` as published, with its fine labels."""
    path = existing_path([request.folder / "cifar-100-python" / request.split], "CIFAR-100")
    parts = [read_cifar_batch(path, b"fine_labels")]
    return _dataset("cifar100", parts, tuple(map(str, range(100))), request)


@register_dataset("fashion_mnist")
def fashion_mnist(request: DatasetRequest) -> InMemoryDataset:
    """Read Fashion-MNIST, 28 × 28 gray pixels padded to 32 × 32."""
    base, stem = request.folder, "train" if request.split == "train" else "t10k"

    def read(kind: str, dimensions: int) -> Tensor:
        folders = [base / "fashion-mnist", base / "FashionMNIST" / "raw", base]
        files = (f"{stem}-{kind}.gz", f"{stem}-{kind}")
        path = existing_path([folder / file for folder in folders for file in files], "Fashion-MNIST")
        return read_idx(path, dimensions)

    gray, labels = read("images-idx3-ubyte", 3), read("labels-idx1-ubyte", 1)
    return _fashion("fashion_mnist", gray, labels, request, base)


SAMPLES = Path(__file__).parents[1] / "samples"


@register_dataset("fashion_mnist_sample")
def fashion_mnist_sample(request: DatasetRequest) -> InMemoryDataset:
    """Read the 4,000 test images of Fashion-MNIST that come with the package, padded to 32 × 32.

    The first half is the training split, meant to calibrate routers on; the second half is the test split.
    """
    folder = SAMPLES / "fashion_mnist"

    def read(kind: str, dimensions: int) -> Tensor:
        path = existing_path([folder / f"{kind}.gz"], "a file of this package (install it again)")
        return read_idx(path, dimensions)

    gray, labels = read("images-idx3-ubyte", 3), read("labels-idx1-ubyte", 1)
    half = len(gray) // 2
    part = slice(0, half) if request.split == "train" else slice(half, None)
    return _fashion("fashion_mnist_sample", gray[part], labels[part], request, folder)


def _fashion(
    name: str, gray: Tensor, labels: Tensor, request: DatasetRequest, folder: Path
) -> InMemoryDataset:
    """Build a dataset from gray images [N, 28, 28] of Fashion-MNIST."""
    if gray.shape[1:] != (28, 28):
        sides = " × ".join(map(str, gray.shape[1:]))
        raise DsnetError(
            f"the {request.split} images of Fashion-MNIST in {folder} must be 28 × 28 pixels, not {sides}"
        )
    images = F.pad(gray, (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1).contiguous()
    return _dataset(name, [(images, labels.long())], FASHION, request)


def _dataset(
    name: str, parts: list[tuple[Tensor, Tensor]], classes: tuple[str, ...], request: DatasetRequest
) -> InMemoryDataset:
    images, labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return InMemoryDataset(name=name, images=images, labels=labels, classes=classes, resize=request.size)


@register_dataset("imagenette")
def imagenette(request: DatasetRequest) -> InMemoryDataset | LazyDataset:
    """Read one Parquet file a split, or the published folders (imagenette2, -160, -320)."""
    part = "train" if request.split == "train" else "val"
    tables = [request.folder / f"imagenette{s}-{part}.parquet" for s in ("128", "")]
    folders = [request.folder / f"imagenette2{s}" / part for s in ("-160", "-320", "")]
    path = existing_path([*tables, *folders], "Imagenette")
    images = read_class_folders(path) if path.is_dir() else read_parquet([path])
    return replace(images, classes=IMAGENETTE_CLASSES).to_dataset("imagenette", request)


@register_dataset("voc_crops")
def voc_crops(request: DatasetRequest) -> InMemoryDataset | LazyDataset:
    """Read objects cut from Pascal VOC 2012: ``voc_crops/{train,test}*.parquet``, or in ``crops``."""
    folders = [request.folder / name for name in ("voc_crops", "crops")]
    tables = sorted(existing_path(folders, "the crops of VOC 2012").glob(f"{request.split}*.parquet"))
    if not tables:
        raise DsnetError(f"the crops of VOC 2012 in {request.folder} have no {request.split}*.parquet")
    return replace(read_parquet(tables), classes=VOC_CLASSES).to_dataset("voc_crops", request)


@register_dataset("imagenet")
def imagenet(request: DatasetRequest) -> InMemoryDataset | LazyDataset:
    """Read ``{train,val}/WNID/*.JPEG`` in the data folder, or in ``imagenet`` or ``ILSVRC2012`` there."""
    part = "train" if request.split == "train" else "val"
    folders = (request.folder / "imagenet", request.folder / "ILSVRC2012", request.folder)
    path = existing_path([folder / part for folder in folders], "ImageNet")
    return read_class_folders(path).to_dataset("imagenet", request, default_size=224)
