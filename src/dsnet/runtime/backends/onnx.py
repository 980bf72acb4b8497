"""ONNX Runtime on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dsnet.errors import install_hint
from dsnet.runtime.backends.base import Backend, Executable, register_backend

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@register_backend("onnxruntime")
class OnnxRuntimeBackend(Backend):
    """Export segments to ONNX and run them by ONNX Runtime."""

    batch_invariant = True
    invariant_logits = True

    def unavailable(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Require the extra, a CPU and float32."""
        if any(importlib.util.find_spec(package) is None for package in PACKAGES):
            return f"it is not installed: {install_hint('export')}"
        if device.type != "cpu":
            return f"it runs on the CPU here, not on {device.type}"
        return None if precision == torch.float32 else f"it runs float32 here, not {precision}"

    def compile(self, module: nn.Module, *examples: Tensor) -> Executable:
        """Return a session for all batch sizes."""
        return _Session(_to_onnx(module, *examples))


class _Session(Executable):
    def __init__(self, data: bytes) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        # Threads that wait busily would hold the cores that the next segment's session needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.names = [entry.name for entry in self.session.get_inputs()]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        arrays = (x.contiguous().numpy() for x in inputs)
        outputs = self.session.run(None, dict(zip(self.names, arrays, strict=True)))
        return tuple(torch.from_numpy(array) for array in outputs)


def _to_onnx(module: nn.Module, *examples: Tensor) -> bytes:
    """Export a module for any batch size and return the bytes of the ONNX file."""
    batch = torch.export.Dim("batch", min=1, max=2**20)
    # A batch size of 1 would be exported as a constant.
    several = tuple(x if len(x) > 1 else torch.cat([x, x]) for x in examples)
    with _quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            several,
            dynamo=True,
            dynamic_shapes=tuple({0: batch} for _ in several),
            verbose=False,
            optimize=True,
        )
    assert program is not None
    data: bytes = program.model_proto.SerializeToString()
    return data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's output and deprecation warnings."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
