"""Detection datasets in memory: images stretched to one size, boxes as shares of the image, padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.core.timer import Progress, silent
from dsnet.data.dataset import channel_statistics, chunks
from dsnet.data.decode import DecodeError, catch_decode_errors, decode_ahead, open_image, pillow
from dsnet.data.transforms.auto_augment import to_device
from dsnet.detection.data.voc import AnnotatedImage, FileProblem, VocAnnotations, read_voc, size_mismatch
from dsnet.detection.eval.metrics import GroundTruth
from dsnet.errors import DsnetError, shorten

__all__ = [
    "Boxes",
    "DetectionDataset",
    "load_detection_dataset",
    "open_square",
    "read_splits",
    "stretch_to_square",
]

MAX_DAMAGED = 100  # images


class Boxes(NamedTuple):
    """The boxes in B images, padded to n for each."""

    corners: Tensor  # [B, n, 4], as shares of the image
    classes: Tensor  # [B, n]; -1 for padding

    def take(self, index: Tensor) -> Boxes:
        """Select some of the images."""
        return Boxes(self.corners[index], self.classes[index])

    def first(self, count: int) -> Boxes:
        """Select the first ``count`` boxes of each image."""
        return Boxes(self.corners[:, :count], self.classes[:, :count])

    def padded(self, count: int) -> Boxes:
        """Pad to ``count`` boxes an image, at least as many as there are."""
        padding = (0, count - self.classes.shape[1])
        return Boxes(F.pad(self.corners, (0, 0, *padding)), F.pad(self.classes, padding, value=-1))

    def to(self, device: torch.device | str) -> Boxes:
        """Copy to a device without waiting for it."""
        device = torch.device(device)
        return Boxes(to_device(self.corners, device), to_device(self.classes, device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DetectionDataset:
    """Images and their boxes in memory."""

    classes: tuple[str, ...]
    images: Tensor  # bytes [N, 3, S, S]
    boxes: Boxes  # without difficult ones
    truths: tuple[GroundTruth, ...]  # boxes as shares of the image, with difficult ones
    paths: tuple[Path, ...]
    listed: int = 0  # images in the split, including unusable ones

    def __len__(self) -> int:
        return len(self.images)

    def max_boxes(self, index: Tensor) -> int:
        """Return the largest number of boxes, without difficult ones, in some images; at least 1."""
        return max([1, *(int((~self.truths[i].ignored()).sum()) for i in index.tolist())])

    def to(self, device: torch.device | str) -> Self:
        """Copy images and boxes to a device."""
        return replace(self, images=self.images.to(device), boxes=self.boxes.to(device))

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Compute the mean and standard deviation of each channel, of values from 0 to 1."""
        return channel_statistics(chunks(self.images, 64))


def open_square(source: str | bytes, side: int) -> tuple[Tensor, tuple[int, int]]:
    """Decode an image to a square of bytes [3, side, side]; also return its own width and height."""
    image = open_image(source)
    with catch_decode_errors():
        return stretch_to_square(image, side), (image.width, image.height)


def stretch_to_square(image: Any, side: int) -> Tensor:  # noqa: ANN401  (a Pillow image, which is optional)
    """Resize an RGB image to a square of bytes [3, side, side]."""
    small = image.resize((side, side), pillow().Resampling.BILINEAR, reducing_gap=2.0)
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)


def read_splits(root: str | Path, splits: str, classes: Sequence[str] | None = None) -> VocAnnotations:
    """Read the annotations of one or several splits as one dataset.

    Args:
        root: A folder in VOC's layout, or one with several of them.
        splits: Names separated by commas: ``trainval``, or ``VOC2007/trainval`` for a folder inside ``root``.
        classes: Class names in order; by default those of the annotations, sorted.

    Raises:
        DsnetError: A split does not exist or has no usable image, or a class is not in the list.
    """
    names = [name.strip() for name in splits.split(",") if name.strip()]
    if not names:
        raise DsnetError(f"no split is named in {shorten(splits)}")
    folders = []
    for name in names:
        *inside, split = name.split("/")
        folders.append((Path(root).joinpath(*inside), split))
    if classes is None and len(folders) == 1:
        return read_voc(*folders[0])
    if classes is None:
        classes = sorted({name for folder, split in folders for name in read_voc(folder, split).classes})
    read = [read_voc(folder, split, classes=classes) for folder, split in folders]
    return VocAnnotations(
        classes=tuple(classes),
        items=tuple(item for part in read for item in part.items),
        problems=tuple(problem for part in read for problem in part.problems),
        listed=sum(part.listed for part in read),
    )


def load_detection_dataset(
    annotations: VocAnnotations,
    side: int,
    progress: Progress = silent,
) -> tuple[DetectionDataset, tuple[FileProblem, ...]]:
    """Decode all images to squares.

    Args:
        annotations: What `read_splits` returns.
        side: The side of the squares in memory.
        progress: Wraps the iterator over images; it is called with their number and a label.

    Returns:
        The dataset, and a problem for each image that could not be used.

    Raises:
        DsnetError: No image is usable, more than 100 are not, or they do not fit in memory.
    """
    items, problems = annotations.items, list[FileProblem]()
    try:
        images = torch.empty(len(items), 3, side, side, dtype=torch.uint8)
    except RuntimeError:
        raise DsnetError(f"{len(items)} images of {side} × {side} pixels do not fit in memory") from None
    kept: list[AnnotatedImage] = []
    decoded = decode_ahead(lambda item: _decode(item, side), items)
    for item, image in zip(items, progress(decoded, len(items), "reading images"), strict=True):
        if not isinstance(image, DecodeError):
            images[len(kept)] = image
            kept.append(item)
            continue
        problems.append(FileProblem(item.image, f"{image}; the image is left out"))
        if len(problems) > MAX_DAMAGED:
            raise DsnetError(f"more than {MAX_DAMAGED} images cannot be used, the last: {item.image}")
    if not kept:
        raise DsnetError(f"none of {len(items)} images can be used: {problems[0].what}")
    truths = tuple(_as_shares(item) for item in kept)
    dataset = DetectionDataset(
        classes=annotations.classes,
        images=images[: len(kept)],
        boxes=_pad_boxes(truths),
        truths=truths,
        paths=tuple(item.image for item in kept),
        listed=annotations.listed,
    )
    return dataset, tuple(problems)


def _decode(item: AnnotatedImage, side: int) -> Tensor:
    image, size = open_square(str(item.image), side)
    if (mismatch := size_mismatch(size, item.width, item.height)) is not None:
        raise DecodeError(mismatch)
    return image


def _as_shares(item: AnnotatedImage) -> GroundTruth:
    size = np.array([item.width, item.height, item.width, item.height], dtype=np.float64)
    return replace(item.truth, boxes=item.truth.boxes / size)


def _pad_boxes(truths: Sequence[GroundTruth]) -> Boxes:
    """Pad the boxes to learn from. As usual for VOC, difficult ones are not among them."""
    kept = [(truth.boxes[~truth.ignored()], truth.classes[~truth.ignored()]) for truth in truths]
    width = max([1, *(len(boxes) for boxes, _ in kept)])
    corners = torch.zeros(len(kept), width, 4)
    classes = torch.full((len(kept), width), -1)
    for row, (boxes, labels) in enumerate(kept):
        corners[row, : len(boxes)] = torch.from_numpy(boxes).float()
        classes[row, : len(boxes)] = torch.from_numpy(labels)
    return Boxes(corners, classes)
