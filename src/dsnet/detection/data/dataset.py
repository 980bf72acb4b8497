"""Images with their boxes in memory: all of one size, boxes as shares of the image, padded to one number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsnet.data.dataset import channel_statistics, chunks
from dsnet.data.decode import THREADS, DecodeError, catch_decode_errors, open_image, pillow
from dsnet.data.transforms.auto_augment import to_device
from dsnet.detection.data.voc import Annotated, DetectionSet, Problem, read_voc, wrong_size
from dsnet.detection.eval.metrics import Truth
from dsnet.errors import DsnetError, shorten

__all__ = ["Boxes", "Pictures", "load_pictures", "read_splits", "shrunk", "stretched"]

MOST = 100  # images that may be damaged

Progress = Callable[[Iterable[Any], int, str], Iterator[Any]]


class Boxes(NamedTuple):
    """What is in B images."""

    corners: Tensor  # [B, n, 4], as shares of the image
    classes: Tensor  # [B, n]; -1: there is no box

    def take(self, at: Tensor) -> Boxes:
        """Of some of the images."""
        return Boxes(self.corners[at], self.classes[at])

    def first(self, most: int) -> Boxes:
        """The first so many of every image."""
        return Boxes(self.corners[:, :most], self.classes[:, :most])

    def padded(self, most: int) -> Boxes:
        """With places for so many, at least as many as there are, the further ones empty."""
        room = (0, most - self.classes.shape[1])
        return Boxes(F.pad(self.corners, (0, 0, *room)), F.pad(self.classes, room, value=-1))

    def to(self, device: torch.device | str) -> Boxes:
        """The same on a device, without waiting for it."""
        device = torch.device(device)
        return Boxes(to_device(self.corners, device), to_device(self.classes, device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pictures:
    """Images [N, 3, S, S] of bytes, stretched to squares, and what is in them."""

    classes: tuple[str, ...]
    images: Tensor
    boxes: Boxes
    truths: tuple[Truth, ...]  # boxes as shares of the image, difficult ones marked
    paths: tuple[Path, ...]
    listed: int = 0  # images that were asked for, with those that cannot be used

    def __len__(self) -> int:
        return len(self.images)

    def most(self, positions: Tensor) -> int:
        """Boxes that any of some images has to learn from; at least 1."""
        counts = [int((~self.truths[at].ignored()).sum()) for at in positions.tolist()]
        return max(1, *counts)

    def to(self, device: torch.device | str) -> Self:
        """The same on a device."""
        return replace(self, images=self.images.to(device), boxes=self.boxes.to(device))

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of every channel, of values in [0, 1]."""
        return channel_statistics(chunks(self.images, 64))


def stretched(source: str | bytes, side: int) -> tuple[Tensor, tuple[int, int]]:
    """An image as a square [3, side, side] in bytes, and its true width and height."""
    image = open_image(source)
    with catch_decode_errors():
        return shrunk(image, side), (image.width, image.height)


def shrunk(image: Any, side: int) -> Tensor:  # noqa: ANN401  (an image of Pillow, which is optional)
    """An image in RGB as a square [3, side, side] in bytes."""
    small = image.resize((side, side), pillow().Resampling.BILINEAR, reducing_gap=2.0)
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1)


def read_splits(root: str | Path, splits: str, classes: Sequence[str] | None = None) -> DetectionSet:
    """Reads splits separated by commas, ``trainval`` or ``VOC2007/trainval``, as one set."""
    places = [part.strip() for part in splits.split(",") if part.strip()]
    if not places:
        raise DsnetError(f"no split is named in {shorten(splits)}")
    parts = []
    for place in places:
        *inside, split = place.split("/")
        parts.append((Path(root).joinpath(*inside), split))
    if classes is None and len(parts) == 1:
        return read_voc(*parts[0])
    if classes is None:  # of all of them together
        classes = sorted({name for where, split in parts for name in read_voc(where, split).classes})
    read = [read_voc(where, split, classes=classes) for where, split in parts]
    return DetectionSet(
        classes=tuple(classes),
        items=tuple(item for part in read for item in part.items),
        problems=tuple(problem for part in read for problem in part.problems),
        listed=sum(part.listed for part in read),
    )


def load_pictures(
    annotated: DetectionSet,
    side: int,
    progress: Progress | None = None,
) -> tuple[Pictures, tuple[Problem, ...]]:
    """Decodes all images; those that cannot be used are left out, and too many stop."""
    problems: list[Problem] = []
    try:
        images = torch.empty(len(annotated.items), 3, side, side, dtype=torch.uint8)
    except RuntimeError:
        count = len(annotated.items)
        raise DsnetError(f"{count} images of {side} × {side} pixels do not fit in memory") from None
    kept: list[int] = []
    pool = ThreadPoolExecutor(THREADS)
    try:
        found = _in_order(pool, annotated.items, side)
        if progress is not None:
            found = progress(found, len(annotated.items), "reading images")
        for number, image in enumerate(found):
            if isinstance(image, str):
                problems.append(Problem(annotated.items[number].image, f"{image}; the image is left out"))
                if len(problems) > MOST:
                    raise DsnetError(f"more than {MOST} images cannot be used, the last: {problems[-1].file}")
                continue
            images[len(kept)] = image
            kept.append(number)
    finally:
        pool.shutdown(cancel_futures=True)
    if not kept:
        raise DsnetError(f"none of {len(annotated.items)} images can be used: {problems[0].what}")
    items = [annotated.items[number] for number in kept]
    truths = tuple(_shares(item) for item in items)
    pictures = Pictures(
        classes=annotated.classes,
        images=images[: len(kept)],
        boxes=_padded(truths),
        truths=truths,
        paths=tuple(item.image for item in items),
        listed=annotated.listed,
    )
    return pictures, tuple(problems)


def _in_order(pool: ThreadPoolExecutor, items: Sequence[Annotated], side: int) -> Iterator[Tensor | str]:
    """Images one after the other; no more are decoded than are waited for soon."""
    waiting: deque[Future[Tensor | str]] = deque()
    for item in items:
        waiting.append(pool.submit(_decoded, item, side))
        if len(waiting) > 4 * THREADS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _decoded(item: Annotated, side: int) -> Tensor | str:
    try:
        image, shown = stretched(str(item.image), side)
    except DecodeError as error:
        return str(error)
    wrong = wrong_size(shown, item.width, item.height)
    return image if wrong is None else wrong


def _shares(item: Annotated) -> Truth:
    size = np.array([item.width, item.height, item.width, item.height], dtype=np.float64)
    return Truth(item.truth.boxes / size, item.truth.classes, item.truth.difficult)


def _padded(truths: Sequence[Truth]) -> Boxes:
    """Difficult boxes are no example to learn from, as usual for VOC."""
    own = [(truth.boxes[~truth.ignored()], truth.classes[~truth.ignored()]) for truth in truths]
    most = max(1, *(len(boxes) for boxes, _ in own))
    corners = torch.zeros(len(own), most, 4)
    classes = torch.full((len(own), most), -1)
    for row, (boxes, kinds) in enumerate(own):
        corners[row, : len(boxes)] = torch.from_numpy(boxes).float()
        classes[row, : len(boxes)] = torch.from_numpy(kinds)
    return Boxes(corners, classes)
