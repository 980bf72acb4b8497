"""Batch norm whose channels can be sliced, with separate statistics for each key.

Batch statistics depend on the route that the input took. `SplitBatchNorm2d` therefore holds one (mean,
variance, count) per *key*; all keys share γ and β, sliced. The `Mode` of a pass, not the module, says where
its mean and variance come from.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.slicing import functional as SF
from dsnet.slicing.mode import Mode, batch_statistics
from dsnet.slicing.norm import AffineNorm
from dsnet.slicing.parameters import Factory
from dsnet.slicing.static import with_copies

__all__ = ["KeyState", "SplitBatchNorm2d"]


class KeyState(IntEnum):
    """The source of the statistics of a key."""

    FRESH = 0  # as built, with mean 0 and variance 1
    RUNNING = 1  # updated in training by a moving average
    CALIBRATED = 2  # exact, set by `SplitBatchNorm2d.set_statistics`


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.dtype == scale.dtype:
        return torch.addcmul(shift, x, scale)  # one pass over the input
    return (x * scale + shift).to(x.dtype)


class SplitBatchNorm2d(AffineNorm):
    """Batch norm with statistics for each key, and γ and β shared by all keys (Re-SBN, Eq. 14).

    Args:
        channels: Number of channels of the widest input.
        keys: Number of keys.
        eps: Added to variances.
        momentum: Weight of a batch in the moving average.
        init_weight: Initial value of γ.
        **factory: ``device`` and ``dtype``.

    Examples:
        >>> norm = SplitBatchNorm2d(8, keys=2)
        >>> norm(torch.zeros(4, 6, 3, 3), key=1).shape, norm.states[1].name
        (torch.Size([4, 6, 3, 3]), 'RUNNING')
    """

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
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__(channels, eps=eps, init_weight=init_weight, **factory)
        self.keys, self.momentum = keys, momentum
        self.register_buffer("mean", torch.empty(keys, channels, **factory))
        self.register_buffer("var", torch.empty(keys, channels, **factory))
        self.register_buffer("count", torch.empty(keys, device=factory.get("device"), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set γ to ``init_weight``, β to 0 and all keys to fresh; nothing is drawn."""
        super().reset_parameters(generator)
        self.mean.zero_()
        self.var.fill_(1)
        self.count.zero_()
        # On the host, so that a check needs no synchronisation; stored in the state dict as extra state.
        self.states = [KeyState.FRESH] * self.keys

    @torch.no_grad()
    def repeat_keys(self, count: int) -> None:
        """Make ``count`` sets of the present keys, one after the other.

        All start with the present statistics. Those that are calibrated stay so in the last set only.
        """
        self.keys *= count
        self.mean, self.var = self.mean.repeat(count, 1), self.var.repeat(count, 1)
        self.count = self.count.repeat(count)
        copied = [min(state, KeyState.RUNNING) for state in self.states]
        self.states = [*copied * (count - 1), *self.states]

    def forward(self, x: Tensor, key: int = 0, mode: Mode | None = None) -> Tensor:
        """Normalise features.

        Args:
            x: Features [B, C, H, W]; C is the slice of the channels.
            key: The key whose statistics are used, and in training updated.
            mode: Other sources of statistics.

        Returns:
            Features [B, C, H, W].

        Raises:
            DsnetError: The norm has no such width or key.
        """
        channels = x.shape[1]
        if not (0 < channels <= self.channels and 0 <= key < self.keys):
            self._check(channels, key)
        if mode is not None and mode.images is not None:
            return _affine(x, *mode.images.scale_and_shift(self, channels))
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if channels < self.channels:
            weight, bias = weight[:channels], bias[:channels]
        keep = mode is not None and mode.keep_calibrated and self.states[key] is KeyState.CALIBRATED
        if mode is not None and mode.statistics is not None and not keep:
            if mode.statistics is batch_statistics and x.numel() > channels:  # one fused kernel
                return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
            mean, var = mode.statistics(self, x, key)
            scale = weight * torch.rsqrt(var + self.eps)
            return _affine(x, scale[..., None, None], (bias - mean * scale)[..., None, None])
        mean, var = self.mean[key, :channels], self.var[key, :channels]
        update = self.training and not keep
        y = F.batch_norm(x, mean, var, weight, bias, update, self.momentum, self.eps)
        if update and x.numel():
            self.states[key] = KeyState.RUNNING
            self.count[key] += x.shape[0] * x.shape[2] * x.shape[3]
        return y

    def _check(self, channels: int, key: int) -> None:
        SF.check_size("width", channels, self.channels)
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
        """Set exact statistics of a key, which is calibrated afterwards.

        Args:
            key: The key.
            mean: Means [C] of the first C channels.
            var: Variances [C].
            count: Number of values per channel behind them.

        Raises:
            DsnetError: The norm has no such key or width, or a value is not finite or negative.
        """
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

    def extract(self, channels: int, key: int) -> nn.BatchNorm2d:
        """Extract the stand-alone norm of this width, with the statistics of a key."""
        self._check(channels, key)
        factory = Factory(device=self.weight.device, dtype=self.weight.dtype)
        norm = nn.BatchNorm2d(channels, self.eps, self.momentum, **factory)
        norm.running_mean, norm.running_var = (t[key, :channels].clone() for t in (self.mean, self.var))
        return with_copies(norm, self.weight[:channels], self.bias[:channels]).eval()

    def extra_repr(self) -> str:
        """Return the sizes for printing."""
        return f"{self.channels}, keys={self.keys}"
