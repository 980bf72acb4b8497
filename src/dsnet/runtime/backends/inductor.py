"""`torch.compile`, weights frozen into the program."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError

__all__ = ["BACKEND", "AnyBatch"]


class _Inductor:
    name = "inductor"
    buckets = (1, 8)  # a program takes several seconds to make

    def any_batch(self, device: torch.device) -> bool:
        """On a GPU; on the host programs of one size are the faster ones."""
        return device.type == "cuda"

    def recorded(self, device: torch.device) -> bool:
        """Graphs are for GPUs."""
        return device.type == "cuda"

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """The host's programs need a C++ compiler."""
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "it needs a C++ compiler: install g++"
        return None

    def convert(self, module: nn.Module, example: Tensor) -> Callable[[Tensor], _Compiled | AnyBatch]:
        """On the host programs of one form: another one is an error, never a recompilation. On a GPU one."""
        if self.any_batch(example.device):
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            made = AnyBatch(module, example)
            return lambda example: made
        return functools.partial(_Compiled, module)


class _Compiled:
    def __init__(self, module: nn.Module, example: Tensor) -> None:
        from torch._inductor import config  # slow to import

        self.form, self.strides = _form(example), example.stride()
        self.call = torch.compile(_own_code(module), fullgraph=True, dynamic=False)
        with torch.no_grad(), config.patch(freezing=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            self.call(example)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        # One kind of tensor in one mode: each would otherwise be a program of its own.
        with torch.inference_mode(False), torch.no_grad():
            if _form(x) != self.form:
                raise DsnetError(f"this program was compiled for {self.form}, not for {_form(x)}")
            if x.is_inference() or x.requires_grad or x.stride() != self.strides:
                x = torch.empty_strided(x.shape, self.strides, dtype=x.dtype, device=x.device).copy_(x)
            found = self.call(x)
        return found if isinstance(found, tuple) else (found,)


class AnyBatch:
    """A program for any number of images, channels last; one image runs as two."""

    def __init__(self, module: nn.Module, example: Tensor) -> None:
        from torch._inductor import config  # slow to import

        self.shape, self.dtype = example.shape[1:], example.dtype
        self.call = torch.compile(_own_code(module), fullgraph=True, dynamic=True)
        images = torch.zeros(4, *self.shape, dtype=self.dtype, device=example.device)
        images = images.contiguous(memory_format=torch.channels_last)
        torch._dynamo.mark_dynamic(images, 0, min=2)
        with torch.no_grad(), config.patch(freezing=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            self.call(images)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """One tensor, or features and scores."""
        if x.shape[1:] != self.shape or x.dtype != self.dtype:
            given = f"{list(x.shape[1:])} of {x.dtype}"
            raise DsnetError(f"this program takes images {list(self.shape)} of {self.dtype}, not {given}")
        with torch.inference_mode(False), torch.no_grad():
            count = len(x)
            if count < 2:
                x = x.expand(2, *x.shape[1:]) if count else x.new_zeros(2, *x.shape[1:])
            if x.is_inference() or x.requires_grad or not x.is_contiguous(memory_format=torch.channels_last):
                x = x.detach().clone(memory_format=torch.channels_last)
            found = self.call(x)
        found = found if isinstance(found, tuple) else (found,)
        return found if count > 1 else tuple(y[:count] for y in found)


def _own_code(module: nn.Module) -> Callable[[Tensor], Any]:
    """The module behind a function whose code nothing else has: programs are kept by code, a few for each."""

    def run(x: Tensor) -> Any:  # noqa: ANN401
        return module(x)

    run.__code__ = run.__code__.replace(co_name=f"part_{id(run)}")
    return run


def _form(x: Tensor) -> tuple[object, ...]:
    threads = f"{torch.get_num_threads()} threads"  # of them, too, a program is made for one number
    return tuple(x.shape), x.dtype, x.device, threads


BACKEND = _Inductor()
