"""Networks with everything drawn at random, and comparisons that state their tolerance.

At initialisation γ = 0 silences every residual branch and attention is 1, so a wrong slice would go
unnoticed: `randomise` first gives every parameter and every statistic a value of its own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dsnet
from dsnet.gate import RoutingHead
from dsnet.models.convert.sources import import_timm
from dsnet.models.group_by_route import run_gated
from dsnet.slicing import SplitBatchNorm2d

SUPERNETS = dsnet.list_models("supernet")
IN_THE_PAPERS_TABLES = [name for name in SUPERNETS if name.startswith("ds_")]
TINY = [name for name in SUPERNETS if name.endswith("_tiny")]
FAMILIES = ["ds_mbnet", "ds_mbnet_plus", "ds_resnet", "ds_resnet_plus", "ds_vit_plus"]


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draws all parameters and statistics; γ and variances lie in [0.5, 1.5], keys all differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Tensor, kind: str) -> Tensor:
        if kind == "uniform":
            values = 0.5 + torch.rand(like.shape, generator=generator, dtype=torch.float64)
        else:
            values = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return values.to(like.device, like.dtype)

    for name, parameter in model.named_parameters():
        norm_scale = parameter.dim() == 1 and name.endswith("norm.weight")
        if parameter.dim() > 1:
            parameter.copy_(draw(parameter, "normal") / parameter[0].numel() ** 0.5)
        elif norm_scale or name.endswith(("norm1.weight", "norm2.weight")):
            parameter.copy_(draw(parameter, "uniform"))
        else:
            parameter.copy_(0.3 * draw(parameter, "normal"))
    for module in model.modules():
        if isinstance(module, SplitBatchNorm2d):
            for key in range(module.keys):
                module.set_statistics(
                    key, 0.3 * draw(module.mean[key], "normal"), draw(module.var[key], "uniform"), 1
                )
    return model


@functools.cache
def random_model(name: str, dtype: torch.dtype = torch.float64, **options: str) -> dsnet.Supernet:
    """A randomised network; shared between tests, so never changed by one."""
    model = dsnet.create_model(name, dtype=dtype, **options)
    randomise(model)
    return model.requires_grad_(False)


def images(model: dsnet.Supernet, batch: int, *, size: int | None = None, seed: int = 1) -> Tensor:
    """Random images that the network takes, in its own precision."""
    generator = torch.Generator().manual_seed(seed)
    size = size or smallest_size(model)
    dtype = next(model.parameters()).dtype
    shape = (batch, model.input_spec.channels, size, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def smallest_size(model: dsnet.Supernet) -> int:
    """Small enough to be quick, large enough that every map has several positions."""
    return min(model.input_spec.image_size, 64)


@torch.no_grad()
def spread_gates(model: dsnet.Supernet, x: Tensor) -> dsnet.Supernet:
    """Makes the gates' own decisions differ between these images: unit scores that favour no choice."""
    for stage in range(len(model.gates)):
        head = model.gate(stage).routing
        assert isinstance(head, RoutingHead)
        head.last.bias.zero_()
        scores = _scores_at(model, x, stage)
        scale = 1 / scores.std(0).mean()
        head.last.weight.mul_(scale)
        head.last.bias.copy_(-scale * scores.mean(0))
    return model


def _scores_at(model: dsnet.Supernet, x: Tensor, stage: int) -> Tensor:
    seen: list[Tensor] = []

    def look(scores: Tensor, at: int, previous: int | None) -> Tensor:
        if at == stage:
            seen.append(scores)
        return scores.argmax(1)

    run_gated(model, x, look, logits=False)
    return torch.cat(seen)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert expected.abs().max() > 1e-3, "nothing to compare: the expected values are all near zero"
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.2e} is above {tolerance:.0e}"


def snapshot(model: nn.Module) -> dict[str, object]:
    """All attributes of all modules, and copies of their parameters and buffers."""
    taken: dict[str, object] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                taken[f"{name}.{key}"] = repr(value)
    taken.update({name: value.clone() for name, value in model.state_dict().items()})
    return taken


def rewrite(path: Path, content: str | bytes) -> None:
    """Changes a file of a checkpoint on purpose: without the hashes, which say that it is damaged."""
    (path.parent / "SHA256SUMS").unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def error_of(call: Callable[[], object]) -> str:
    """The message of the error that the call must raise."""
    with pytest.raises(dsnet.DsnetError) as caught:
        call()
    return str(caught.value)


def need_timm() -> None:
    """Skip the test, or the module, unless timm is installed; import it even beside a broken torchvision."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed", allow_module_level=True)
    import_timm()
