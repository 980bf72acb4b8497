"""`torch.compile`, weights frozen into the program."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError
from dsnet.runtime.backends.base import Backend, Executable, register_backend

__all__ = ["AnyBatch"]


@register_backend("inductor")
class InductorBackend(Backend):
    """Compile with `torch.compile`: on a CPU for one batch size, on a GPU for all."""

    buckets = (1, 8)  # compiling takes several seconds each

    def any_batch(self, device: torch.device) -> bool:
        """Return True on a GPU; on a CPU, programs for one batch size are faster."""
        return device.type == "cuda"

    def captures(self, device: torch.device) -> bool:
        """Return True on a GPU."""
        return device.type == "cuda"

    def unavailable(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Require a C++ compiler on a CPU."""
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "it needs a C++ compiler: install g++"
        return None

    def compile(self, module: nn.Module, *examples: Tensor) -> Executable:
        """Compile for the strides, types and number of threads of the examples."""
        if self.any_batch(examples[0].device):
            return AnyBatch(module.to(memory_format=torch.channels_last), *examples)  # type: ignore[call-overload]
        return _OneBatchSize(module, *examples)


class _OneBatchSize(Executable):
    """A program for one batch size; other inputs are an error, never a recompilation."""

    def __init__(self, module: nn.Module, *examples: Tensor) -> None:
        self.signature, self.strides = _signature(*examples), [example.stride() for example in examples]
        self.call = _compile(module, examples, dynamic=False)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        # One kind of tensor in one mode: each would otherwise be a program of its own.
        with torch.inference_mode(False), torch.no_grad():
            if _signature(*inputs) != self.signature:
                raise DsnetError(
                    f"this program was compiled for {self.signature}, not for {_signature(*inputs)}"
                )
            same = [_like(x, strides) for x, strides in zip(inputs, self.strides, strict=True)]
            outputs = self.call(*same)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def _like(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.is_inference() or x.requires_grad or x.stride() != strides:
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)
    return x


class AnyBatch(Executable):
    """A program for any number of images, channels last; one image runs as two."""

    def __init__(self, module: nn.Module, *examples: Tensor) -> None:
        self.forms = [(x.shape[1:], x.dtype) for x in examples]
        inputs = [_channels_last(x[:1].expand(4, *x.shape[1:])) for x in examples]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)  # the number of images alone
        self.call = _compile(module, inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run images of the compiled shape."""
        if [(x.shape[1:], x.dtype) for x in inputs] != self.forms:
            forms = [(list(x.shape[1:]), x.dtype) for x in inputs]
            raise DsnetError(f"this program takes images of {self.forms}, not of {forms}")
        count = len(inputs[0])
        with torch.inference_mode(False), torch.no_grad():
            if count < 2:
                inputs = tuple(torch.cat([x, x.new_zeros(2 - count, *x.shape[1:])]) for x in inputs)
            outputs = self.call(*(_channels_last(x) for x in inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs if count > 1 else tuple(y[:count] for y in outputs)


def _channels_last(x: Tensor) -> Tensor:
    if x.ndim != 4:
        return x.clone() if x.is_inference() else x.contiguous()
    if x.is_inference() or x.requires_grad or not x.is_contiguous(memory_format=torch.channels_last):
        return x.detach().clone(memory_format=torch.channels_last)
    return x


def _compile(
    module: nn.Module, inputs: Sequence[Tensor], *, dynamic: bool | None = None
) -> Callable[..., Any]:
    from torch._inductor import config  # slow to import

    def run(*inputs: Tensor) -> Any:  # noqa: ANN401
        return module(*inputs)

    # torch keeps a few programs for each code object: a name of its own makes this one different.
    run.__code__ = run.__code__.replace(co_name=f"segment_{id(run)}")
    program: Callable[..., Any] = torch.compile(run, fullgraph=True, dynamic=dynamic)
    with torch.no_grad(), config.patch(freezing=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        program(*inputs)
    return program


def _signature(*inputs: Tensor) -> tuple[object, ...]:
    threads = f"{torch.get_num_threads()} threads"  # a program is compiled for one number of threads, too
    return (*((tuple(x.shape), x.dtype, x.device) for x in inputs), threads)
