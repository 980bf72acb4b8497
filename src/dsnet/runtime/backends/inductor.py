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
    batch_invariant = False
    invariant_logits = False
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

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., _Compiled | AnyBatch]:
        """On the host programs of one form: another one is an error, never a recompilation. On a GPU one."""
        if self.any_batch(examples[0].device):
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            made = AnyBatch(module, *examples)
            return lambda *examples: made
        return functools.partial(_Compiled, module)


class _Compiled:
    def __init__(self, module: nn.Module, *examples: Tensor) -> None:
        from torch._inductor import config  # slow to import

        self.form, self.strides = _form(*examples), [example.stride() for example in examples]
        self.call = torch.compile(_own_code(module), fullgraph=True, dynamic=False)
        with torch.no_grad(), config.patch(freezing=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            self.call(*examples)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        # One kind of tensor in one mode: each would otherwise be a program of its own.
        with torch.inference_mode(False), torch.no_grad():
            if _form(*inputs) != self.form:
                raise DsnetError(f"this program was compiled for {self.form}, not for {_form(*inputs)}")
            same = [_like(x, strides) for x, strides in zip(inputs, self.strides, strict=True)]
            found = self.call(*same)
        return found if isinstance(found, tuple) else (found,)


def _like(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.is_inference() or x.requires_grad or x.stride() != strides:
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return x


class AnyBatch:
    """A program for any number of images, channels last; one image runs as two."""

    def __init__(self, module: nn.Module, *examples: Tensor) -> None:
        from torch._inductor import config  # slow to import

        self.forms = [(x.shape[1:], x.dtype) for x in examples]
        self.call = torch.compile(_own_code(module), fullgraph=True)
        inputs = [_channels_last(x[:1].expand(4, *x.shape[1:])) for x in examples]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)  # the number of images alone
        with torch.no_grad(), config.patch(freezing=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            self.call(*inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """One tensor, or features and scores."""
        if [(x.shape[1:], x.dtype) for x in inputs] != self.forms:
            given = [(list(x.shape[1:]), x.dtype) for x in inputs]
            raise DsnetError(f"this program takes images of {self.forms}, not of {given}")
        count = len(inputs[0])
        with torch.inference_mode(False), torch.no_grad():
            if count < 2:
                inputs = tuple(torch.cat([x, x.new_zeros(2 - count, *x.shape[1:])]) for x in inputs)
            found = self.call(*(_channels_last(x) for x in inputs))
        found = found if isinstance(found, tuple) else (found,)
        return found if count > 1 else tuple(y[:count] for y in found)


def _channels_last(x: Tensor) -> Tensor:
    if x.ndim != 4:
        return x.clone() if x.is_inference() else x.contiguous()
    if x.is_inference() or x.requires_grad or not x.is_contiguous(memory_format=torch.channels_last):
        return x.detach().clone(memory_format=torch.channels_last)
    return x


def _own_code(module: nn.Module) -> Callable[..., Any]:
    """The module behind a function whose code nothing else has: programs are kept by code, a few for each."""

    def run(*inputs: Tensor) -> Any:  # noqa: ANN401
        return module(*inputs)

    run.__code__ = run.__code__.replace(co_name=f"part_{id(run)}")
    return run


def _form(*inputs: Tensor) -> tuple[object, ...]:
    threads = f"{torch.get_num_threads()} threads"  # of them, too, a program is made for one number
    return (*((tuple(x.shape), x.dtype, x.device) for x in inputs), threads)


BACKEND = _Inductor()
