"""Norms whose channels can be sliced; batch norm keeps statistics of its own for every key.

Batch statistics depend on the route that the input came from, so `SplitBatchNorm2d` holds one (mean,
variance, count) per *key* and shares γ and β, sliced, between them. A key is

- **fresh**: as built, mean 0 and variance 1;
- **running**: updated in training by a moving average;
- **calibrated**: set to exact statistics by `SplitBatchNorm2d.set_statistics`.

Where mean and variance come from in a pass is decided by that pass's `Mode`, never by the module.
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
    """Where a key's statistics come from."""

    FRESH = 0
    RUNNING = 1
    CALIBRATED = 2


Statistics = Callable[["SplitBatchNorm2d", Tensor, int], tuple[Tensor, Tensor]]
"""(norm, input, key) → (mean, biased variance) to normalise by; gradients flow through both."""


def batch_statistics(norm: SplitBatchNorm2d, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the batch at hand; updates nothing."""
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    return mean, var


class ImageStatistics:
    """Stored statistics for images of several keys in one batch, folded with γ and β once a norm."""

    def __init__(self, keys: Tensor, tables: dict[SplitBatchNorm2d, Tensor] | None = None) -> None:
        self.keys = keys  # [B]
        self.tables = {} if tables is None else tables  # norm → [keys, 2, C], good while weights stay

    def of(self, keys: Tensor) -> ImageStatistics:
        """The same tables for other images."""
        return ImageStatistics(keys, self.tables)

    def scale_and_shift(self, norm: SplitBatchNorm2d, channels: int) -> tuple[Tensor, Tensor]:
        """[B, C, 1, 1] each."""
        table = self.tables.get(norm)
        if table is None:
            scale = norm.weight * torch.rsqrt(norm.var + norm.eps)
            table = self.tables[norm] = torch.stack([scale, norm.bias - norm.mean * scale], 1)
        scale, shift = table.index_select(0, self.keys)[:, :, :channels, None, None].unbind(1)
        return scale, shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How a pass runs, beside which route it takes. The default is what ``train()`` and ``eval()`` say."""

    statistics: Statistics | None = None  # None: stored ones in eval; the batch's, with update, in training
    images: ImageStatistics | None = None  # stored ones, each image by its own key; goes before the above
    drop_path: float = 0.0  # stochastic depth: probability that the last residual branch is left out
    dropout: float = 0.0  # of what the classifier reads
    batch_invariant: bool = False  # on a CPU: whether gates sum each image by itself, at some cost
    generator: torch.Generator | None = None  # what the two above draw from, on the images' device

    def __post_init__(self) -> None:
        for name in ("drop_path", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise DsnetError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.dtype == scale.dtype:
        return torch.addcmul(shift, x, scale)  # one pass over the input
    return (x * scale + shift).to(x.dtype)


class SplitBatchNorm2d(nn.Module):
    """Batch norm with statistics for every key and one γ and β for all (Re-SBN, Eq. 14)."""

    weight: nn.Parameter
    bias: nn.Parameter
    mean: Tensor  # [keys, C]
    var: Tensor  # [keys, C]
    count: Tensor  # [keys]: values per channel that the statistics were made from

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
        """γ to ``init_weight``, β to 0, every key fresh; draws nothing."""
        nn.init.constant_(self.weight, self.init_weight)
        nn.init.zeros_(self.bias)
        self.mean.zero_()
        self.var.fill_(1)
        self.count.zero_()
        # On the host, so that a check costs no synchronisation; travels in the state dict all the same.
        self.states = [KeyState.FRESH] * self.keys

    def forward(self, x: Tensor, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Normalises ``x`` [B, C, H, W] as an input that belongs to ``key``."""
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
            if mode.statistics is batch_statistics and x.numel() > channels:  # the same by one fused kernel
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
        """Takes the mean and (biased) variance of a batch of ``count`` values a channel into the average."""
        channels = len(mean)
        unbiased = var * (count / max(count - 1, 1))
        self.mean[key, :channels].lerp_(mean.to(self.mean), self.momentum)
        self.var[key, :channels].lerp_(unbiased.to(self.var), self.momentum)
        self.count[key] += count
        self.states[key] = KeyState.RUNNING

    @torch.no_grad()
    def set_statistics(self, key: int, mean: Tensor, var: Tensor, count: int) -> None:
        """Sets exact statistics; the key is calibrated from now on."""
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
        """The keys' states, for the state dict."""
        return torch.tensor([int(s) for s in self.states], dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Takes the keys' states from a state dict."""
        if not isinstance(state, Tensor) or not set(state.tolist()) <= set(KeyState):
            raise DsnetError(f"norm keys are fresh, running or calibrated (0, 1, 2), not {state!r}")
        if len(state) == self.keys:  # else the statistics do not fit either, which torch reports
            self.states = [KeyState(s) for s in state.tolist()]

    def cost(self, channels: int) -> Cost:
        """γ and β; a norm has no multiply-adds in either convention."""
        return Cost(params=2 * channels)

    def extract(self, channels: int, key: int) -> nn.BatchNorm2d:
        """The stand-alone norm of this width, with the key's statistics."""
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
        """For printing."""
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
        """γ to ``init_weight``, β to 0; draws nothing."""
        nn.init.constant_(self.weight, self.init_weight)
        nn.init.zeros_(self.bias)

    def cost(self, width: int) -> Cost:
        """γ and β; a norm has no multiply-adds in either convention."""
        SF.check_size("width", width, self.width)
        return Cost(params=2 * width)


class SlicedLayerNorm(_AffineNorm):
    """Layer norm over the features that the input has."""

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
        """Normalises the last dimension."""
        return SF.layer_norm(x, self.weight, self.bias, self.eps)

    def extract(self, width: int) -> nn.LayerNorm:
        """The stand-alone norm of this width."""
        SF.check_size("width", width, self.width)
        norm = nn.LayerNorm(width, eps=self.eps, device="meta")
        norm.weight, norm.bias = copy_parameter(self.weight[:width]), copy_parameter(self.bias[:width])
        return norm


class SlicedGroupNorm(_AffineNorm):
    """Group norm with a fixed number of channels per group; has no statistics, so keys do not matter."""

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
        """Normalises ``x`` [B, C, H, W]."""
        return SF.group_norm(x, self.weight, self.bias, self.channels_per_group, self.eps)

    def extract(self, channels: int, key: int) -> nn.GroupNorm:
        """The stand-alone norm of this width."""
        SF.check_group_width(channels, self.width, self.channels_per_group)
        norm = nn.GroupNorm(channels // self.channels_per_group, channels, eps=self.eps, device="meta")
        norm.weight, norm.bias = copy_parameter(self.weight[:channels]), copy_parameter(self.bias[:channels])
        return norm
