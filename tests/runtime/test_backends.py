"""Programs of backends: made once, and what becomes of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from dsnet import runtime
from dsnet.runtime.backends.inductor import AnyBatch
from dsnet.runtime.partition.segments import pack
from tests.support import assert_close, error_of
from tests.support.networks import network, pictures

pytestmark = pytest.mark.xdist_group("plans")  # they share plans, which take seconds to make


def test_signals_are_handled_after_plans_are_deleted() -> None:
    """OpenVINO sets up a signal stack, which must outlive a plan. Runs in a separate process."""
    pytest.importorskip("openvino")
    code = """
import gc, os, signal, torch, dsnet
from dsnet import runtime
model = dsnet.create_model("ds_mbnet_tiny").eval()
for number in range(2):
    plan = runtime.compile(model, backend="openvino", batch_buckets=(1,), routes=[number])
    del plan
gc.collect()
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
"""
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert actual.returncode == 0, actual.stderr[-2000:]
    assert actual.stdout == "handled\n"


@pytest.mark.parametrize(("numbers", "copied"), [(2**18, True), (2**18 + 1, False)])
def test_openvino_copies_tensors_of_up_to_a_megabyte(numbers: int, copied: bool) -> None:
    pytest.importorskip("openvino")
    backend, x = runtime.get_backend("openvino"), torch.linspace(-1, 1, numbers)[None]
    program: Any = backend.compile(backend.prepare(nn.ReLU(), x), x)
    for images in (x, -x):
        assert torch.equal(program(images)[0], images.relu())
    request = program.local.request
    assert [buffer is not None for buffer in (*request.inputs, *request.outputs)] == [copied, copied]


def test_inductor_needs_a_compiler_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, cpu = runtime.get_backend("inductor"), torch.device("cpu")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install g++" in str(backend.unavailable(cpu, torch.float32))
    assert backend.unavailable(torch.device("cuda"), torch.float32) is None
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "clang++" else None)
    assert backend.unavailable(cpu, torch.float32) is None


@pytest.mark.slow
def test_compiled_programs_are_not_recompiled() -> None:
    from torch._dynamo.utils import counters

    model = network("ds_mbnet_tiny")
    if (
        reason := runtime.get_backend("inductor").unavailable(torch.device("cpu"), torch.float32)
    ) is not None:
        pytest.skip(reason)
    plan = runtime.compile(model, backend="inductor", batch_buckets=(1, 2), routes=[0, 3])
    assert plan.network.num_programs == 3 * 2
    made = counters["stats"]["unique_graphs"]
    for count in (1, 2, 5):
        x = pictures(model, count)
        for route in (0, 3):
            assert_close(plan(x, route), model(x, route), 1e-4)
            with torch.inference_mode():
                assert_close(plan(x + 0, route), model(x, route), 1e-4)
                last = x.contiguous(memory_format=torch.channels_last).clone()
                assert_close(plan(last, route), model(x, route), 1e-4)
            with torch.autocast("cpu", torch.bfloat16):
                plan(x, route)
    many = pictures(model, 40)
    for step in range(2, 13):
        plan(many[::step][1:2], 0)
    assert counters["stats"]["unique_graphs"] == made
    assert "compiled for" in error_of(lambda: plan.network.segments[()].executables[1](pictures(model, 2)))


def test_one_program_takes_any_batch_size() -> None:
    """As on a GPU, where the program is then captured for some batch sizes."""
    model = network("three_gates")
    part = pack(model, [model.gate(g).choices for g in range(3)])[0, 1, 2]
    x, which = part.example(7, torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    program = AnyBatch(part.module, x[:2], which[:2])
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert program(x[:0], which[:0])[0].shape == (0, 10)
    for count in (7, 1, 2, 3, 5):
        (actual,) = program(x[:count], which[:count])
        assert_close(actual, part.module(x[:count], which[:count]), 1e-4)
    with torch.inference_mode():
        assert_close(program(x.clone(), which.clone())[0], part.module(x, which), 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made
    assert "takes images" in error_of(lambda: program(x[:, :-1], which))


def test_logits_do_not_depend_on_torch_defaults() -> None:
    pytest.importorskip("openvino")
    model = network("ds_mbnet_tiny")
    plan = runtime.compile(model, backend="openvino", batch_buckets=[1, 2], routes=[0])
    x = pictures(model, 3)
    expected = plan(x, 0)
    torch.set_default_dtype(torch.float64)
    try:
        actual = plan(x, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        alike = plan(x, 0)
    for got in (actual, alike):
        assert got.dtype == torch.float32
        assert_close(got, expected, 1e-6)
