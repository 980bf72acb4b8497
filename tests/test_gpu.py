"""On a CUDA device: routes and logits as on the CPU, gated batches as single images, graphs as steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.core.seeding import reseed
from dsnet.data.transforms.augment import Augment
from dsnet.models.group_by_route import run_gated
from dsnet.routing import CostTable
from dsnet.slicing import Mode
from dsnet.training import Average, GateConfig, Scheme, Stage1
from dsnet.training.config import MixConfig
from dsnet.training.stage1._graphed_step import GraphedStep
from dsnet.training.stage1.step import Passes
from dsnet.training.stage1.views import Views
from dsnet.training.stage2.task import GateObjective
from tests.support import FAMILIES, TINY, assert_close, images, randomise, relative_error, spread_gates
from tests.support.stage1 import SCHEMES, setting

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


# --- graphs of the training step --------------------------------------------------------------------------
def on_gpu(name: str, text: str) -> tuple[dsnet.Supernet, Stage1, tuple, list[Tensor], Tensor]:
    model, stage, routes, views, labels = setting(name, text)
    for module in (model, stage.projector, stage.teacher, stage.average and stage.average.model):
        if module is not None:
            module.to("cuda")
    return model, stage, routes, [view.to("cuda") for view in views], labels.to("cuda")


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"])
def test_graphs_train_as_steps_do(name: str, text: str) -> None:
    model, stage, routes, views, labels = on_gpu(name, text)
    other, other_stage = copy.deepcopy(model), copy.deepcopy(stage)
    steps = GraphedStep(stage, model)
    swapped = (routes[0], routes[2], routes[1], routes[3])
    plan = [(routes, False), (swapped, False), (routes, True), (swapped, True), (routes, False)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=1e-3) for network in (model, other)]
    for number, (chosen, labels_only) in enumerate(plan):
        seen, wanted = [view + 0.1 * number for view in views], labels.roll(number)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        ours = steps.step(chosen, seen, wanted, labels_only=labels_only)
        theirs = other_stage.step(other, chosen, seen, wanted, labels_only=labels_only)
        assert_close(ours.total, theirs.total, 1e-9)
        for a, b in zip(ours.networks, theirs.networks, strict=True):
            assert [key for key, _ in a.terms] == [key for key, _ in b.terms]
            assert_close(torch.stack([v for _, v in a.terms]), torch.stack([v for _, v in b.terms]), 1e-9)
        for (key, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), key
            assert a.grad is None or (a.grad - b.grad).abs().max() <= 1e-9 * max(1, b.grad.abs().max()), key
        for (key, a), b in zip(model.named_buffers(), other.buffers(), strict=True):
            assert (a - b).abs().max() <= 1e-9 * max(1, b.abs().max()), key
        for optimizer in optimizers:
            optimizer.step()
        for network, owner in ((model, stage), (other, other_stage)):
            if owner.average is not None:
                owner.average.update(network)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_graphed_step_never_waits_for_the_device() -> None:
    model = dsnet.create_model("ds_mbnet_tiny", device="cuda").train()
    stage = Stage1(scheme=Scheme.parse("e-ib"), average=Average(model), autocast=torch.bfloat16)
    steps = GraphedStep(stage, model)
    routes = (model.space[3], model.space[1], model.space[2], model.space[0])
    x, labels = images(model, 64).to("cuda"), torch.arange(64, device="cuda") % 10
    steps.step(routes, [x], labels)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        steps.step(routes, [x], labels)
        stage.step(model, routes, [x], labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["ds_mbnet_tiny", "ds_vit_plus_tiny"])
def test_graphs_in_bfloat16_are_near_float32(name: str) -> None:
    model = randomise(dsnet.create_model(name, device="cuda"), seed=1).train()
    model.to(memory_format=torch.channels_last)
    x = images(model, 64).to("cuda", memory_format=torch.channels_last)
    labels = torch.arange(64, device="cuda") % 10
    routes = (model.space[2], model.space[1], model.space[0])
    stage = Stage1(scheme=Scheme.parse("ib"), average=Average(model))
    half = replace(stage, autocast=torch.bfloat16)
    gradients = []
    for step in (Passes(stage, model), Passes(half, model), GraphedStep(half, model)):
        for _ in range(2):
            model.zero_grad()
            step.step(routes, [x], labels)
        gradients.append(model.head.classifier.weight.grad.clone())
    assert_close(gradients[1], gradients[0], 0.1)
    assert_close(gradients[2], gradients[1], 0.02)


def test_replays_draw_anew() -> None:
    model = randomise(dsnet.create_model("ds_vit_plus_tiny", device="cuda", dtype=torch.float64)).train()
    noise = torch.Generator("cuda")
    mode = Mode(drop_path=0.5, dropout=0.5, generator=noise)
    stage = Stage1(scheme=Scheme.parse("label"), mode=mode, largest_mode=mode)
    x, labels = images(model, 32).to("cuda"), torch.arange(32, device="cuda") % 10
    routes = (model.space[2], model.space[1], model.space[0])
    steps = GraphedStep(stage, model)
    totals: dict[str, list[Tensor]] = {}
    for name, step in (("graphs", steps), ("eager", Passes(stage, model)), ("graphs again", steps)):
        for seed in (1, 1, 2):
            noise.manual_seed(seed)
            totals.setdefault(name, []).append(step.step(routes, [x], labels).total)
    for same, repeated, other in totals.values():
        assert same == repeated
        assert relative_error(other, same) > 1e-4
    assert_close(torch.stack(totals["graphs"]), torch.stack(totals["eager"]), 1e-9)
    assert totals["graphs"] == totals["graphs again"]


def test_graphs_add_no_memory_for_every_route() -> None:
    model = dsnet.create_model("ds_mbnet_cifar", device="cuda").train()
    x, labels = torch.randn(256, 3, 32, 32, device="cuda"), torch.arange(256, device="cuda") % 10
    steps = GraphedStep(Stage1(scheme=Scheme.parse("label")), model)
    space, used = model.space, []
    for route in (12, 6, 3, 9, 1, 11):
        steps.step((space.largest, space[route], space.smallest), [x], labels)
        used.append(torch.cuda.memory_reserved())
    assert used[-1] < 1.15 * used[0]


@pytest.mark.parametrize(
    "config", [GateConfig(even=True), GateConfig(goal="value"), GateConfig(head="scalar")]
)
@pytest.mark.parametrize("options", [{}, {"image_sizes": (8, 16)}])
def test_gate_steps_from_graphs_equal_plain_ones(config: GateConfig, options: dict[str, Any]) -> None:
    device = torch.device("cuda")
    model = dsnet.create_model("ds_mbnet_tiny", **options)
    randomise(model)
    model.reset_routing(config.routes(model), form=config.form)
    model = model.to(device)
    views = Views(Augment(), MixConfig(), ((0.5,) * 3, (0.25,) * 3), seed=0, rank=0, device=device)
    task = GateObjective(config, model, views, costs=CostTable.of_model(model))
    draw = torch.Generator().manual_seed(0)
    for step, batch in enumerate((32, 32, 20, 32)):  # graphs are for 32
        images = torch.randint(0, 256, (1, batch, 3, 16, 16), dtype=torch.uint8, generator=draw).to(device)
        labels = torch.randint(0, 10, (batch,), generator=draw).to(device)
        model.zero_grad()
        losses = task.step(images, labels, step)
        (x,), _ = views(images, labels, count=1, step=step, classes=10)
        reseed(task.noise, config.seed, "gate", 0, step)
        expected, gradients = task._losses_of_signals(task._compute_signals(x, labels))
        assert losses.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(losses[name], value, atol=1e-5), name
        for parameter, gradient in zip(task.parameters, gradients, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, gradient, atol=1e-6)
            with torch.no_grad():
                parameter -= 0.1 * gradient  # graphs see new values
    assert task._graphed_losses._captured is not None
