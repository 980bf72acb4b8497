"""Gates of networks with several image sizes: they look at a thumbnail and decide between all routes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import dsnet
from dsnet.calibration import collect
from dsnet.calibration.compare import compare
from dsnet.cli import main
from dsnet.core.seeding import seeded
from dsnet.data.transforms.augment import Augment
from dsnet.gate import HeadForm
from dsnet.models import run_gated
from dsnet.models.composite import with_image_sizes
from dsnet.models.loading import load_model, save_checkpoint
from dsnet.models.supernet import Supernet
from dsnet.routing import CostTable, Routed
from dsnet.slicing import Mode
from dsnet.training import GateConfig, open_trained, train_gate
from dsnet.training.api import train
from dsnet.training.config import MixConfig
from dsnet.training.stage1.views import Views
from dsnet.training.stage2._gate_signals import one_gate
from dsnet.training.stage2.calibrate import calibrate_run
from dsnet.training.stage2.task import GateObjective
from dsnet.training.transfer import routing_from, start_from
from tests.support import assert_close, error_of, random_model
from tests.support import images as random_images
from tests.support.routed_run import BASE
from tests.support.small_networks import ResidualNet

SIZES = (8, 16)
SMALL = (0, 1, 2, 5)  # routes of 8 pixels
LARGE = (3, 4, 6, 7)  # routes of 16 pixels
ROUTES = range(8)

pytestmark = pytest.mark.xdist_group("stage2_sizes")


def sized(dtype: torch.dtype = torch.float64) -> Supernet:
    """A random network of its own, whose routing head can be changed."""
    return copy.deepcopy(random_model("ds_mbnet_tiny", dtype, image_sizes=SIZES))


def labelled(model: Supernet, count: int = 24) -> tuple[Tensor, Tensor]:
    """Images, and labels that the smallest route, the largest or none gets right."""
    x = random_images(model, count, seed=3)
    labels = torch.cat([model(x[:8], 0).argmax(1), model(x[8:16], 7).argmax(1), torch.arange(count - 16)])
    return x, labels % 10


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sizes"
    train(replace(BASE, options={"image_sizes": SIZES}, optim=replace(BASE.optim, epochs=3)), folder)
    return folder


# --- signals and losses ---------------------------------------------------------------------------------
def test_sizes_of_the_routes() -> None:
    model = sized()
    assert [route.number for route in model.space if route.image_size == 8] == list(SMALL)
    assert [route.number for route in model.space if route.image_size == 16] == list(LARGE)
    assert model.gate(0).choices == tuple(ROUTES)


@pytest.mark.parametrize("numbers", [tuple(ROUTES), (3, 7)])
def test_signals_are_those_of_the_routes_alone(numbers: tuple[int, ...]) -> None:
    model = sized()
    x, labels = labelled(model)
    signals = one_gate(model, x, labels, model.space.narrow(numbers))
    logits = torch.stack([model(x, number) for number in numbers], 1).float()
    for column in range(len(numbers)):
        expected = F.cross_entropy(logits[:, column], labels, reduction="none")
        assert_close(signals.losses[:, column], expected, 1e-6)
    assert torch.equal(signals.right, logits.argmax(2) == labels[:, None])
    pull = torch.einsum("bkc,brc->bkr", logits.softmax(2) - F.one_hot(labels, 10)[:, None], logits)
    assert_close(signals.pull, pull, 1e-5)


def test_the_gate_reads_the_thumbnail_as_a_network_of_that_size_does() -> None:
    model = sized()
    x, labels = labelled(model)
    plain = dsnet.create_model("ds_mbnet_tiny", dtype=torch.float64)
    state = plain.state_dict()
    for name, value in model.networks[0].state_dict().items():
        if name in state and value.shape != state[name].shape and ".routing." not in name:
            value = value[: len(value) // 2]  # the norm keys of the first size
        if ".routing." not in name:
            state[name] = value
    plain.load_state_dict(state)
    thumbnails = F.interpolate(x, (8, 8), mode="bilinear", antialias=True)
    expected = plain.eval().run_prefix(thumbnails).encoding
    encoding = one_gate(model, x, labels, model.space).encoding
    assert_close(encoding.pooled, expected.pooled, 1e-12)
    assert_close(encoding.hidden, expected.hidden, 1e-12)


def objective(model: Supernet, config: GateConfig) -> GateObjective:
    device = torch.device("cpu")
    views = Views(Augment(), MixConfig(), ((0.0,) * 3, (1 / 255,) * 3), seed=0, rank=0, device=device)
    return GateObjective(config, model, views, costs=CostTable.of_model(model))


def test_penalties_count_the_thumbnail_and_their_gradient_is_that_of_the_draws() -> None:
    """CP = mean (cost / T)²; its gradient for the scores is 2 c_k / T² · pᵣ (cᵣ − Σ p c), k drawn."""
    model = sized(torch.float32)
    images = torch.randint(0, 3, (1, 32, 3, 16, 16), dtype=torch.uint8, generator=seeded(1, "images"))
    x = images[0].float()
    labels = model(x, 0).argmax(1)
    learner = objective(model, GateConfig(target=0.0, complexity=1.0, sgs=0.0))
    paid = learner.step(images, labels, 0)
    alone = torch.tensor([dsnet.madds(model, number) for number in ROUTES]).double()
    thumbnail = _ran(lambda: model.gate_scores(model.run_prefix(x[:1]))) - 16 * 8  # without the head
    added = torch.tensor([number in LARGE for number in ROUTES]).double()
    costs = (alone + thumbnail * added) / alone[-1]
    scores = model.gate_scores(model.run_prefix(x)).detach()
    uniform = torch.rand(scores.shape, generator=seeded(0, "gate", 0, 0))
    p = (scores - (-uniform.log()).log()).softmax(1).double()
    drawn = p.argmax(1)
    assert set(drawn.tolist()) & set(LARGE)
    assert paid["gate/complexity"].item() == pytest.approx(costs[drawn].square().mean().item(), rel=1e-5)
    by_scores = 2 * costs[drawn, None] * p * (costs - (p * costs).sum(1, keepdim=True))
    bias = model.gate(0).routing.last.bias
    assert_close(bias.grad.double(), by_scores.mean(0), 1e-4)
    assert all(p.grad is None for n, p in model.named_parameters() if ".routing." not in n)
    both = objective(model, GateConfig(target=1.0, complexity=0.0, sgs=1.0)).step(images, labels, 0)
    logits = torch.stack([model(x, number) for number in ROUTES], 1).detach()
    target = F.cross_entropy(logits[torch.arange(32), drawn], labels)
    assert both["gate/target"].item() == pytest.approx(target.item(), rel=1e-5)
    sgs = F.cross_entropy(scores, torch.where(logits[:, 0].argmax(1) == labels, 0, 7))
    assert both["gate/sgs"].item() == pytest.approx(sgs.item(), rel=1e-5)


class _Pools(TorchDispatchMode):
    """Counts the elements that average pools read."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if function in (torch.ops.aten.mean.dim, torch.ops.aten._adaptive_avg_pool2d.default):
            self.elements += args[0].numel()
        return function(*args, **(kwargs or {}))


def _ran(call) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Multiply-adds of what runs: matrix products, convolutions and average pools."""
    with FlopCounterMode(display=False) as counter, _Pools() as pools:
        call()
    return counter.get_total_flops() // 2 + pools.elements


@pytest.mark.parametrize(
    ("form", "head"),
    [
        (HeadForm(), 16 * 8),
        (HeadForm(separate=True, width=24), 24 * 8),
        (HeadForm(kind="scalar"), 16),
    ],
)
def test_what_a_gated_pass_runs_is_what_the_table_counts(form: HeadForm, head: int) -> None:
    """``head``: multiply-adds of the routing head's last layer, which the convention leaves out."""
    model = sized()
    model.reset_routing(form=form)
    table, x = CostTable.of_model(model), random_images(model, 1)
    for number in ROUTES:
        assert _gated(model, x, number) == table.gated((number,)) + head, number
        separate = 0 if number in LARGE or form.width is None else 24 * model.gate(0).first.in_features
        assert _ran(lambda number=number: model(x, number)) == dsnet.madds(model, number) - separate
        assert dsnet.madds(model, number) == table.of((number,))


def _gated(model: Supernet, x: Tensor, number: int) -> int:
    """Multiply-adds of a gated pass in which the gate takes a route."""
    taken = torch.tensor([number])
    return _ran(lambda: run_gated(model, x, lambda *scores: taken, mode=Mode()))


def test_a_converted_networks_gate_runs_on_the_thumbnail_only() -> None:
    x = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    model = with_image_sizes(dsnet.convert(ResidualNet().eval(), x, gate="blocks.0"), SIZES).eval()
    table, routing = CostTable.of_model(model), model.gate(0).routing
    for route in model.space:
        head = routing.last.weight.numel()
        assert _gated(model, x, route.number) == table.gated(route.choices) + head
        separate = routing.first.weight.numel() if route.image_size == 8 else 0
        assert _ran(lambda n=route.number: model(x, n)) == table.of(route.choices) - separate


# --- training -------------------------------------------------------------------------------------------
def tensors(model: Supernet, *, routing: bool) -> dict[str, Tensor]:
    return {name: v for name, v in model.state_dict().items() if (".routing." in name) == routing}


@pytest.mark.parametrize(
    "config",
    [
        GateConfig(passes=2, epochs=2),
        GateConfig(passes=0, epochs=2),
        GateConfig(goal="value", epochs=1),
        GateConfig(head="scalar", epochs=1),
        GateConfig(first_layer="separate", width=24, epochs=1, space="1,3,7"),
    ],
)
def test_heads_learn_and_all_else_stays_bit_identical(run: Path, config: GateConfig) -> None:
    before = load_model(run, "final")
    new = copy.deepcopy(before)
    new.reset_routing(config.routes(new), form=config.form, generator=seeded(config.seed, "routing heads"))
    outcome = train_gate(run, config, save_as="moved", device="cpu")
    after = load_model(run, "moved")
    old, kept = (tensors(model, routing=False) for model in (before, after))
    assert old.keys() == kept.keys()
    assert all(torch.equal(old[name], kept[name]) for name in old)
    first, last = (tensors(model, routing=True) for model in (new, after))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert (after.gate(0).form, after.gate(0).choices) == (config.form, config.routes(after).choices[0])
    assert outcome.cached_passes == (config.passes if config.passes is not None else 1)
    (report,) = outcome.reports
    assert set(report.choice_counts) == set(after.gate(0).choices)


def test_cached_and_online_training_give_the_same_heads(run: Path) -> None:
    for name, passes in (("online", 0), ("cached", 2)):
        train_gate(run, GateConfig(passes=passes, epochs=2, batch=64), save_as=name, device="cpu")
    online, cached = (tensors(load_model(run, name), routing=True) for name in ("online", "cached"))
    for name, value in online.items():
        assert torch.allclose(value.float(), cached[name].float(), atol=1e-5), name


def test_a_value_gate_beats_random_routes_and_keeps_budgets(run: Path) -> None:
    train_gate(run, GateConfig(goal="value", lr=0.2), save_as="value", device="cpu")
    made = calibrate_run(run, name="value", device="cpu").calibration
    router = made.routers["gate"]
    opened = open_trained(run, "value", device="cpu")
    test = list(opened.seen(opened.test))
    outputs = collect(opened.model, test)
    low, high = made.budget_range("gate")
    assert low == dsnet.madds(opened.model, 0)
    assert high > dsnet.madds(opened.model, 7)  # the thumbnail comes on top
    budget = (low + high) / 2
    (row,) = compare(outputs, made.only("gate"), [budget]).rows
    assert row.accuracy > row.random + 0.02
    assert row.cost < 1.1 * budget
    routed = Routed(opened.model, router, budget)
    ran = torch.cat([routed.run(x).routes for x, _ in test])
    taken = {number: int((ran == number).sum()) for number in ROUTES}
    assert {number: count for number, count in taken.items() if count} == row.route_counts
    table = CostTable.of_model(opened.model)
    cost = sum(table.gated((number,)) * count for number, count in taken.items()) / len(ran)
    assert row.cost == pytest.approx(cost)


def test_the_commands(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "goal=value", "--set", "epochs=1", "--save-as", "command", "--device", "cpu"]
    assert main(["gate", str(run), *settings]) == 0
    assert "The gate on 143 held-out images" in capsys.readouterr().out
    assert main(["calibrate", str(run), "--name", "command", "--device", "cpu"]) == 0
    for more in ([], ["--budget", "50%"]):
        arguments = ["--name", "command", "--routed", "--router", "gate", *more, "--device", "cpu"]
        assert main(["evaluate", str(run), *arguments]) == 0
    assert "gate" in capsys.readouterr().out


# --- what is not possible -------------------------------------------------------------------------------
def test_networks_of_several_gates_have_none_for_all_sizes(run: Path, tmp_path: Path) -> None:
    data = open_trained(run, "final", device="cpu").saved.own_data
    data["recipe"]["model"] = "ds_resnet_tiny"
    resnet = dsnet.create_model("ds_resnet_tiny", image_sizes=SIZES)
    save_checkpoint(tmp_path / "run", "final", resnet, step=1, data=data)
    expected = "several gates and image sizes (8, 16) has no gate that decides between its routes"
    said: list[str] = []
    message = error_of(lambda: train_gate(tmp_path / "run", GateConfig(), device="cpu", said=said.append))
    assert expected in message
    assert said == []
    model = load_model(tmp_path / "run")
    assert not model.has_gate
    for call in (
        model.reset_routing,
        model.require_gate,
        lambda: model.gate_encoding(model.run_prefix(torch.zeros(1, 3, 16, 16))),
        lambda: GateConfig().resolved(model),
    ):
        assert expected in error_of(call)
    assert main(["gate", str(tmp_path / "run"), "--dry-run"]) != 0


def test_gates_start_from_those_of_the_same_image_sizes(tmp_path: Path) -> None:
    theirs = sized(torch.float32)
    save_checkpoint(tmp_path / "same", "final", theirs, step=1)
    mine = dsnet.create_model("ds_mbnet_tiny", image_sizes=SIZES, num_classes=3)
    save_checkpoint(tmp_path / "three", "final", mine, step=1)
    routing_from(mine, tmp_path / "same")
    assert all(
        torch.equal(value, tensors(theirs, routing=True)[name])
        for name, value in tensors(mine, routing=True).items()
    )
    start_from(theirs, tmp_path / "three")  # whose classifier is another
    for sizes in ((16, 24), None):
        options = {} if sizes is None else {"image_sizes": sizes}
        other = dsnet.create_model("ds_mbnet_tiny", **options)
        other.reset_routing(other.space.narrow([0, 3]))
        save_checkpoint(tmp_path / "other", "final", other, step=1)
        mine.reset_routing(mine.space.narrow([0, 3]))
        given = "none" if sizes is None else "16, 24"
        message = error_of(lambda: routing_from(mine, tmp_path / "other"))
        assert f"routes of other image sizes ({given}, not 8, 16)" in message
