"""From files and bytes to images of one size: the centre, or random crops."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dsnet.core.cpus import available_cpus
from dsnet.core.open_file import open_regular
from dsnet.data.dataset import Crops
from dsnet.errors import DsnetError, DsnetWarning, install_hint, printable, shorten

__all__ = [
    "Damage",
    "DamagedError",
    "Items",
    "crop_box",
    "decode",
    "decode_all",
    "guarded",
    "max_pixels",
    "open_header",
    "open_image",
    "pillow",
    "processors",
]

THREADS = 8
ASPECT = (3 / 4, 4 / 3)
MAX_PIXELS = 100_000_000  # of an image file, unless DSNET_MAX_PIXELS says otherwise
ELONGATED = 16  # times as long as broad: from here on images are cropped before they are resized
_OTHER_LIMIT = "the environment variable DSNET_MAX_PIXELS sets another limit"


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
        warnings.warn(f"skipped {printable(name)}: {reason}", DsnetWarning, stacklevel=3)


def pillow() -> Any:  # noqa: ANN401  (a module)
    """Pillow's ``Image``."""
    try:
        from PIL import Image
    except ImportError:
        raise DsnetError(f"reading image files needs Pillow: {install_hint('train')}") from None
    return Image


def max_pixels() -> int:
    """Return how many pixels an image file may have: DSNET_MAX_PIXELS, else 100 million.

    Larger ones count as damaged. The header says the size, so they are refused before they are decoded.
    """
    text = os.environ.get("DSNET_MAX_PIXELS", "").strip()
    if not text:
        return MAX_PIXELS
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise DsnetError(f"DSNET_MAX_PIXELS must be a whole number of pixels above 0, not {shorten(text)}")
    return int(text)


def processors() -> int:
    """How many processors this process may use."""
    return available_cpus()


def decode(
    source: str | bytes, size: int, *, ratio: float = 1.0, crops: Crops | None = None, position: int = 0
) -> Tensor:
    """Views [V, 3, size, size] in bytes; raises `DamagedError` for what cannot be read.

    Without crops one view: the shorter side resized to ``size / ratio``, the centre kept. With crops as many
    as they say; ``position`` is the image's number, on which their draws depend.
    """
    image = open_image(source)
    with guarded():
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
    with open_header(source) as opened:
        opened.load()
        _check_pixels(opened.size)  # some formats know their size only now
        if opened.mode.startswith("I"):  # 16 bits: Pillow would cut them off at 255
            opened = pillow().fromarray((np.asarray(opened).clip(0, 65535) // 257).astype(np.uint8))
        return _upright(opened).convert("RGB")


@contextmanager
def open_header(source: str | bytes) -> Iterator[Any]:
    """An image of Pillow whose pixels are not decoded yet; raises `DamagedError`, also for the body."""
    images = pillow()
    limit = max_pixels()
    if images.MAX_IMAGE_PIXELS is not None and limit > images.MAX_IMAGE_PIXELS:
        images.MAX_IMAGE_PIXELS = limit  # else Pillow warns of images that are allowed, or refuses them
    with guarded():
        if not source:
            raise DamagedError("it is empty")
        with (
            nullcontext(io.BytesIO(source)) if isinstance(source, bytes) else open_regular(source) as file,
            images.open(file) as opened,
        ):
            _check_pixels(opened.size)
            yield opened


@contextmanager
def guarded() -> Iterator[None]:
    """Turn whatever a decoder raises into a `DamagedError`.

    Damaged files make Pillow and the libraries below it raise nearly anything: SyntaxError, struct.error,
    RuntimeError, MemoryError where a header asks for too much. One such file must not end a run.
    """
    try:
        yield
    except (DamagedError, DsnetError):
        raise
    except Exception as error:
        raise DamagedError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Why an image cannot be read, in a line."""
    if isinstance(error, pillow().UnidentifiedImageError):  # its message only has the address of the bytes
        return "it is no image that Pillow can read"
    if isinstance(error, pillow().DecompressionBombError):  # Pillow's message has another limit, twice this
        return f"it has more than {max_pixels():,} pixels; {_OTHER_LIMIT}"
    if isinstance(error, MemoryError):
        return "decoding it takes more memory than there is"
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = printable(told, 200).replace("\n", " ")
    plain = isinstance(error, OSError | ValueError | SyntaxError)
    return text if plain and text else f"{type(error).__name__}: {text}"


def _check_pixels(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > max_pixels():
        raise DamagedError(
            f"it has {width} × {height} pixels, more than {max_pixels():,} in all; {_OTHER_LIMIT}"
        )


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
    sides = (max(shorter, round(width * scale)), max(shorter, round(height * scale)))
    cuts = [(side - size) // 2 for side in sides]  # left and top
    cubic = pillow().Resampling.BICUBIC
    if max(sides) <= ELONGATED * min(sides) and math.prod(sides) <= MAX_PIXELS:
        if scale != 1:
            image = image.resize(sides, cubic)
        return _cut(image, cuts[0], cuts[1], size)
    # 1 × 65,500 pixels would become 224 × 14,672,000, and any image as many by a small ratio: only what is
    # kept is made. The filter still sees the pixels around the box.
    (left, right), (top, bottom) = (
        (cut * own / side, (cut + size) * own / side)
        for cut, own, side in zip(cuts, image.size, sides, strict=True)
    )
    return image.resize((size, size), cubic, box=(left, top, right, bottom))


def _cut(image: Any, left: int, top: int, size: int) -> Any:  # noqa: ANN401
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
