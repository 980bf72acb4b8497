"""OpenVINO on the CPU."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BACKEND"]


class _OpenVino:
    name = "openvino"
    any_batch = False  # programs of one size are the faster ones

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Its extra, the CPU, and float32."""
        if importlib.util.find_spec("openvino") is None:
            return "it is not installed: pip install 'dsnet[openvino]'"
        if device.type != "cpu":
            return f"it runs on the CPU here, not on {device.type}"
        return None if precision == torch.float32 else f"it runs float32 here, not {precision}"

    def make(self, module: nn.Module, example: Tensor) -> _Program:
        """A program for this batch size."""
        return _Program(module, example)


class _Program:
    def __init__(self, module: nn.Module, example: Tensor) -> None:
        import openvino as ov

        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # tracing warns of its own future
            model = ov.convert_model(module, example_input=example)
        model.reshape(list(example.shape))
        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",  # not what the processor would rather have
        }
        self.compiled = ov.Core().compile_model(model, "CPU", settings)
        self.own = threading.local()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        request: Any = getattr(self.own, "request", None)  # a request serves one thread
        if request is None:
            request = self.own.request = self.compiled.create_infer_request()
        found = request.infer([x.contiguous().numpy()], share_inputs=True, share_outputs=False)
        return tuple(torch.from_numpy(found[i]) for i in range(len(self.compiled.outputs)))


BACKEND = _OpenVino()
