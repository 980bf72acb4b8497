"""Decode image files to one size: a center crop, or random resized crops."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from dsnet.core.cpus import available_cpus
from dsnet.core.files import open_regular
from dsnet.data.dataset import Crops
from dsnet.errors import DsnetError, DsnetWarning, install_hint, printable, shorten

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "DecodeErrors",
    "DecodeError",
    "ImageList",
    "center_crop",
    "crop_box",
    "decode",
    "decode_ahead",
    "decode_all",
    "catch_decode_errors",
    "max_pixels",
    "open_header",
    "open_image",
    "pillow",
    "upright_rgb",
]

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
ASPECT = (3 / 4, 4 / 3)
MAX_PIXELS = 100_000_000  # of an image file; DSNET_MAX_PIXELS overrides it
ELONGATED = 16  # aspect ratio above which images are cropped before they are resized
_LIMIT_HINT = "the environment variable DSNET_MAX_PIXELS sets another limit"


class ImageList(Protocol):
    """Compressed images by index. It is sent to worker processes, so it must be small and picklable."""

    def __len__(self) -> int: ...

    def source(self, index: int) -> str | bytes:
        """Return the path of an image file, or its bytes."""

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""


class DecodeError(Exception):
    """An image that cannot be decoded, with the reason."""


class DecodeErrors:
    """Record images that cannot be decoded: warn once for each, and raise if there are too many."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self.reasons: dict[str, str] = {}

    def add(self, name: str, reason: str) -> None:
        """Record an image and warn of it, unless it is recorded already."""
        if name in self.reasons:
            return
        self.reasons[name] = reason
        if len(self.reasons) > self.limit:
            first = ", ".join(list(self.reasons)[:5])
            raise DsnetError(f"more than {self.limit} images cannot be read, the first: {first}")
        warnings.warn(f"skipped {printable(name)}: {reason}", DsnetWarning, stacklevel=3)


def pillow() -> Any:  # noqa: ANN401  (a module)
    """Import Pillow's ``Image`` module, or raise an error that says how to install it."""
    try:
        from PIL import Image
    except ImportError:
        raise DsnetError(f"reading image files needs Pillow: {install_hint('train')}") from None
    return Image


def max_pixels() -> int:
    """Return the limit on the pixels of an image file: DSNET_MAX_PIXELS, else 100 million.

    Larger images are decode errors. The size is read from the header, before any pixel is decoded.
    """
    text = os.environ.get("DSNET_MAX_PIXELS", "").strip()
    if not text:
        return MAX_PIXELS
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) > 0):
        raise DsnetError(f"DSNET_MAX_PIXELS must be a whole number of pixels above 0, not {shorten(text)}")
    return int(text)


def decode(
    source: str | bytes, size: int, *, ratio: float = 1.0, crops: Crops | None = None, index: int = 0
) -> Tensor:
    """Decode an image file to one or several views of ``size`` pixels a side.

    Args:
        source: Path or bytes of the file.
        size: Side of the views.
        ratio: Without ``crops``, the shorter side is resized to ``size / ratio`` and the center is kept.
        crops: Random resized crops to take instead.
        index: Index of the image in its dataset, which seeds its crops together with ``crops.seed``.

    Returns:
        Bytes [V, 3, size, size], where V is 1 without ``crops``.

    Raises:
        DecodeError: The file cannot be read or decoded.
    """
    image = open_image(source)
    with catch_decode_errors():
        if crops is None:
            return center_crop(image, size, ratio)[None]
        # Not a torch generator: on the CPU those read only 32 bits of their seed.
        rng = np.random.default_rng((crops.seed, index))
        boxes = [crop_box(image.width, image.height, crops.area, rng) for _ in range(crops.views)]
        cubic = pillow().Resampling.BICUBIC
        views = [image.resize((size, size), cubic, box=box, reducing_gap=2.0) for box in boxes]
        return torch.from_numpy(np.stack([np.asarray(view) for view in views])).permute(0, 3, 1, 2)


def open_image(source: str | bytes) -> Any:  # noqa: ANN401  (an image of Pillow, which is optional)
    """Decode an image to RGB and rotate it upright; raise `DecodeError` if that fails."""
    with open_header(source) as opened:
        opened.load()
        _check_pixels(opened.size)  # some formats know their size only now
        return upright_rgb(opened)


def upright_rgb(image: Any) -> Any:  # noqa: ANN401
    """Convert an image of Pillow to RGB, rotated as its EXIF orientation says."""
    if image.mode.startswith("I"):  # 16 bits, which Pillow would clip at 255
        image = pillow().fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    transpose = pillow().Transpose
    operations = {
        2: transpose.FLIP_LEFT_RIGHT,
        3: transpose.ROTATE_180,
        4: transpose.FLIP_TOP_BOTTOM,
        5: transpose.TRANSPOSE,
        6: transpose.ROTATE_270,
        7: transpose.TRANSVERSE,
        8: transpose.ROTATE_90,
    }
    orientation = image.getexif().get(0x0112, 1)
    if orientation in operations:
        image = image.transpose(operations[orientation])
    return image.convert("RGB")


@contextmanager
def open_header(source: str | bytes) -> Iterator[Any]:
    """Open an image without decoding its pixels; errors in the ``with`` block become `DecodeError` too."""
    images = pillow()
    limit = max_pixels()
    if images.MAX_IMAGE_PIXELS is not None and limit > images.MAX_IMAGE_PIXELS:
        images.MAX_IMAGE_PIXELS = limit  # else Pillow warns of images that are allowed, or refuses them
        warnings.simplefilter("ignore", images.DecompressionBombWarning)  # larger ones raise below
    with catch_decode_errors():
        if not source:
            raise DecodeError("it is empty")
        with (
            nullcontext(io.BytesIO(source)) if isinstance(source, bytes) else open_regular(source) as file,
            images.open(file) as opened,
        ):
            _check_pixels(opened.size)
            yield opened


@contextmanager
def catch_decode_errors() -> Iterator[None]:
    """Turn any exception of a decoder into a `DecodeError`.

    For damaged files Pillow and the libraries below it raise nearly anything: SyntaxError, struct.error,
    RuntimeError, or MemoryError if a header asks for too much. One such file must not end a run.
    """
    try:
        yield
    except (DecodeError, DsnetError):
        raise
    except Exception as error:
        raise DecodeError(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, pillow().UnidentifiedImageError):  # its message has only the address of the bytes
        return "it is no image that Pillow can read"
    if isinstance(error, pillow().DecompressionBombError):  # Pillow's own message names twice this limit
        return f"it has more than {max_pixels():,} pixels; {_LIMIT_HINT}"
    if isinstance(error, MemoryError):
        return "decoding it takes more memory than there is"
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = printable(message, 200).replace("\n", " ")
    plain = isinstance(error, OSError | ValueError | SyntaxError)
    return text if plain and text else f"{type(error).__name__}: {text}"


def _check_pixels(size: tuple[int, int]) -> None:
    width, height = size
    if width * height > max_pixels():
        raise DecodeError(
            f"it has {width} × {height} pixels, more than {max_pixels():,} in all; {_LIMIT_HINT}"
        )


def center_crop(image: Image, size: int, ratio: float = 1.0) -> Tensor:
    """Resize the shorter side of an RGB image to ``size / ratio`` and return the center [3, size, size]."""
    shorter = max(size, round(size / ratio))
    width, height = image.size
    scale = shorter / min(width, height)
    sides = (max(shorter, round(width * scale)), max(shorter, round(height * scale)))
    left, top = ((side - size) // 2 for side in sides)
    cubic = pillow().Resampling.BICUBIC
    if max(sides) <= ELONGATED * min(sides) and math.prod(sides) <= MAX_PIXELS:
        if scale != 1:
            image = image.resize(sides, cubic)
        image = image.crop((left, top, left + size, top + size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)
    # 1 × 65,500 pixels would become 224 × 14,672,000, and a small ratio enlarges any image as much: resize
    # only the crop. The filter still sees the pixels around the box.
    (x0, x1), (y0, y1) = (
        (start * full / side, (start + size) * full / side)
        for start, full, side in zip((left, top), image.size, sides, strict=True)
    )
    image = image.resize((size, size), cubic, box=(x0, y0, x1, y1))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def crop_box(
    width: int, height: int, area: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw the box (left, top, right, bottom) of a random resized crop as torchvision does.

    After ten draws that do not fit, the box is the center crop.
    """
    low, high = ASPECT
    for _ in range(10):
        target = width * height * rng.uniform(*area)
        aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
        crop_width, crop_height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top, left = int(rng.integers(height - crop_height + 1)), int(rng.integers(width - crop_width + 1))
            return left, top, left + crop_width, top + crop_height
    crop_height, crop_width = min(height, round(width / low)), min(width, round(height * high))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def decode_ahead(
    read: Callable[[T], R], items: Iterable[T], ahead: int = 4 * THREADS
) -> Iterator[R | DecodeError]:
    """Read items in threads, and yield the results in order.

    Args:
        read: Reads one item; Pillow decodes without holding the GIL.
        items: What to read.
        ahead: Number of items that are read before the first result is taken.

    Yields:
        What ``read`` returns, or the `DecodeError` that it raised.
    """

    def attempt(item: T) -> R | DecodeError:
        try:
            return read(item)
        except DecodeError as error:
            return error

    waiting: deque[Future[R | DecodeError]] = deque()
    threads = ThreadPoolExecutor(min(THREADS, available_cpus()))
    try:
        for item in items:
            waiting.append(threads.submit(attempt, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)


def decode_all(
    items: ImageList, size: int, *, ratio: float = 1.0, decode_errors: DecodeErrors | None = None
) -> tuple[Tensor, Tensor]:
    """Decode all images that can be decoded.

    Returns:
        Images [N, 3, size, size] in order, and their indices [N] among the items.

    Raises:
        DsnetError: None, or too few of them, can be decoded.
    """
    decode_errors = decode_errors or DecodeErrors()
    pillow()
    images = torch.empty(len(items), 3, size, size, dtype=torch.uint8)
    pixels = images.numpy()  # torch would run each small copy on several threads

    def fill(index: int) -> None:
        pixels[index] = decode(items.source(index), size, ratio=ratio)[0].numpy()

    good = torch.ones(len(items), dtype=torch.bool)
    for index, error in enumerate(decode_ahead(fill, range(len(items)))):
        if error is not None:
            good[index] = False
            decode_errors.add(items.name(index), str(error))
    if not good.any():
        raise DsnetError("no image could be read")
    return images if good.all() else images[good], good.nonzero()[:, 0]
