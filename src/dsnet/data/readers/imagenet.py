"""Readers of ImageNet and Imagenette in their published layouts."""

from __future__ import annotations

from dataclasses import replace

from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.lazy import LazyDataset
from dsnet.data.readers.folder import read_class_folders
from dsnet.data.readers.parquet import read_parquet
from dsnet.data.registry import DatasetRequest, existing_path, register_dataset

__all__ = ["imagenet", "imagenette"]

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


@register_dataset("imagenette")
def imagenette(request: DatasetRequest) -> InMemoryDataset | LazyDataset:
    """Read one Parquet file a split, or the published folders (imagenette2, -160, -320)."""
    part = "train" if request.split == "train" else "val"
    tables = [request.folder / f"imagenette{s}-{part}.parquet" for s in ("128", "")]
    folders = [request.folder / f"imagenette2{s}" / part for s in ("-160", "-320", "")]
    path = existing_path([*tables, *folders], "Imagenette")
    images = read_class_folders(path) if path.is_dir() else read_parquet([path])
    return replace(images, classes=IMAGENETTE_CLASSES).to_dataset("imagenette", request)


@register_dataset("imagenet")
def imagenet(request: DatasetRequest) -> InMemoryDataset | LazyDataset:
    """Read ``{train,val}/WNID/*.JPEG`` in the data folder, or in ``imagenet`` or ``ILSVRC2012`` there."""
    part = "train" if request.split == "train" else "val"
    folders = (request.folder / "imagenet", request.folder / "ILSVRC2012", request.folder)
    path = existing_path([folder / part for folder in folders], "ImageNet")
    return read_class_folders(path).to_dataset("imagenet", request, default_size=224)
