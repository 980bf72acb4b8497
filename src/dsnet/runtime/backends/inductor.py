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

__all__ = ["BACKEND"]


class _Inductor:
    name = "inductor"
    any_batch = False
    buckets = (1, 8)  # a program takes several seconds to make

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """The host's programs need a C++ compiler."""
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "it needs a C++ compiler: install g++"
        return None

    def convert(self, module: nn.Module, example: Tensor) -> Callable[[Tensor], _Compiled]:
        """Programs for inputs of exactly one form: another one is an error, never a recompilation."""
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
