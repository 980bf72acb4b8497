"""Segments that pass several feature maps on as one row of numbers per image.

A row holds maps one behind the other, each channels last: grouping, padding and CUDA graphs then work as they
do for a single map. Networks that read several strides, such as detectors, are built from these modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Shape

__all__ = ["Behind", "Front", "Projections", "ToFused", "flat_maps", "maps_from_row", "resized_maps"]


def flat_maps(x: Tensor) -> Tensor:
    """[B, C, H, W] → [B, H · W · C], without a copy where channels are last in memory."""
    return x.permute(0, 2, 3, 1).flatten(1)


def maps_from_row(row: Tensor, shapes: Iterable[Shape]) -> list[Tensor]:
    """Invert `flat_maps` for several maps one behind the other: [B, numbers, …] → maps [B, C, H, W]."""
    maps, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        piece = row[:, start:end].reshape(-1, shape.height, shape.width, shape.channels)
        maps.append(piece.permute(0, 3, 1, 2))
        start = end
    return maps


class Front(nn.Module):
    """Images → maps that are wanted later and the features at the gate as one row, and scores."""

    def __init__(self, blocks: Sequence[nn.Module], taps: Sequence[int], gate: nn.Module) -> None:
        super().__init__()
        self.blocks, self.taps, self.gate = nn.ModuleList(blocks), tuple(taps), gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, numbers, 1, 1] and scores [B, choices]."""
        kept = []
        for number, block in enumerate(self.blocks):
            if number in self.taps:
                kept.append(flat_maps(x))
            x = block(x)
        x, scores = self.gate(x)
        return torch.cat([*kept, flat_maps(x)], 1)[:, :, None, None], scores


class Behind(nn.Module):
    """A row of the front → a row of answers."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        handed: Mapping[int, Shape],  # by stride; 0: features at the gate
        taps: Mapping[int, int],
        wanted: Sequence[int],
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.blocks, self.handed, self.taps = nn.ModuleList(blocks), dict(handed), dict(taps)
        self.wanted, self.head = tuple(wanted), head

    def forward(self, row: Tensor) -> Tensor:
        """Rows [B, numbers, 1, 1] → [B, numbers]."""
        maps = dict(zip(self.handed, maps_from_row(row, self.handed.values()), strict=True))
        x = maps.pop(0)
        for number, block in enumerate(self.blocks):
            for stride, tap in self.taps.items():
                if tap == number:
                    maps[stride] = x
            x = block(x)
        for stride, tap in self.taps.items():
            if tap == len(self.blocks):
                maps[stride] = x
        return cast(Tensor, self.head([maps[stride] for stride in self.wanted]))


class Projections(nn.Module):
    """One block for each map, and the sizes (height, width) of the maps."""

    def __init__(self, blocks: Iterable[nn.Module], sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.blocks, self.sizes = nn.ModuleList(blocks), list(sizes)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Run each block on its map."""
        return [block(x) for x, block in zip(maps, self.blocks, strict=True)]


def resized_maps(
    maps: Sequence[Tensor], sizes: Iterable[tuple[int, int]], targets: Iterable[tuple[int, int]]
) -> list[Tensor]:
    """Resize maps [B, C, H, W] of ``sizes`` to ``targets`` by bilinear interpolation."""
    return [
        x if size == target else F.interpolate(x, size=target, mode="bilinear", align_corners=False)
        for x, size, target in zip(maps, sizes, targets, strict=True)
    ]


class ToFused(nn.Module):
    """Projections as one map, normed, as one row: positions, then channels."""

    scale: Tensor  # [C]
    shift: Tensor

    def __init__(self, projections: Projections, norm: nn.BatchNorm2d, size: tuple[int, int]) -> None:
        super().__init__()
        self.projections, self.size = projections, size
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.weight * torch.rsqrt(norm.running_var + norm.eps)).detach()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", norm.bias.detach() - norm.running_mean * scale)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Maps [B, C, H, W] → [B, numbers]."""
        sizes = self.projections.sizes
        y = torch.cat(resized_maps(self.projections(maps), sizes, [self.size] * len(sizes)), 1)
        return flat_maps(y * self.scale[:, None, None] + self.shift[:, None, None])
