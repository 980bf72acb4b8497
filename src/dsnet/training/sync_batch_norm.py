"""Batch-norm statistics over the images of all ranks."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dsnet.core.distributed.link import all_reduce
from dsnet.slicing import SplitBatchNorm2d
from dsnet.slicing import functional as SF

__all__ = ["SharedStatistics"]


class _Sum(torch.autograd.Function):
    """All-reduce with a gradient: the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:  # noqa: ANN401  (autograd's context)
        total = values.clone()
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        total = gradient.contiguous().clone()
        all_reduce(total)
        return total


class SharedStatistics:
    """Batch-norm statistics of the images of all ranks; a `Statistics` of a `Mode`.

    Each norm needs one differentiable reduction of (count, Σx, Σx²), on gloo or NCCL. The sums come from the
    mean and variance of each rank in float64, so that their difference loses nothing.

    Args:
        update: Update the running statistics, as training does.
    """

    def __init__(self, *, update: bool) -> None:
        self.update = update

    def __call__(self, norm: SplitBatchNorm2d, x: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return mean and biased variance over all ranks."""
        count = x.numel() // x.shape[1]
        precise = SF.at_least_float32(x.dtype)
        var, mean = torch.var_mean(x.to(precise), dim=(0, 2, 3), correction=0)
        var, mean = var.double(), mean.double()
        counts = torch.full((1,), count, dtype=torch.float64, device=x.device)
        sums = torch.cat([counts, count * mean, count * (var + mean.square())])
        total = cast(Tensor, _Sum.apply(sums))  # type: ignore[no-untyped-call]
        images, added, squares = torch.split(total, [1, len(mean), len(mean)])
        mean = added / images
        var = (squares / images - mean.square()).clamp(min=0)
        if self.update:
            norm.update_running(key, mean.detach(), var.detach(), count * dist.get_world_size())
        return mean.to(precise), var.to(precise)
