"""ONNX Runtime on the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from dsnet.errors import install_hint

__all__ = ["BACKEND", "to_onnx"]

NEEDS = ("onnx", "onnxscript", "onnxruntime")


class _OnnxRuntime:
    name = "onnxruntime"
    batch_invariant = True
    invariant_logits = True
    buckets = (1, 2, 4, 8, 16)

    def any_batch(self, device: torch.device) -> bool:
        """All sizes."""
        return True

    def recorded(self, device: torch.device) -> bool:
        """No."""
        return False

    def missing(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Its extra, the CPU, and float32."""
        if any(importlib.util.find_spec(name) is None for name in NEEDS):
            return f"it is not installed: {install_hint('export')}"
        if device.type != "cpu":
            return f"it runs on the CPU here, not on {device.type}"
        return None if precision == torch.float32 else f"it runs float32 here, not {precision}"

    def convert(self, module: nn.Module, *examples: Tensor) -> Callable[..., _Session]:
        """One session for any number of images."""
        session = _Session(to_onnx(module, *examples))
        return lambda *examples: session


class _Session:
    def __init__(self, data: bytes) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        # Threads that wait busily would hold the cores which the next part's session needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.names = [given.name for given in self.session.get_inputs()]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = (x.contiguous().numpy() for x in inputs)
        found = self.session.run(None, dict(zip(self.names, given, strict=True)))
        return tuple(torch.from_numpy(array) for array in found)


def to_onnx(module: nn.Module, *examples: Tensor) -> bytes:
    """The module as an ONNX file in memory, for any number of images."""
    batch = torch.export.Dim("batch", min=1, max=2**20)
    # One image would be taken for a constant.
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
    made: bytes = program.model_proto.SerializeToString()
    return made


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks to the terminal and warns of its own future."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


BACKEND = _OnnxRuntime()
