"""Where Triton kernels can run, and how their launches are divided into programs."""

from __future__ import annotations

import contextlib
import importlib.util
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = ["AVAILABLE", "BLOCK", "STAGES", "fit_depth", "has_kernels", "on_device_of", "power_of_two"]

AVAILABLE = importlib.util.find_spec("triton") is not None  # there are no wheels for macOS and Windows
INTERPRETED = False  # for tests: whether kernels also run on the CPU, in Triton's interpreter
BLOCK = 4096  # elements per program
STAGES = 3  # software pipelining of loads
SHARED_MEMORY = 96 * 1024  # bytes per program that all recent GPUs have


def has_kernels(x: Tensor) -> bool:
    """Return whether kernels can run on this tensor's device and dtype."""
    if not AVAILABLE or torch.compiler.is_compiling() or x.dtype == torch.float64:
        return False
    return x.is_cuda or INTERPRETED


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make a tensor's device the current one: kernels are launched there, whatever tensors they are given."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def power_of_two(number: int, minimum: int = 1) -> int:
    """Return the next power of two, at least ``minimum``."""
    return max(minimum, 1 << (number - 1).bit_length())


def fit_depth(bm: int, bn: int, bk: int, element_size: int) -> int:
    """Halve the depth ``bk`` of a matrix product's blocks until its pipeline fits in shared memory."""
    while bk > 16 and STAGES * (bm + bn) * bk * element_size > SHARED_MEMORY:
        bk //= 2
    return bk
