"""Plans that tests of the runtime share: making them takes longer than asking them."""

from __future__ import annotations

import copy
import functools
import importlib.util

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet import runtime
from dsnet.runtime.plan import Plan
from tests.support import images, random_model, spread_gates

NEEDS = {"openvino": "openvino", "onnxruntime": "onnxscript"}


@functools.cache
def network(name: str, dtype: torch.dtype = torch.float32, bn_key: str | None = None) -> dsnet.Supernet:
    """A randomised network whose gates decide differently from image to image."""
    options = {} if bn_key is None else {"bn_key": bn_key}
    model = copy.deepcopy(random_model(name, dtype, **options))
    return spread_gates(model, pictures(model, 64))


def pictures(model: dsnet.Supernet, count: int, seed: int = 1) -> Tensor:
    """Images of the size that the network is made for."""
    return images(model, count, size=model.geometry.image_size, seed=seed)


@functools.cache
def plan_of(name: str, backend: str, memory: runtime.Memory = "packed") -> Plan:
    """A plan in float32 with programs for batches of 1 and 4."""
    if backend in NEEDS and importlib.util.find_spec(NEEDS[backend]) is None:
        pytest.skip(f"{NEEDS[backend]} is not installed")
    return runtime.compile(network(name), backend=backend, memory=memory, batch_buckets=(1, 4))
