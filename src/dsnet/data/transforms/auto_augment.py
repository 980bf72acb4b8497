"""AutoAugment and RandAugment on the images' device, drawn for each image.

The operations are those of Pillow, on bytes [B, 3, H, W] and with one argument per image. Random numbers are
drawn on the host, so that it never waits for the device. A round sorts the images by operation and runs each
operation on its images; all blends share one launch, and so do all affine operations. For small images the
number of launches determines the time. NumPy handles the small arrays of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = [
    "invert",
    "posterize",
    "solarize",
    "solarize_add",
    "autocontrast",
    "equalize",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "affine_grid",
    "warp",
    "OPERATIONS",
    "apply_operations",
    "CIFAR10",
    "IMAGENET",
    "auto_augment",
    "rand_augment",
    "to_device",
]

Interpolation = Literal["nearest", "bilinear"]
PolicyStep = tuple[str, float, int]  # an operation, its probability, its level from 0 to 10
PolicyTable = tuple[tuple[PolicyStep, PolicyStep], ...]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting for it."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def invert(images: Tensor) -> Tensor:
    """Subtract each byte from 255."""
    return ~images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper ``bits`` [B], 0 to 8, of each byte."""
    dropped = _each(8 - bits).to(torch.uint8)
    return images >> dropped << dropped


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert the bytes of at least ``thresholds`` [B]."""
    return torch.where(images < _each(thresholds), images, ~images)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """Add ``amounts`` [B], at least 0, to the bytes below 128, up to 255."""
    raised = (images + _each(amounts).float()).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, raised, images)


def _look_up(tables: Tensor, values: Tensor) -> Tensor:
    return tables.to(torch.uint8).gather(2, values)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel of each image to [0, 255]; constant channels are unchanged."""
    values = images.flatten(2)
    low, high = values.aminmax(dim=2, keepdim=True)
    span = high - low
    # In float64 and in Pillow's order of operations, since the result is truncated. The 255 is taken from
    # the tensor of levels, because dividing a Python number by a tensor rounds twice.
    levels = torch.arange(256, device=images.device, dtype=torch.float64)
    scale = levels[255:] / span
    tables = torch.where(span > 0, levels * scale - low * scale, levels).clamp_(0, 255)
    return _look_up(tables, values.long()).view_as(images)


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel of each image."""
    values = images.flatten(2).long()
    histogram = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device)
    histogram.scatter_(2, values, 1, reduce="add")
    upto = histogram.cumsum(2)
    pixels = values.shape[2]
    step = (upto % pixels).amax(2, keepdim=True) // 255  # of the pixels that are not of the brightest level
    spread = (upto.sub_(histogram) + step // 2) // step.clamp(min=1)
    tables = torch.where(step > 0, spread.clamp_(max=255), torch.arange(256, device=images.device))
    return _look_up(tables, values).view_as(images)


def _grey(colors: Tensor) -> Tensor:
    """Compute Pillow's luma [B, 1, H, W], rounded; exact, since bytes times 16-bit weights fit in 24 bits."""
    red, green, blue = colors.chunk(3, 1)
    weighted = (red * (19595 / 65536)).add_(green, alpha=38470 / 65536).add_(blue, alpha=7471 / 65536)
    return weighted.add_(0.5).floor_()


def _mean(grey: Tensor) -> Tensor:
    """Compute the mean [B, 1, 1, 1], rounded."""
    pixels = grey.shape[2] * grey.shape[3]
    total = grey.sum((2, 3), keepdim=True, dtype=torch.int64)
    return ((total + pixels // 2) // pixels).float()


def _black(colors: Tensor) -> Tensor:
    return torch.zeros(1, device=colors.device).expand(len(colors), 1, 1, 1)


def _smooth(colors: Tensor) -> Tensor:
    """Average over 3 × 3 pixels with a weight of 5 for the middle one; the border is unchanged."""
    rows = colors[..., :-2, :] + colors[..., 1:-1, :] + colors[..., 2:, :]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth, middle = colors.clone(), colors[..., 1:-1, 1:-1]
    smooth[..., 1:-1, 1:-1] = box.add_(middle, alpha=4).div_(13).round_()
    return smooth


def _blend(colors: Tensor, bases: Tensor, factors: Tensor) -> Tensor:
    """Interpolate or extrapolate from ``bases`` (factor 0) to ``colors`` (factor 1), in Pillow's order."""
    return (colors - bases).mul_(_each(factors).float()).add_(bases).clamp_(0, 255).to(torch.uint8)


def color(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply the saturation by ``factors`` [B]; 0 gives gray."""
    colors = images.float()
    return _blend(colors, _grey(colors), factors)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply the distance from the mean brightness of each image by ``factors`` [B]."""
    colors = images.float()
    return _blend(colors, _mean(_grey(colors)), factors)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply the bytes by ``factors`` [B]."""
    colors = images.float()
    return _blend(colors, _black(colors), factors)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply the distance from the smoothed image by ``factors`` [B]."""
    colors = images.float()
    return _blend(colors, _smooth(colors), factors)


def _enhance(images: Tensor, counts: list[int], factors: Tensor) -> Tensor:
    """Apply `color`, `contrast`, `brightness` and `sharpness` to ``counts`` images each, with one blend."""
    colors = images.float()
    parts = colors.split_with_sizes(counts)
    grey, contrasted = _grey(colors[: counts[0] + counts[1]]).split_with_sizes(counts[:2])
    bases = (grey, _mean(contrasted), _black(parts[2]), _smooth(parts[3]))
    same = [base.expand_as(part) for base, part in zip(bases, parts, strict=True)]
    return _blend(colors, torch.cat(same), factors)


def affine_grid(thetas: Tensor, height: int, width: int) -> Tensor:
    """Compute sampling positions [B, H, W, 2] of matrices [B, 2, 3] as `F.affine_grid` (unaligned corners).

    It uses no matrix product, which may run in reduced precision and would then move pixels.
    """
    x = torch.linspace(1 / width - 1, 1 - 1 / width, width, device=thetas.device)[:, None]
    y = torch.linspace(1 / height - 1, 1 - 1 / height, height, device=thetas.device)[:, None, None]
    across, down, shift = thetas[:, None, None].unbind(-1)
    return across * x + (down * y + shift)


def warp(images: Tensor, thetas: Tensor, mode: Interpolation = "nearest") -> Tensor:
    """Sample at affine positions, with gray (128) outside of the image.

    Matrices [B, 2, 3] map positions in the result to positions in the image; both span [-1, 1].
    """
    grid = affine_grid(thetas, *images.shape[2:])
    outside = torch.linalg.vector_norm(grid, torch.inf, 3)[:, None] >= 1
    sampled = F.grid_sample(images.float(), grid, mode=mode, padding_mode="border", align_corners=False)
    if mode == "bilinear":
        sampled.round_()
    return sampled.masked_fill_(outside, 128).to(torch.uint8)


_POINTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": lambda images, _: images,
    "autocontrast": lambda images, _: autocontrast(images),
    "equalize": lambda images, _: equalize(images),
    "invert": lambda images, _: invert(images),
    "posterize": posterize,
    "solarize": solarize,
    "solarize_add": solarize_add,
}
_BLENDS = ("color", "contrast", "brightness", "sharpness")
_MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
OPERATIONS = (*_POINTWISE, *_BLENDS, *_MOVES)


def apply_operations(
    images: Tensor, operations: Tensor, arguments: Tensor, mode: Interpolation = "nearest"
) -> Tensor:
    """Apply R rounds of operations, one operation an image and round.

    Args:
        images: Bytes [B, 3, H, W].
        operations: Indices [R, B] into `OPERATIONS`, on the host.
        arguments: Their arguments [R, B], on the host: bits, thresholds, amounts, factors, shears,
            translations as a share of the side, or degrees counterclockwise.
        mode: Interpolation of affine operations.
    """
    if images.dtype is not torch.uint8 or images.dim() != 4 or images.shape[1] != 3:
        raise DsnetError(f"images must be bytes [B, 3, H, W], not {images.dtype} {list(images.shape)}")
    kinds, values = operations.numpy(), arguments.double().numpy()
    order = kinds.argsort(axis=1, kind="stable")
    inverse = order.argsort(axis=1)
    # Images stay in the order of the last round until the next round sorts them again.
    sources = np.concatenate((order[:1], np.take_along_axis(inverse[:-1], order[1:], 1), inverse[-1:]))
    packed = np.concatenate((values[..., None], _thetas(kinds, values, *images.shape[2:])), 2)
    packed = np.take_along_axis(packed, order[..., None], 1).astype(np.float32)
    *rounds, last = to_device(torch.from_numpy(sources), images.device).unbind()
    parameters = to_device(torch.from_numpy(packed), images.device).unbind()
    for source, parameter, kind in zip(rounds, parameters, kinds, strict=True):
        counts = np.bincount(kind, minlength=len(OPERATIONS)).tolist()
        images = _round(images.index_select(0, source), counts, parameter[:, 0], parameter[:, 1:], mode)
    return images.index_select(0, last)


def _thetas(
    kinds: NDArray[np.int64], values: NDArray[np.float64], height: int, width: int
) -> NDArray[np.float64]:
    """Build the matrices [R, B, 6] for `warp`; operations that are not affine have the identity."""
    shear_x, shear_y, move_x, move_y, degrees = (values * (kinds == OPERATIONS.index(m)) for m in _MOVES)
    cos, sin = np.cos(np.radians(degrees)), -np.sin(np.radians(degrees))
    tall, broad = height / width, width / height
    above = (cos, (sin + shear_x) * tall, shear_x * tall + 2 * move_x)
    below = ((shear_y - sin) * broad, cos, shear_y * broad + 2 * move_y)
    return np.stack((*above, *below), 2)


def _round(images: Tensor, counts: list[int], values: Tensor, thetas: Tensor, mode: Interpolation) -> Tensor:
    """Apply operations to images that are sorted by operation, ``counts`` of each."""
    pointwise = zip(
        _POINTWISE.values(), images.split_with_sizes(counts), values.split_with_sizes(counts), strict=False
    )
    done = [operation(part, value) for operation, part, value in pointwise if len(part)]
    first, last = len(_POINTWISE), len(_POINTWISE) + len(_BLENDS)
    start, stop = sum(counts[:first]), sum(counts[:last])
    if start < stop:
        done.append(_enhance(images[start:stop], counts[first:last], values[start:stop]))
    if stop < len(images):
        done.append(warp(images[stop:], thetas[stop:].view(-1, 2, 3), mode))
    return torch.cat(done)


class _Range(NamedTuple):
    start: float = 0.0  # the argument at level 0
    change: float = 0.0  # difference at level 10
    signed: bool = False  # the sign of the change is drawn
    whole: bool = False  # the change is truncated to an integer


# Severity grows with the level, as in timm's rand-…-inc1.
_RANGES = {
    "posterize": _Range(4, -4, whole=True),
    "solarize": _Range(256, -256, whole=True),
    "solarize_add": _Range(0, 110, whole=True),
    **dict.fromkeys(_BLENDS, _Range(1, 0.9, signed=True)),
    **dict.fromkeys(("shear_x", "shear_y"), _Range(0, 0.3, signed=True)),
    **dict.fromkeys(("translate_x", "translate_y"), _Range(0, 0.45, signed=True)),
    "rotate": _Range(0, 30, signed=True),
}
# As in the code that the authors of AutoAugment published: 10 pixels of 32, and factors from 0.1 to 1.9.
_AUTO_RANGES = {
    **_RANGES,
    **dict.fromkeys(_BLENDS, _Range(0.1, 1.8)),
    **dict.fromkeys(("translate_x", "translate_y"), _Range(0, 10 / 32, signed=True)),
}


def _arguments(
    kinds: NDArray[np.int64],
    levels: NDArray[np.float64],
    ranges: dict[str, _Range],
    host: torch.Generator | None,
) -> Tensor:
    rows = np.array([ranges.get(name, _Range()) for name in OPERATIONS])
    start, change, signed, whole = np.moveaxis(rows[kinds], 2, 0)
    change = levels / 10 * change
    change = np.where(whole > 0, np.trunc(change), change)
    sign = 1 - 2 * torch.randint(2, kinds.shape, generator=host).numpy()
    return torch.from_numpy(start + np.where(signed > 0, sign, 1) * change)


def auto_augment(
    images: Tensor, table: PolicyTable, host: torch.Generator | None = None, mode: Interpolation = "nearest"
) -> Tensor:
    """Apply a random line of ``table`` (`CIFAR10`, `IMAGENET`), two operations, to each image."""
    unknown = {step[0] for line in table for step in line} - set(OPERATIONS)
    if unknown:
        raise DsnetError(f"no operations {sorted(unknown)}; there are: {', '.join(OPERATIONS)}")
    steps = [[(OPERATIONS.index(name), chance, level) for name, chance, level in line] for line in table]
    drawn = torch.randint(len(table), (len(images),), generator=host).numpy()
    kinds, chances, levels = np.array(steps)[drawn].T
    used = torch.rand(kinds.shape, generator=host, dtype=torch.float64).numpy() < chances
    kinds = np.where(used, kinds, 0).astype(np.int64)
    arguments = _arguments(kinds, levels, _AUTO_RANGES, host)
    return apply_operations(images, torch.from_numpy(kinds), arguments, mode)


def rand_augment(
    images: Tensor,
    operations: int = 2,
    magnitude: float = 9.0,
    std: float = 0.0,
    host: torch.Generator | None = None,
    *,
    probability: float = 0.5,
    mode: Interpolation = "bilinear",
) -> Tensor:
    """Apply random operations to each image, each with ``probability``, at levels around ``magnitude`` of 10.

    With a magnitude of 9 and a deviation of 0.5 this is timm's rand-m9-mstd0.5-inc1.
    """
    shape = (operations, len(images))
    drawn = torch.randint(1, len(OPERATIONS), shape, generator=host)
    kinds = drawn * (torch.rand(shape, generator=host) < probability)
    noise = torch.randn(shape, generator=host, dtype=torch.float64)
    levels = (magnitude + std * noise).clamp(0, 10)
    arguments = _arguments(kinds.numpy(), levels.numpy(), _RANGES, host)
    return apply_operations(images, kinds, arguments, mode)


CIFAR10: PolicyTable = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("color", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("color", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("color", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("color", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("color", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
)
IMAGENET: PolicyTable = (
    (("posterize", 0.4, 8), ("rotate", 0.6, 9)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
    (("posterize", 0.6, 7), ("posterize", 0.6, 6)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("equalize", 0.4, 4), ("rotate", 0.8, 8)),
    (("solarize", 0.6, 3), ("equalize", 0.6, 7)),
    (("posterize", 0.8, 5), ("equalize", 1.0, 2)),
    (("rotate", 0.2, 3), ("solarize", 0.6, 8)),
    (("equalize", 0.6, 8), ("posterize", 0.4, 6)),
    (("rotate", 0.8, 8), ("color", 0.4, 0)),
    (("rotate", 0.4, 9), ("equalize", 0.6, 2)),
    (("equalize", 0.0, 7), ("equalize", 0.8, 8)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("rotate", 0.8, 8), ("color", 1.0, 2)),
    (("color", 0.8, 8), ("solarize", 0.8, 7)),
    (("sharpness", 0.4, 7), ("invert", 0.6, 8)),
    (("shear_x", 0.6, 5), ("equalize", 1.0, 9)),
    (("color", 0.4, 0), ("equalize", 0.6, 3)),
    (("equalize", 0.4, 7), ("solarize", 0.2, 4)),
    (("solarize", 0.6, 5), ("autocontrast", 0.6, 5)),
    (("invert", 0.6, 4), ("equalize", 1.0, 8)),
    (("color", 0.6, 4), ("contrast", 1.0, 8)),
    (("equalize", 0.8, 8), ("equalize", 0.6, 3)),
)
