"""OpenVINO on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["BACKEND"]

COPIED = 2**20  # bytes up to which inputs and outputs are copied


class _OpenVino:
    name = "openvino"
    buckets = (1, 2, 4, 8, 16)

    def any_batch(self, device: torch.device) -> bool:
        """Programs of one size are the faster ones."""
        return False

    def recorded(self, device: torch.device) -> bool:
        """No."""
        return False

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Its extra, the CPU, and float32."""
        if importlib.util.find_spec("openvino") is None:
            return "it is not installed: pip install 'dsnet[openvino]'"
        if device.type != "cpu":
            return f"it runs on the CPU here, not on {device.type}"
        return None if precision == torch.float32 else f"it runs float32 here, not {precision}"

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., _Program]:
        """A program for every batch size."""
        import openvino as ov

        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # tracing warns of its own future
            model = ov.convert_model(module, example_input=examples if len(examples) > 1 else examples[0])

        def make(*examples: Tensor) -> _Program:
            shapes = zip(model.inputs, examples, strict=True)
            model.reshape({port: list(example.shape) for port, example in shapes})
            return _Program(model)

        return make


@functools.cache
def _core() -> Any:  # noqa: ANN401  (OpenVINO has no types)
    """One for all: each sets up a stack for signals, and of several the last leaves one that is gone."""
    import openvino as ov

    return ov.Core()


class _Program:
    def __init__(self, model: Any) -> None:  # noqa: ANN401  (OpenVINO has no types)
        import openvino as ov

        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",  # not what the processor would rather have
        }
        self.compiled = _core().compile_model(model, "CPU", settings)
        self.shapes = tuple(tuple(output.shape) for output in self.compiled.outputs)
        self.tensor = ov.Tensor
        self.own = threading.local()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        found = tuple(torch.empty(shape, dtype=torch.float32, device="cpu") for shape in self.shapes)
        self.into(inputs, found)
        return found

    def into(self, inputs: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Runs it and writes what it gives into these."""
        own: _Request | None = getattr(self.own, "request", None)  # one serves one thread
        if own is None:
            own = self.own.request = _Request.of(self.compiled)
        # New memory costs a request about as much as copying a megabyte. numpy copies: threads of torch would
        # wait busily afterwards, on the cores that the program needs.
        for i, (x, room) in enumerate(zip(inputs, own.inputs, strict=True)):
            given = x.contiguous().numpy()
            if room is None:
                own.request.set_input_tensor(i, self.tensor(given, shared_memory=True))
            else:
                np.copyto(room, given)
        for i, (output, room) in enumerate(zip(found, own.outputs, strict=True)):
            if room is None:
                own.request.set_output_tensor(i, self.tensor(output.numpy(), shared_memory=True))
        own.request.infer()
        for output, room in zip(found, own.outputs, strict=True):
            if room is not None:
                np.copyto(output.numpy(), room)


class _Request(NamedTuple):
    """What runs a program, with its memory for inputs and outputs; none for large ones."""

    request: Any
    inputs: list[Any]
    outputs: list[Any]

    @classmethod
    def of(cls, compiled: Any) -> _Request:  # noqa: ANN401  (OpenVINO has no types)
        request = compiled.create_infer_request()
        inputs = [request.get_input_tensor(i) for i in range(len(compiled.inputs))]
        outputs = [request.get_output_tensor(i) for i in range(len(compiled.outputs))]
        small = [[t.data if t.byte_size <= COPIED else None for t in own] for own in (inputs, outputs)]
        return cls(request, *small)


BACKEND = _OpenVino()
