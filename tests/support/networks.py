"""Plans that tests of the runtime share: making them takes longer than asking them."""

from __future__ import annotations

import copy
import functools
import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.models import Factory
from dsnet.models.options import ConvOptions
from dsnet.models.resnet import DS_RESNET_TINY, ResNet
from dsnet.models.supernet import ModelSpec
from dsnet.routes import Slice
from dsnet.runtime.plan import Plan
from tests.support import images, random_model, randomise, spread_gates

NEAR = 1e-4  # scores closer than this may be decided either way in float32
NEEDS = {"openvino": "openvino", "onnxruntime": "onnxscript"}


@functools.cache
def network(name: str, dtype: torch.dtype = torch.float32, bn_key: str | None = None) -> dsnet.Supernet:
    """A randomised network whose gates decide differently from image to image."""
    if name == "three_gates":
        model = three_gates(dtype, bn_key or "prefix")
    else:
        options = {} if bn_key is None else {"bn_key": bn_key}
        model = copy.deepcopy(random_model(name, dtype, **options))
    return spread_gates(model, pictures(model, 64))


def three_gates(dtype: torch.dtype, bn_key: str) -> dsnet.Supernet:
    """A DS-ResNet with 3 × 4 choices: the last stage's norms depend on a choice that its weights do not."""
    slices = tuple(
        tuple(
            (Slice(width=width * n // 4, depth=1, hidden=width * n // 16, kernel=3, padding=1),)
            for n in (1, 2, 3, 4)
        )
        for width in (64, 64, 128)
    )
    table = replace(DS_RESNET_TINY, strides=(1, 1, 2), slices=slices)
    options = ConvOptions(num_classes=10, bn_key=bn_key)
    model = ResNet("three_gates", table, options, Factory(device=None, dtype=dtype)).eval()
    model.spec = ModelSpec(name="three_gates", options=())
    randomise(model)
    return model.requires_grad_(False)


def pictures(model: dsnet.Supernet, count: int, seed: int = 1) -> Tensor:
    """Images of the size that the network is made for."""
    return images(model, count, size=model.input_spec.image_size, seed=seed)


def plan_of(name: str, backend: str, memory: runtime.Memory = "packed") -> Plan:
    """A plan in float32 with programs for batches of 1 and 4."""
    return _plan_of(name, backend, memory)


@functools.cache
def _plan_of(name: str, backend: str, memory: runtime.Memory) -> Plan:
    if backend in NEEDS and importlib.util.find_spec(NEEDS[backend]) is None:
        pytest.skip(f"{NEEDS[backend]} is not installed")
    return runtime.compile(network(name), backend=backend, memory=memory, batch_buckets=(1, 4))


def sure_rows(model: dsnet.Supernet, x: Tensor) -> Tensor:
    """Images whose gates do not waver between backends."""
    sure = torch.ones(len(x), dtype=torch.bool)
    for i in range(len(x)):
        state, taken = model.run_prefix(x[i : i + 1]), ()
        for gate in range(len(model.gates)):
            if gate:
                state = model.run_segment(state, taken)
            best = model.gate_scores(state)[0].topk(2)
            sure[i] &= bool(best[0][0] - best[0][1] > NEAR)
            taken = (*taken, model.gate(gate).choices[int(best[1][0])])
    return sure
