"""Patch embedding with class token and learned positions, sliced in the embedding."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost, Shape
from dsnet.errors import DsnetError
from dsnet.slicing import functional as SF
from dsnet.slicing.conv import SlicedConv2d
from dsnet.slicing.parameters import Factory, copy_parameter, draw_truncated, new_parameter
from dsnet.slicing.static import traced

__all__ = ["SlicedPatchEmbed"]


class SlicedPatchEmbed(nn.Module):
    """Embed features [B, C, H, W] as tokens [B, 1 + patches, width] (Eq. 15).

    The positions belong to a square grid; for another grid they are resized (bicubic).

    Args:
        in_channels: Channels of the features.
        width: Width of the embedding at full size.
        patch: Side of a patch; both sides of the features must be multiples of it.
        grid: Side of the grid of patches that the positions belong to.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> layer = SlicedPatchEmbed(8, 64, patch=4, grid=4)
        >>> layer(torch.zeros(2, 8, 16, 16), width=48).shape
        torch.Size([2, 17, 48])
    """

    def __init__(
        self, in_channels: int, width: int, *, patch: int, grid: int, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.patch, self.grid = patch, grid
        self.proj = SlicedConv2d(in_channels, width, kernel=patch, stride=patch, bias=True, **factory)
        self.class_token = new_parameter(width, **factory)
        self.positions = new_parameter(1 + grid * grid, width, **factory)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Initialise projection, class token and positions by a truncated normal of 0.02."""
        for weight in (self.proj.weight, self.class_token, self.positions):
            draw_truncated(weight, 0.02, generator)

    def forward(self, x: Tensor, width: int) -> Tensor:
        """Embed features [B, C, H, W] as tokens [B, 1 + patches, width]; the first is the class token."""
        if x.shape[2] % self.patch or x.shape[3] % self.patch:
            raise DsnetError(
                f"a map of {x.shape[2]} × {x.shape[3]} is not a whole number of patches of {self.patch}"
            )
        patches = self.proj(x, width, padding=0)
        offsets = self._offsets(width, *patches.shape[2:])
        # The class token is added to a zero token, so that it is not copied for each image.
        return F.pad(patches.flatten(2).transpose(1, 2), (0, 0, 1, 0)) + offsets

    def _offsets(self, width: int, grid_height: int, grid_width: int) -> Tensor:
        """Return the summands of the tokens: positions, and in front the class token with its own."""
        first, rest = self.positions[:1, :width], self.positions[1:, :width]
        if (grid_height, grid_width) != (self.grid, self.grid):
            image = rest.t().reshape(1, width, self.grid, self.grid)
            image = image.to(SF.at_least_float32(image.dtype))
            resized = F.interpolate(image, (grid_height, grid_width), mode="bicubic", antialias=False)
            rest = resized.flatten(2)[0].t().to(rest.dtype)
        return torch.cat([first + self.class_token[:width], rest])

    def cost(self, shape: Shape, width: int) -> tuple[Cost, Shape]:
        """Count the layer on an input of this shape; return also the shape of the tokens."""
        project, grid = self.proj.cost(shape, width, padding=0)
        tokens = Shape(width, 1 + grid.area, 1)
        # Parameters are those of the native grid; the class token and its position count as one.
        return project + Cost(params=width * (1 + self.grid**2)), tokens

    def extract(self, shape: Shape, width: int) -> nn.Module:
        """Extract the stand-alone embedding of this width, for inputs of this shape."""
        _, grid = self.proj.cost(shape, width, padding=0)
        offsets = self._offsets(width, grid.height, grid.width)
        return traced(_PatchEmbed(self.proj.extract(shape.channels, width, padding=0), offsets))


class _PatchEmbed(nn.Module):
    def __init__(self, proj: nn.Conv2d, offsets: Tensor) -> None:
        super().__init__()
        self.proj, self.offsets = proj, copy_parameter(offsets)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.proj(x).flatten(2).transpose(1, 2)
        return F.pad(patches, (0, 0, 1, 0)) + self.offsets
