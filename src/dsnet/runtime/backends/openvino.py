"""OpenVINO on the CPU.

In bfloat16 it computes so where the processor can; what goes in and out is float32, but for logits. It knows
no exceptions for some layers, so that parts that end at a gate stay in float32: gates decide in that.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dsnet.errors import install_hint

__all__ = ["BACKEND"]

COPIED = 2**20  # bytes up to which inputs and outputs are copied


class _OpenVino:
    name = "openvino"
    batch_invariant = True
    invariant_logits = False
    buckets = (1, 2, 4, 8, 16)
    weights = torch.float32

    def any_batch(self, device: torch.device) -> bool:
        """Programs of one size are the faster ones."""
        return False

    def recorded(self, device: torch.device) -> bool:
        """No."""
        return False

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Its extra, the CPU, and float32."""
        if importlib.util.find_spec("openvino") is None:
            return f"it is not installed: {install_hint('openvino')}"
        if device.type != "cpu":
            return f"it runs on the CPU here, not on {device.type}"
        if precision not in (torch.float32, torch.bfloat16):
            return f"it runs float32 or bfloat16 here, not {precision}"
        if precision == torch.bfloat16 and "BF16" not in _core().get_property(
            "CPU", "OPTIMIZATION_CAPABILITIES"
        ):
            return "this processor has no instructions for bfloat16; possible: float32"
        return None

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., _Program]:
        """A program for every batch size."""
        import openvino as ov

        half = examples[0].dtype == torch.bfloat16
        if half:
            module = copy.deepcopy(module).float()
            examples = tuple(x.float() if x.is_floating_point() else x for x in examples)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # tracing warns of its own future
            model = ov.convert_model(module, example_input=examples if len(examples) > 1 else examples[0])

        def make(*examples: Tensor) -> _Program:
            shapes = zip(model.inputs, examples, strict=True)
            model.reshape({port: list(example.shape) for port, example in shapes})
            return _Program(model, torch.bfloat16 if half and len(model.outputs) == 1 else torch.float32)

        return make


@functools.cache
def _core() -> Any:  # noqa: ANN401  (OpenVINO has no types)
    """One for all: each sets up a stack for signals, and of several the last leaves one that is gone."""
    import openvino as ov

    return ov.Core()


class _Program:
    takes = torch.float32

    def __init__(self, model: Any, precision: torch.dtype) -> None:  # noqa: ANN401  (OpenVINO has no types)
        import openvino as ov

        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "bf16" if precision == torch.bfloat16 else "f32",  # and no other
        }
        self.compiled = _core().compile_model(model, "CPU", settings)
        self.shapes = tuple(tuple(output.shape) for output in self.compiled.outputs)
        self.dtypes = (precision,) * len(self.shapes)
        self.tensor = ov.Tensor
        self.own = threading.local()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        kinds = zip(self.shapes, self.dtypes, strict=True)
        found = tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds)
        self.into(inputs, found)
        return found

    def into(self, inputs: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Runs it and writes what it gives into these."""
        own: _Request | None = getattr(self.own, "request", None)  # one serves one thread
        if own is None:
            own = self.own.request = _Request.of(self.compiled, self.dtypes)
        # New memory costs a request about as much as copying a megabyte. numpy copies: threads of torch would
        # wait busily afterwards, on the cores that the program needs.
        for i, (x, room) in enumerate(zip(inputs, own.inputs, strict=True)):
            given = _array(x)
            if room is None:
                own.request.set_input_tensor(i, self.tensor(given, shared_memory=True))
            else:
                np.copyto(room, given)
        for i, (output, room) in enumerate(zip(found, own.outputs, strict=True)):
            if room is None:
                own.request.set_output_tensor(i, self.tensor(output.numpy(), shared_memory=True))
        own.request.infer()
        for output, room in zip(found, own.outputs, strict=True):
            if output.dtype == torch.bfloat16:
                output.copy_(torch.from_numpy(room))
            elif room is not None:
                np.copyto(output.numpy(), room)


def _array(x: Tensor) -> Any:  # noqa: ANN401
    """As numbers that numpy has."""
    return (x.float() if x.dtype == torch.bfloat16 else x).contiguous().numpy()


class _Request(NamedTuple):
    """What runs a program, with its memory for inputs and outputs; none for large ones in float32."""

    request: Any
    inputs: list[Any]
    outputs: list[Any]

    @classmethod
    def of(cls, compiled: Any, dtypes: Sequence[torch.dtype]) -> _Request:  # noqa: ANN401
        request = compiled.create_infer_request()
        inputs = [request.get_input_tensor(i) for i in range(len(compiled.inputs))]
        outputs = [request.get_output_tensor(i) for i in range(len(compiled.outputs))]
        cast = [dtype != torch.float32 for dtype in dtypes]
        return cls(
            request,
            [t.data if t.byte_size <= COPIED else None for t in inputs],
            [t.data if t.byte_size <= COPIED or own else None for t, own in zip(outputs, cast, strict=True)],
        )


BACKEND = _OpenVino()
