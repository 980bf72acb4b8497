"""A sandwich step keeps one network's activations at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import dsnet
from dsnet.training import Average, Scheme, Stage1
from tests.support import images


class Saved:
    """Bytes of the activations that autograd keeps, and the most of them at any time."""

    def __init__(self, parameters: set[int]) -> None:
        self.parameters, self.now, self.peak = parameters, 0, 0

    def pack(self, tensor: torch.Tensor) -> object:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.parameters:
            return tensor
        return _Kept(self, tensor)

    def unpack(self, kept: object) -> torch.Tensor:
        return kept.tensor if isinstance(kept, _Kept) else kept


class _Kept:
    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        self.bytes = tensor.numel() * tensor.element_size()
        saved.now += self.bytes
        saved.peak = max(saved.peak, saved.now)

    def __del__(self) -> None:
        self.saved.now -= self.bytes


def peak(model: dsnet.Supernet, work: Callable[[], object]) -> int:
    saved = Saved({p.untyped_storage().data_ptr() for p in model.parameters()})
    with saved_tensors_hooks(saved.pack, saved.unpack):
        work()
    assert saved.now == 0
    return saved.peak


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_plus_tiny", "ds_vit_plus_tiny"])
@pytest.mark.parametrize("scheme", ["e-ib", "ib+mvco"])
def test_a_step_needs_the_activations_of_its_largest_network(name: str, scheme: str) -> None:
    model = dsnet.create_model(name).train()
    x, labels = images(model, 16).float(), torch.arange(16) % 10
    parsed = Scheme.parse(scheme)
    stage = Stage1(scheme=parsed, average=Average(model))
    routes = parsed.draw(model.space, 2, torch.Generator().manual_seed(0))
    views = [x] * parsed.views(len(routes))

    def alone() -> None:
        torch.nn.functional.cross_entropy(model(x, model.space.largest), labels).backward()

    largest = peak(model, alone)
    assert largest > 100_000
    assert peak(model, lambda: stage.step(model, routes, views, labels)) <= 1.1 * largest
