"""How a pass runs, besides its route: the source of norm statistics, stochastic depth, dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsnet.errors import DsnetError

if TYPE_CHECKING:
    from dsnet.slicing.batch_norm import SplitBatchNorm2d

__all__ = ["ImageStatistics", "Mode", "Statistics", "batch_statistics"]

Statistics = Callable[["SplitBatchNorm2d", Tensor, int], tuple[Tensor, Tensor]]
"""(norm, input, key) → (mean, biased variance) to normalise with; gradients flow through both."""


def batch_statistics(norm: SplitBatchNorm2d, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Compute mean and variance [C] of the batch ``x`` [B, C, H, W]; update nothing."""
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    return mean, var


class ImageStatistics:
    """Stored statistics for a batch whose images have different keys, folded with γ and β once per norm.

    Args:
        keys: The norm key of each image, [B].
        tables: Scales and shifts by norm, [keys, 2, C]; filled on demand, valid until weights change.

    Examples:
        >>> from dsnet.slicing import SplitBatchNorm2d
        >>> mode = Mode(images=ImageStatistics(torch.tensor([0, 1, 1])))
        >>> SplitBatchNorm2d(8, keys=2)(torch.zeros(3, 8, 4, 4), mode=mode).shape
        torch.Size([3, 8, 4, 4])
    """

    def __init__(self, keys: Tensor, tables: dict[SplitBatchNorm2d, Tensor] | None = None) -> None:
        self.keys = keys
        self.tables = {} if tables is None else tables

    def of(self, keys: Tensor) -> ImageStatistics:
        """Return the same tables for images with other keys."""
        return ImageStatistics(keys, self.tables)

    def scale_and_shift(self, norm: SplitBatchNorm2d, channels: int) -> tuple[Tensor, Tensor]:
        """Return the scale and shift of each image, [B, C, 1, 1] each."""
        table = self.tables.get(norm)
        if table is None:
            scale = norm.weight * torch.rsqrt(norm.var + norm.eps)
            table = self.tables[norm] = torch.stack([scale, norm.bias - norm.mean * scale], 1)
        scale, shift = table.index_select(0, self.keys)[:, :, :channels, None, None].unbind(1)
        return scale, shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How a pass runs, besides its route. By default this follows from ``train()`` and ``eval()``.

    Attributes:
        statistics: Source of norm statistics (default: the stored ones in eval mode; those of the batch in
            training, which update the stored ones).
        keep_calibrated: In training too, normalise by the stored statistics of calibrated keys, and keep
            them; overrides ``statistics`` for these keys.
        images: Stored statistics for a batch of images with different keys; overrides ``statistics``.
        drop_path: Stochastic depth: probability that the last residual branch is dropped for an image.
        dropout: Dropout of the classifier's input.
        batch_invariant: On a CPU, run the gates so that the result of an image does not depend on its batch.
        generator: Source of randomness of dropout and stochastic depth, on the images' device.

    Examples:
        >>> import dsnet
        >>> model = dsnet.create_model("ds_mbnet_tiny")
        >>> model(torch.zeros(4, 3, 16, 16), 2, mode=Mode(statistics=batch_statistics)).shape
        torch.Size([4, 10])
    """

    statistics: Statistics | None = None
    keep_calibrated: bool = False
    images: ImageStatistics | None = None
    drop_path: float = 0.0
    dropout: float = 0.0
    batch_invariant: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name in ("drop_path", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise DsnetError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
