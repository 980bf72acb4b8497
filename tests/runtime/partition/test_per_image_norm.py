"""Norms by each image's own history, with what follows them, against the modules that they were made from."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

from dsnet.runtime.partition.per_image_norm import Affine, by_history
from tests.support import assert_close, randomise

ACTS = {"none": nn.Identity(), "relu": nn.ReLU(), "silu": nn.SiLU(), "hard_swish": nn.Hardswish()}


class _Net(nn.Module):
    """Norms: alone, with an activation, with a residual and an activation, and with two readers."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), act)
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.shortcut = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.act, self.norm, self.twice = act, nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = self.act(self.second(y) + self.shortcut(y))
        y = self.twice(self.norm(y))
        return y + self.act(y)


@functools.cache
def networks(act: str) -> list[_Net]:
    made = []
    for seed in range(3):
        torch.manual_seed(0)
        net = _Net(ACTS[act]).double()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                torch.manual_seed(10 + seed)
                for tensor in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                    tensor.copy_(0.5 + torch.rand(8))  # type: ignore[union-attr]
        made.append(net.eval())
    return made


@pytest.mark.parametrize("act", ["relu", "silu", "hard_swish"])
def test_every_image_is_normalised_by_its_history(act: str) -> None:
    made, whole = networks(act), by_history(networks(act))
    norms = [module for module in whole.modules() if isinstance(module, Affine)]
    assert len(norms) == 5
    assert sum(norm.act is not None for norm in norms) == 2  # behind the first, and behind the sum
    x, which = torch.randn(5, 3, 6, 6, dtype=torch.float64), torch.tensor([2, 0, 1, 1, 2])
    with torch.no_grad():
        actual = whole(x, which)
        assert_close(actual, torch.cat([made[w](x[i : i + 1]) for i, w in enumerate(which.tolist())]), 1e-12)


def test_outputs_with_several_readers_are_kept() -> None:
    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.act(y) + y

    net = Read().eval()
    randomise(net)
    whole = by_history([net])
    assert whole.norm.act is None
    x = torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        assert_close(whole(x, torch.zeros(2, dtype=torch.long)), net(x), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", ["relu", "silu", "hard_swish"])
def test_on_a_gpu(act: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    whole = by_history(copy.deepcopy(networks(act))).cuda().to(dtype).to(memory_format=torch.channels_last)
    x, which = torch.randn(5, 3, 6, 6, dtype=torch.float64), torch.tensor([2, 0, 1, 1, 2])
    with torch.no_grad():
        expected = by_history(networks(act))(x, which)
        given = x.cuda().to(dtype).to(memory_format=torch.channels_last)
        actual = whole(given, which.cuda()).double().cpu()
    assert_close(actual, expected, 1e-4 if dtype == torch.float32 else 5e-2)
