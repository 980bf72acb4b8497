"""OpenVINO on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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
        found = tuple(torch.empty(shape) for shape in self.shapes)
        self.into(inputs, found)
        return found

    def into(self, inputs: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Runs it and writes what it gives into these."""
        request: Any = getattr(self.own, "request", None)  # a request serves one thread
        if request is None:
            request = self.own.request = self.compiled.create_infer_request()
        # New memory costs a request about as much as copying a megabyte. numpy copies: threads of torch would
        # wait busily afterwards, on the cores that the program needs.
        for i, x in enumerate(inputs):
            given = x.contiguous().numpy()
            if given.nbytes > COPIED:
                request.set_input_tensor(i, self.tensor(given, shared_memory=True))
            else:
                np.copyto(request.get_input_tensor(i).data, given)
        large = [i for i, output in enumerate(found) if output.nbytes > COPIED]
        for i in large:
            request.set_output_tensor(i, self.tensor(found[i].numpy(), shared_memory=True))
        request.infer()
        for i, output in enumerate(found):
            if i not in large:
                np.copyto(output.numpy(), request.get_output_tensor(i).data)


BACKEND = _OpenVino()
