"""Prior boxes: what a detector's answers are offsets from, laid over maps as SSD does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = ["SCALES", "prior_boxes", "priors_at"]

SCALES = (
    0.2,
    0.9,
)  # of the second and of the last map, as shares of the image; the first has half of its next


def priors_at(ratios: Sequence[float]) -> int:
    """How many priors every position has: two squares, and two for every further ratio."""
    return 2 + 2 * len(ratios)


def prior_boxes(
    sizes: Sequence[tuple[int, int]],
    ratios: Sequence[Sequence[float]],
    scales: tuple[float, float] = SCALES,
) -> Tensor:
    """Centres and sizes [p, 4] for maps of these heights and widths, finest first, as shares of the image.

    Scales grow evenly from the second map on; the first has half of the second's, as SSD for small things. Of
    one map alone it is the first. At every position: a square of the map's scale, one between it and the
    next map's, and for every ratio r a box of the same area that is r times as wide as high, and one as high.
    Priors of a position lie side by side, positions line by line.
    """
    if len(sizes) != len(ratios) or not sizes:
        raise DsnetError(f"there are {len(sizes)} maps and ratios for {len(ratios)}")
    if not 0 < scales[0] <= scales[1] or any(r <= 0 for own in ratios for r in own):
        raise DsnetError(f"scales {scales} and ratios {ratios} must be above 0, the smaller scale first")
    step = (scales[1] - scales[0]) / max(1, len(sizes) - 2)
    every = [scales[0] / 2, *(scales[0] + step * number for number in range(len(sizes)))]
    boxes = []
    for number, ((height, width), own) in enumerate(zip(sizes, ratios, strict=True)):
        scale = every[number]
        between = math.sqrt(scale * every[number + 1])
        shapes = [(scale, scale), (between, between)]
        for ratio in own:
            long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            shapes += [(long, short), (short, long)]
        for i, j in itertools.product(range(height), range(width)):
            boxes += [((j + 0.5) / width, (i + 0.5) / height, *shape) for shape in shapes]
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
