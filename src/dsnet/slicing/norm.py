"""Layer norm and group norm whose channels can be sliced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor, nn

from dsnet.counts import Cost
from dsnet.errors import DsnetError
from dsnet.slicing import functional as SF
from dsnet.slicing.parameters import Factory, new_parameter
from dsnet.slicing.static import with_copies

if TYPE_CHECKING:
    from dsnet.slicing.mode import Mode

__all__ = ["AffineNorm", "SlicedGroupNorm", "SlicedLayerNorm"]


class AffineNorm(nn.Module):
    """Base class of norms: γ and β of up to ``channels`` channels."""

    def __init__(
        self, channels: int, *, eps: float, init_weight: float = 1.0, **factory: Unpack[Factory]
    ) -> None:
        super().__init__()
        self.channels, self.eps, self.init_weight = channels, eps, init_weight
        self.weight = new_parameter(channels, **factory)
        self.bias = new_parameter(channels, **factory)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set γ to ``init_weight`` and β to 0; nothing is drawn."""
        nn.init.constant_(self.weight, self.init_weight)
        nn.init.zeros_(self.bias)

    def cost(self, channels: int) -> Cost:
        """Count γ and β; norms have no multiply-adds in either convention."""
        SF.check_size("width", channels, self.channels)
        return Cost(params=2 * channels)


class SlicedLayerNorm(AffineNorm):
    """Layer norm over the features of its input.

    Args:
        channels: Features of the widest input.
        eps: Added to variances.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> SlicedLayerNorm(64)(torch.zeros(2, 5, 48)).shape
        torch.Size([2, 5, 48])
    """

    def __init__(self, channels: int, *, eps: float = 1e-6, **factory: Unpack[Factory]) -> None:
        super().__init__(channels, eps=eps, **factory)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x`` [..., E]."""
        return SF.layer_norm(x, self.weight, self.bias, self.eps)

    def extract(self, channels: int) -> nn.LayerNorm:
        """Extract the stand-alone norm of this width."""
        SF.check_size("width", channels, self.channels)
        norm = nn.LayerNorm(channels, eps=self.eps, device="meta")
        return with_copies(norm, self.weight[:channels], self.bias[:channels])


class SlicedGroupNorm(AffineNorm):
    """Group norm with a fixed number of channels per group. It has no statistics and ignores keys.

    Args:
        channels: Channels of the widest input, a multiple of ``channels_per_group``.
        channels_per_group: Channels of a group; a slice has fewer groups of the same size.
        eps: Added to variances.
        init_weight: Initial value of γ.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> SlicedGroupNorm(32, channels_per_group=8)(torch.zeros(2, 16, 4, 4)).shape
        torch.Size([2, 16, 4, 4])
    """

    def __init__(
        self,
        channels: int,
        *,
        channels_per_group: int,
        eps: float = 1e-5,
        init_weight: float = 1.0,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(channels, eps=eps, init_weight=init_weight, **factory)
        self.reset_parameters()
        if channels % channels_per_group:
            raise DsnetError(f"{channels} channels are not a multiple of {channels_per_group} per group")
        self.channels_per_group = channels_per_group

    def forward(self, x: Tensor, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Normalise ``x`` [B, C, H, W]; ``key`` and ``mode`` have no effect."""
        return SF.group_norm(x, self.weight, self.bias, self.channels_per_group, self.eps)

    def extract(self, channels: int, key: int) -> nn.GroupNorm:
        """Extract the stand-alone norm of this width."""
        SF.check_group_width(channels, self.channels, self.channels_per_group)
        norm = nn.GroupNorm(channels // self.channels_per_group, channels, eps=self.eps, device="meta")
        return with_copies(norm, self.weight[:channels], self.bias[:channels])
