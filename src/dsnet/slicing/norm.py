"""Norms whose channels can be sliced; batch norm keeps separate statistics for each key.

Batch statistics depend on the route that the input took. `SplitBatchNorm2d` therefore holds one (mean,
variance, count) per *key*; all keys share γ and β, sliced. The state of a key is

- **fresh**: as built, with mean 0 and variance 1;
- **running**: updated in training by a moving average;
- **calibrated**: set to exact statistics by `SplitBatchNorm2d.set_statistics`.

The `Mode` of a pass, not the module, says where its mean and variance come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.counts import Cost
from dsnet.errors import DsnetError
from dsnet.slicing import functional as SF
from dsnet.slicing.static import copy_parameter, plain_batch_norm

__all__ = [
    "ImageStatistics",
    "KeyState",
    "Mode",
    "SlicedGroupNorm",
    "SlicedLayerNorm",
    "SplitBatchNorm2d",
    "Statistics",
    "batch_statistics",
]


class KeyState(IntEnum):
    """The source of the statistics of a key."""

    FRESH = 0
    RUNNING = 1
    CALIBRATED = 2


Statistics = Callable[["SplitBatchNorm2d", Tensor, int], tuple[Tensor, Tensor]]
"""(norm, input, key) → (mean, biased variance) to normalise with; gradients flow through both."""


def batch_statistics(norm: SplitBatchNorm2d, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Compute mean and variance of the batch; update nothing."""
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    return mean, var


class ImageStatistics:
    """Stored statistics for a batch whose images have different keys, folded with γ and β once per norm."""

    def __init__(self, keys: Tensor, tables: dict[SplitBatchNorm2d, Tensor] | None = None) -> None:
        self.keys = keys  # [B]
        self.tables = {} if tables is None else tables  # norm → [keys, 2, C], valid until weights change

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
        images: Stored statistics for a batch of images with different keys; overrides ``statistics``.
        drop_path: Stochastic depth: probability that the last residual branch is dropped for an image.
        dropout: Dropout of the classifier's input.
        batch_invariant: On a CPU, run the gates so that the result of an image does not depend on its batch.
        generator: Source of randomness of dropout and stochastic depth, on the images' device.
    """

    statistics: Statistics | None = None
    images: ImageStatistics | None = None
    drop_path: float = 0.0
    dropout: float = 0.0
    batch_invariant: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name in ("drop_path", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise DsnetError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.dtype == scale.dtype:
        return torch.addcmul(shift, x, scale)  # one pass over the input
    return (x * scale + shift).to(x.dtype)


class SplitBatchNorm2d(nn.Module):
    """Batch norm with statistics for each key, and γ and β shared by all keys (Re-SBN, Eq. 14)."""

    weight: nn.Parameter
    bias: nn.Parameter
    mean: Tensor  # [keys, C]
    var: Tensor  # [keys, C]
    count: Tensor  # [keys]: number of values per channel behind the statistics

    def __init__(
        self,
        channels: int,
        *,
        keys: int = 1,
        eps: float = 1e-5,
        momentum: float = 0.1,
        init_weight: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.keys, self.eps, self.momentum = channels, keys, eps, momentum
        self.init_weight = init_weight
        self.weight = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype))
        self.register_buffer("mean", torch.empty(keys, channels, device=device, dtype=dtype))
        self.register_buffer("var", torch.empty(keys, channels, device=device, dtype=dtype))
        self.register_buffer("count", torch.empty(keys, device=device, dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set γ to ``init_weight``, β to 0 and all keys to fresh; nothing is drawn."""
        nn.init.constant_(self.weight, self.init_weight)
        nn.init.zeros_(self.bias)
        self.mean.zero_()
        self.var.fill_(1)
        self.count.zero_()
        # On the host, so that a check needs no synchronisation; stored in the state dict as extra state.
        self.states = [KeyState.FRESH] * self.keys

    def forward(self, x: Tensor, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Normalise ``x`` [B, C, H, W] with the statistics of ``key``."""
        channels = x.shape[1]
        if not (0 < channels <= self.channels and 0 <= key < self.keys):
            self._check(channels, key)
        if mode is not None and mode.images is not None:
            return _affine(x, *mode.images.scale_and_shift(self, channels))
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if channels < self.channels:
            weight, bias = weight[:channels], bias[:channels]
        if mode is not None and mode.statistics is not None:
            if mode.statistics is batch_statistics and x.numel() > channels:  # one fused kernel
                return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
            mean, var = mode.statistics(self, x, key)
            scale = weight * torch.rsqrt(var + self.eps)
            return _affine(x, scale[..., None, None], (bias - mean * scale)[..., None, None])
        mean, var = self.mean[key, :channels], self.var[key, :channels]
        y = F.batch_norm(x, mean, var, weight, bias, self.training, self.momentum, self.eps)
        if self.training and x.numel():
            self.states[key] = KeyState.RUNNING
            self.count[key] += x.shape[0] * x.shape[2] * x.shape[3]
        return y

    def _check(self, channels: int, key: int) -> None:
        if not 1 <= channels <= self.channels:
            raise DsnetError(f"width {channels} is not in this norm; possible: 1 to {self.channels}")
        if not 0 <= key < self.keys:
            raise DsnetError(f"this norm has no key {key}; possible: 0 to {self.keys - 1}")

    @torch.no_grad()
    def update_running(self, key: int, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the moving average by the mean and biased variance of ``count`` values a channel."""
        channels = len(mean)
        unbiased = var * (count / max(count - 1, 1))
        self.mean[key, :channels].lerp_(mean.to(self.mean), self.momentum)
        self.var[key, :channels].lerp_(unbiased.to(self.var), self.momentum)
        self.count[key] += count
        self.states[key] = KeyState.RUNNING

    @torch.no_grad()
    def set_statistics(self, key: int, mean: Tensor, var: Tensor, count: int) -> None:
        """Set exact statistics of a key, which is calibrated afterwards."""
        channels = len(mean) if mean.ndim == 1 else 0
        self._check(channels, key)
        if var.shape != mean.shape or not mean.isfinite().all() or not (var.isfinite() & (var >= 0)).all():
            raise DsnetError(
                f"statistics for key {key} must be {channels} finite means and variances of at least 0"
            )
        self.mean[key, :channels] = mean.to(self.mean)
        self.var[key, :channels] = var.to(self.var)
        self.count[key] = count
        self.states[key] = KeyState.CALIBRATED

    def get_extra_state(self) -> Tensor:
        """Store the states of the keys in the state dict."""
        return torch.tensor([int(s) for s in self.states], dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Load the states of the keys from a state dict."""
        if not isinstance(state, Tensor) or not set(state.tolist()) <= set(KeyState):
            raise DsnetError(f"norm keys are fresh, running or calibrated (0, 1, 2), not {state!r}")
        if len(state) == self.keys:  # otherwise torch reports that the statistics do not fit
            self.states = [KeyState(s) for s in state.tolist()]

    def cost(self, channels: int) -> Cost:
        """Count γ and β; norms have no multiply-adds in either convention."""
        return Cost(params=2 * channels)

    def extract(self, channels: int, key: int) -> nn.BatchNorm2d:
        """Extract the stand-alone norm of this width, with the statistics of a key."""
        self._check(channels, key)
        return plain_batch_norm(
            self.weight[:channels],
            self.bias[:channels],
            self.mean[key, :channels],
            self.var[key, :channels],
            eps=self.eps,
            momentum=self.momentum,
        )

    def extra_repr(self) -> str:
        """Return the sizes for printing."""
        return f"{self.channels}, keys={self.keys}"


class _AffineNorm(nn.Module):
    def __init__(
        self,
        width: int,
        *,
        eps: float,
        init_weight: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.width, self.eps, self.init_weight = width, eps, init_weight
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set γ to ``init_weight`` and β to 0; nothing is drawn."""
        nn.init.constant_(self.weight, self.init_weight)
        nn.init.zeros_(self.bias)

    def cost(self, width: int) -> Cost:
        """Count γ and β; norms have no multiply-adds in either convention."""
        SF.check_size("width", width, self.width)
        return Cost(params=2 * width)


class SlicedLayerNorm(_AffineNorm):
    """Layer norm over the features of its input."""

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps=eps, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return SF.layer_norm(x, self.weight, self.bias, self.eps)

    def extract(self, width: int) -> nn.LayerNorm:
        """Extract the stand-alone norm of this width."""
        SF.check_size("width", width, self.width)
        norm = nn.LayerNorm(width, eps=self.eps, device="meta")
        norm.weight, norm.bias = copy_parameter(self.weight[:width]), copy_parameter(self.bias[:width])
        return norm


class SlicedGroupNorm(_AffineNorm):
    """Group norm with a fixed number of channels per group. It has no statistics and ignores keys."""

    def __init__(
        self,
        width: int,
        *,
        channels_per_group: int,
        eps: float = 1e-5,
        init_weight: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(width, eps=eps, init_weight=init_weight, device=device, dtype=dtype)
        if width % channels_per_group:
            raise DsnetError(f"{width} channels are not a multiple of {channels_per_group} per group")
        self.channels_per_group = channels_per_group

    def forward(self, x: Tensor, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Normalise ``x`` [B, C, H, W]."""
        return SF.group_norm(x, self.weight, self.bias, self.channels_per_group, self.eps)

    def extract(self, channels: int, key: int) -> nn.GroupNorm:
        """Extract the stand-alone norm of this width."""
        SF.check_group_width(channels, self.width, self.channels_per_group)
        norm = nn.GroupNorm(channels // self.channels_per_group, channels, eps=self.eps, device="meta")
        norm.weight, norm.bias = copy_parameter(self.weight[:channels]), copy_parameter(self.bias[:channels])
        return norm
