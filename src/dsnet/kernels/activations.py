"""Activation functions inside kernels, and the same functions of torch."""

from __future__ import annotations

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, N803
import torch.nn.functional as F

from dsnet.kernels.launch import AVAILABLE

if AVAILABLE:
    import triton
    import triton.language as tl

__all__ = ["ACTIVATIONS", "CODES"]

ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "silu": F.silu, "hard_swish": F.hardswish}
CODES = {"none": 0, "relu": 1, "silu": 2, "hard_swish": 3, "one_plus_tanh": 4}  # as kernels take them

if AVAILABLE:

    @triton.jit
    def activate(x, CODE: tl.constexpr):
        if CODE == 1:
            x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if CODE == 2:
            x = x * tl.sigmoid(x)
        if CODE == 3:
            x = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0  # the first factor propagates NaN
        if CODE == 4:
            x = 2.0 * tl.sigmoid(2.0 * x)
        return x
