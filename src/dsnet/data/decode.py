"""From files and bytes to images of one size: the centre, or random crops."""

from __future__ import annotations

import io
import math
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dsnet.data.source import Crops
from dsnet.errors import DsnetError, DsnetWarning

__all__ = [
    "Damage",
    "DamagedError",
    "Items",
    "crop_box",
    "decode",
    "decode_all",
    "open_image",
    "pillow",
    "processors",
]

THREADS = 8
ASPECT = (3 / 4, 4 / 3)


class Items(Protocol):
    """Compressed images by number; goes to worker processes, so it can be pickled and is small."""

    def __len__(self) -> int: ...

    def source(self, at: int) -> str | bytes:
        """A path, or the bytes of a file."""

    def name(self, at: int) -> str:
        """What to call it in a message."""


class DamagedError(Exception):
    """An image that cannot be read, and why."""


class Damage:
    """Counts images that cannot be read: every one is reported once, too many are an error."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.reasons: dict[str, str] = {}

    def note(self, name: str, reason: str) -> None:
        """Reports an image, unless it is known already."""
        if name in self.reasons:
            return
        self.reasons[name] = reason
        if len(self.reasons) > self.limit:
            first = ", ".join(list(self.reasons)[:5])
            raise DsnetError(f"more than {self.limit} images cannot be read, the first: {first}")
        warnings.warn(f"skipped {name}: {reason}", DsnetWarning, stacklevel=3)


def pillow() -> Any:  # noqa: ANN401  (a module)
    """Pillow's ``Image``."""
    try:
        from PIL import Image
    except ImportError:
        raise DsnetError("reading image files needs Pillow: pip install 'dsnet[train]'") from None
    return Image


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def decode(
    source: str | bytes, size: int, *, ratio: float = 1.0, crops: Crops | None = None, position: int = 0
) -> Tensor:
    """Views [V, 3, size, size] in bytes; raises `DamagedError` for what cannot be read.

    Without crops one view: the shorter side resized to ``size / ratio``, the centre kept. With crops as many
    as they say; ``position`` is the image's number, on which their draws depend.
    """
    image = open_image(source)
    if crops is None:
        views = [_centre(image, size, ratio)]
    else:
        # Not a torch generator: on the CPU those read only 32 bits of their seed.
        rng = np.random.default_rng((crops.seed, position))
        boxes = [crop_box(image.width, image.height, crops.area, rng) for _ in range(crops.views)]
        cubic = pillow().Resampling.BICUBIC
        views = [image.resize((size, size), cubic, box=box, reducing_gap=2.0) for box in boxes]
    return torch.from_numpy(np.stack([np.asarray(view) for view in views])).permute(0, 3, 1, 2)


def open_image(source: str | bytes) -> Any:  # noqa: ANN401  (an image of Pillow, which is optional)
    """An image in RGB, upright; raises `DamagedError` for what cannot be read."""
    images = pillow()
    if not source:
        raise DamagedError("it is empty")
    try:
        with images.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            if opened.mode.startswith("I"):  # 16 bits: Pillow would cut them off at 255
                opened = images.fromarray((np.asarray(opened).clip(0, 65535) // 257).astype(np.uint8))
            return _upright(opened).convert("RGB")
    except images.UnidentifiedImageError:  # its message only has the address of the bytes
        raise DamagedError("it is no image that Pillow can read") from None
    except (OSError, ValueError, SyntaxError, images.DecompressionBombError) as error:
        raise DamagedError(str(error)) from error  # these are what Pillow raises for damaged files


def _upright(image: Any) -> Any:  # noqa: ANN401
    """As the camera was held, where the file says so (EXIF)."""
    turned = image.getexif().get(0x0112, 1)  # the tag of orientation
    ways = pillow().Transpose
    turns = {
        2: ways.FLIP_LEFT_RIGHT,
        3: ways.ROTATE_180,
        4: ways.FLIP_TOP_BOTTOM,
        5: ways.TRANSPOSE,
        6: ways.ROTATE_270,
        7: ways.TRANSVERSE,
        8: ways.ROTATE_90,
    }
    return image.transpose(turns[turned]) if turned in turns else image


def _centre(image: Any, size: int, ratio: float) -> Any:  # noqa: ANN401
    shorter = max(size, round(size / ratio))
    width, height = image.size
    scale = shorter / min(width, height)
    if scale != 1:
        sides = (max(shorter, round(width * scale)), max(shorter, round(height * scale)))
        image = image.resize(sides, pillow().Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def crop_box(
    width: int, height: int, area: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a random crop: ten tries as torchvision makes them, else the centre."""
    low, high = ASPECT
    for _ in range(10):
        wanted = width * height * rng.uniform(*area)
        aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
        broad, tall = round(math.sqrt(wanted * aspect)), round(math.sqrt(wanted / aspect))
        if 0 < broad <= width and 0 < tall <= height:
            top, left = int(rng.integers(height - tall + 1)), int(rng.integers(width - broad + 1))
            return left, top, left + broad, top + tall
    tall, broad = min(height, round(width / low)), min(width, round(height * high))
    left, top = (width - broad) // 2, (height - tall) // 2
    return left, top, left + broad, top + tall


def decode_all(
    items: Items, size: int, *, ratio: float = 1.0, damage: Damage | None = None
) -> tuple[Tensor, Tensor]:
    """Images [N, 3, size, size] of all that can be read, in order, and their numbers [N]."""
    damage = damage or Damage()
    pillow()
    images = torch.empty(len(items), 3, size, size, dtype=torch.uint8)
    places = images.numpy()  # torch would divide every small copy among threads of its own

    def fill(at: int) -> str | None:
        try:
            places[at] = decode(items.source(at), size, ratio=ratio)[0].numpy()
        except DamagedError as error:
            return str(error)
        return None

    good = torch.ones(len(items), dtype=torch.bool)
    threads = ThreadPoolExecutor(min(THREADS, processors()))  # Pillow decodes without holding the GIL
    try:
        for at, reason in enumerate(threads.map(fill, range(len(items)))):
            if reason is not None:
                good[at] = False
                damage.note(items.name(at), reason)
    finally:
        threads.shutdown(cancel_futures=True)
    if not good.any():
        raise DsnetError("no image could be read")
    return images if good.all() else images[good], good.nonzero()[:, 0]
