"""On a CUDA device: routes and logits agree with the CPU, gated batches with their images."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.models.gated import run_gated
from tests.support import FAMILIES, TINY, assert_close, images, randomise, spread_gates

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _cuda_in_full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("name", TINY)
def test_float64_on_the_gpu_equals_the_cpu(name: str) -> None:
    model = randomise(dsnet.create_model(name, dtype=torch.float64)).requires_grad_(False)
    x = images(model, 32)
    spread_gates(model, x)
    expected = run_gated(model, x)
    assert len(expected.choices.unique(dim=0)) > 1
    actual = run_gated(model.to("cuda"), x.to("cuda"))
    assert torch.equal(actual.choices.cpu(), expected.choices)
    assert_close(actual.logits.cpu(), expected.logits, 1e-10)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_batch_equals_its_images_outside_a_margin(name: str, dtype: torch.dtype) -> None:
    model = randomise(dsnet.create_model(name, device="cuda", dtype=dtype)).requires_grad_(False)
    model.to(memory_format=torch.channels_last)
    x = images(model, 64).to("cuda", memory_format=torch.channels_last)
    spread_gates(model, x)
    margin, tolerance = (1e-4, 1e-4) if dtype is torch.float32 else (1e-2, 5e-2)
    closest = torch.full((64,), torch.inf)

    together = run_gated(model, x)
    for i in range(64):

        def watch(scores: torch.Tensor, stage: int, previous: int | None, i: int = i) -> torch.Tensor:
            best = scores.topk(2, 1).values[0]
            closest[i] = min(closest[i].item(), (best[0] - best[1]).item())
            return scores.argmax(1)

        alone = run_gated(model, x[i : i + 1], watch)
        if closest[i] > margin:
            assert torch.equal(alone.choices[0], together.choices[i])
        route = model.space.of_choices(together.choices[i].tolist())
        given = model(x[i : i + 1], route)[0].float()
        error = (together.logits[i].float() - given).norm() / given.norm()
        assert error < tolerance


@pytest.mark.parametrize("name", FAMILIES)
def test_extracted_equals_sliced_on_the_gpu(name: str) -> None:
    model = randomise(dsnet.create_model(name, device="cuda", dtype=torch.float64)).requires_grad_(False)
    x = images(model, 4).to("cuda")
    for route in (model.space.smallest, model.space.largest):
        net = dsnet.extract(model, route, image_size=x.shape[-1])
        assert_close(net(x), model(x, route), 1e-10)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_a_bound_route_compiles_on_the_gpu(name: str) -> None:
    model = randomise(dsnet.create_model(name, device="cuda")).requires_grad_(False)
    x = images(model, 8).to("cuda")
    compiled = torch.compile(model.bind(1), fullgraph=True)
    assert_close(compiled(x), model(x, 1), 1e-4)
