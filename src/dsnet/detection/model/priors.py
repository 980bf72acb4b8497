"""Prior boxes on the maps of the pyramid, as in SSD."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsnet.errors import DsnetError

__all__ = ["SCALES", "prior_boxes", "priors_per_position"]

SCALES = (0.2, 0.9)  # of the second and of the last map, as shares of the image


def priors_per_position(ratios: Sequence[float]) -> int:
    """Count the priors of a position: two squares, and two boxes for each further ratio."""
    return 2 + 2 * len(ratios)


def prior_boxes(
    sizes: Sequence[tuple[int, int]],
    ratios: Sequence[Sequence[float]],
    scales: tuple[float, float] = SCALES,
) -> Tensor:
    """Make the prior boxes of some maps.

    Scales grow linearly from the second map to the last; the first map has half the scale of the second, for
    small objects. Each position has a square of the map's scale, a square between this scale and the next
    map's, and for each ratio r two boxes of the first square's area: one r times as wide as high, and one r
    times as high as wide.

    Args:
        sizes: Heights and widths of the maps, the finest first.
        ratios: Aspect ratios for each map, without 1.
        scales: Scales of the second and of the last map, as shares of the image. A single map has half the
            first one.

    Returns:
        Centres and sizes [p, 4] as shares of the image: map by map, row by row, position by position.

    Raises:
        DsnetError: The numbers of sizes and of ratios differ, or a scale or ratio is not above 0.
    """
    if len(sizes) != len(ratios) or not sizes:
        raise DsnetError(f"expected ratios for each of {len(sizes)} maps (at least 1), got {len(ratios)}")
    if not 0 < scales[0] <= scales[1] or any(ratio <= 0 for of_map in ratios for ratio in of_map):
        raise DsnetError(f"scales {scales} and ratios {ratios} must be above 0, the smaller scale first")
    step = (scales[1] - scales[0]) / max(1, len(sizes) - 2)
    map_scales = [scales[0] / 2, *(scales[0] + step * level for level in range(len(sizes)))]
    boxes = []
    for (height, width), of_map, (scale, next_scale) in zip(
        sizes, ratios, itertools.pairwise(map_scales), strict=True
    ):
        between = math.sqrt(scale * next_scale)
        shapes = [(scale, scale), (between, between)]
        for ratio in of_map:
            long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            shapes += [(long, short), (short, long)]
        for i, j in itertools.product(range(height), range(width)):
            boxes += [((j + 0.5) / width, (i + 0.5) / height, *shape) for shape in shapes]
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
