"""OpenVINO on the CPU.

With bfloat16, inputs and weights are float32 and logits are bfloat16. A program has one precision for all its
layers, so segments that end at a gate stay in float32, in which gates decide.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dsnet.errors import install_hint
from dsnet.runtime.backends.base import Backend, Executable, WritingExecutable, register_backend

COPIED = 2**20  # bytes up to which inputs and outputs are copied


@register_backend("openvino")
class OpenVinoBackend(Backend):
    """Convert segments to OpenVINO once and compile them for each batch size."""

    batch_invariant = True
    input_dtype = torch.float32

    def any_batch(self, device: torch.device) -> bool:
        """Return False: programs for one batch size are faster."""
        return False

    def unavailable(self, device: torch.device, precision: torch.dtype) -> str | None:
        """Require the extra, a CPU, and float32 or a processor that computes in bfloat16."""
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

    def prepare(self, module: nn.Module, *examples: Tensor) -> _Converted:
        """Convert a module; its precision is that of the examples, its inputs are float32."""
        import openvino as ov

        low = examples[0].dtype == torch.bfloat16
        if low:
            module = copy.deepcopy(module).float()
            examples = tuple(x.float() if x.is_floating_point() else x for x in examples)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecation warnings of tracing
            model = ov.convert_model(module, example_input=examples if len(examples) > 1 else examples[0])
        return _Converted(model, torch.bfloat16 if low and len(model.outputs) == 1 else torch.float32)

    def compile(self, module: _Converted, *examples: Tensor) -> Executable:
        """Compile for the batch size of the examples."""
        shapes = zip(module.model.inputs, examples, strict=True)
        module.model.reshape({port: list(example.shape) for port, example in shapes})
        return _Program(*module)


class _Converted(NamedTuple):
    model: Any  # OpenVINO has no types
    precision: torch.dtype


@functools.cache
def _core() -> Any:  # noqa: ANN401  (OpenVINO has no types)
    """Return the only core: each sets up a signal stack, and deleting one of several leaves a stale one."""
    import openvino as ov

    return ov.Core()


class _Program(WritingExecutable):
    def __init__(self, model: Any, precision: torch.dtype) -> None:  # noqa: ANN401  (OpenVINO has no types)
        import openvino as ov

        settings = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "bf16" if precision == torch.bfloat16 else "f32",
        }
        self.compiled = _core().compile_model(model, "CPU", settings)
        self.shapes = tuple(tuple(output.shape) for output in self.compiled.outputs)
        self.dtypes = (precision,) * len(self.shapes)
        self.tensor = ov.Tensor
        self.local = threading.local()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        kinds = zip(self.shapes, self.dtypes, strict=True)
        outputs = tuple(torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds)
        self.into(inputs, outputs)
        return outputs

    def into(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        request: _Request | None = getattr(self.local, "request", None)  # one request serves one thread
        if request is None:
            request = self.local.request = _Request.of(self.compiled, self.dtypes)
        # Memory at a new address costs a request about as much as copying a megabyte. numpy copies, because
        # torch's threads would then wait busily on the cores that the program needs.
        for i, (x, buffer) in enumerate(zip(inputs, request.inputs, strict=True)):
            array = _array(x)
            if buffer is None:
                request.request.set_input_tensor(i, self.tensor(array, shared_memory=True))
            else:
                np.copyto(buffer, array)
        for i, (output, buffer) in enumerate(zip(outputs, request.outputs, strict=True)):
            if buffer is None:
                request.request.set_output_tensor(i, self.tensor(output.numpy(), shared_memory=True))
        request.request.infer()
        for output, buffer in zip(outputs, request.outputs, strict=True):
            if output.dtype == torch.bfloat16:
                output.copy_(torch.from_numpy(buffer))
            elif buffer is not None:
                np.copyto(output.numpy(), buffer)


def _array(x: Tensor) -> Any:  # noqa: ANN401
    return (x.float() if x.dtype == torch.bfloat16 else x).contiguous().numpy()


class _Request(NamedTuple):
    """An inference request with its buffers; None where a large float32 tensor is used without a copy."""

    request: Any
    inputs: list[Any]
    outputs: list[Any]

    @classmethod
    def of(cls, compiled: Any, dtypes: Sequence[torch.dtype]) -> _Request:  # noqa: ANN401
        request = compiled.create_infer_request()
        inputs = [request.get_input_tensor(i) for i in range(len(compiled.inputs))]
        outputs = [request.get_output_tensor(i) for i in range(len(compiled.outputs))]
        return cls(
            request,
            [t.data if t.byte_size <= COPIED else None for t in inputs],
            [
                t.data if t.byte_size <= COPIED or dtype != torch.float32 else None
                for t, dtype in zip(outputs, dtypes, strict=True)
            ],
        )
