"""A counter of multiply-adds that shares no code with the package."""

from __future__ import annotations

import torch
from torch import nn


def of_conv(layer: nn.Conv2d, x: torch.Tensor, out: torch.Tensor) -> int:
    return out[0].numel() * (x.shape[1] // layer.groups * layer.kernel_size[0] * layer.kernel_size[1])


def of_linear(layer: nn.Linear, x: torch.Tensor, out: torch.Tensor) -> int:
    return out[0].numel() * x.shape[-1]


def of_pool(layer: nn.AdaptiveAvgPool2d, x: torch.Tensor, out: torch.Tensor) -> int:
    return x[0].numel()


def count_by_hooks(net: nn.Module, x: torch.Tensor, *, pools_only: bool = False) -> int:
    """The paper's convention, or its average pools alone, by reading shapes off a pass of plain layers."""
    kinds = {nn.AdaptiveAvgPool2d: of_pool}
    if not pools_only:
        kinds |= {nn.Conv2d: of_conv, nn.Linear: of_linear}
    counts: list[int] = []
    handles = [
        module.register_forward_hook(lambda m, args, out: counts.append(kinds[type(m)](m, args[0], out)))
        for module in net.modules()
        if type(module) in kinds
    ]
    net(x)
    for handle in handles:
        handle.remove()
    return sum(counts)
