"""Plans of converted networks, on every backend for the CPU."""

from __future__ import annotations

import pytest

import dsnet
from dsnet import runtime
from tests.support import assert_close, spread_gates
from tests.support.small_networks import SMALL_NETWORKS, random_images, randomise_module


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino"])
@pytest.mark.parametrize("name", ["plain", "residual"])
def test_a_plan_of_a_converted_network_equals_it(name: str, backend: str) -> None:
    """In a mixed batch, outside a margin of the gate's scores, which `spread_gates` keeps apart."""
    small = SMALL_NETWORKS[name]
    network = randomise_module(small.full(), seed=1).float().eval()
    model = dsnet.convert(network, random_images(1).float(), widths=(0.5, 1.0), gate=small.gate)
    model.requires_grad_(False)
    x = random_images(6).float()
    spread_gates(model, x)
    assert len(set(model.route(x).flatten().tolist())) > 1
    assert_close(runtime.compile(model, backend=backend)(x), model(x), 1e-4)
