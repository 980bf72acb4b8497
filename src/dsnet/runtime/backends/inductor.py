"""`torch.compile`, weights frozen into the program."""

from __future__ import annotations

import shutil
import warnings

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError

__all__ = ["BACKEND"]


class _Inductor:
    name = "inductor"
    any_batch = False

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """The host's programs need a C++ compiler."""
        if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            return "it needs a C++ compiler: install g++"
        return None

    def make(self, module: nn.Module, example: Tensor) -> _Compiled:
        """A program for inputs of exactly this form: another one is an error, never a recompilation."""
        return _Compiled(module, example)


class _Compiled:
    def __init__(self, module: nn.Module, example: Tensor) -> None:
        from torch._inductor import config  # slow to import

        self.form = _form(example)
        # A wrapper of its own for every part: programs are kept by the code that they were made from.
        self.call = torch.compile(module, fullgraph=True, dynamic=False)
        with torch.no_grad(), config.patch(freezing=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            self.call(example)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.contiguous()
        if _form(x) != self.form:
            raise DsnetError(f"this program was compiled for {self.form}, not for {_form(x)}")
        with torch.no_grad():
            found = self.call(x)
        return found if isinstance(found, tuple) else (found,)


def _form(x: Tensor) -> tuple[object, ...]:
    return tuple(x.shape), x.dtype, x.device


BACKEND = _Inductor()
