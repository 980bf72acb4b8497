"""Steps of Stage I against the schemes written out by hand, gradients included."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dsnet
from dsnet.models.composite import CompositeNetwork, with_image_sizes
from dsnet.slicing import Mode, SplitBatchNorm2d, batch_statistics
from dsnet.training import Average, Projector, Scheme, Stage1
from tests.support import assert_close, error_of, images, randomise, relative_error
from tests.support.image_sizes import ByHand
from tests.support.stage1 import KINDS, SCHEMES, setting

TEACHER = Mode(statistics=batch_statistics)


def by_hand(
    model: dsnet.Supernet, stage: Stage1, text: str, routes: tuple, views: list[Tensor], labels: Tensor
) -> Tensor:
    """The paper's equations 28 to 36, one graph for all networks."""
    own = "mvco" in text
    of = [views[i] if own else views[0] for i in range(len(routes))]
    outputs = [model.run_stages(x, r) for x, r in zip(of, routes, strict=True)]
    label = [F.cross_entropy(logits, labels, label_smoothing=0.1) for logits, _ in outputs]
    if text == "label":
        return torch.stack(label).mean()
    if text.startswith("ed"):
        hard = stage.teacher(views[-1]).argmax(1)
        each = [
            0.5 * a + 0.5 * F.cross_entropy(logits, hard)
            for a, (logits, _) in zip(label, outputs, strict=True)
        ]
        return torch.stack(each).mean()
    if "id" in text.split("+"):
        large = outputs[0][0].detach().softmax(1)
        if "label" in text:  # the largest's decision as a label
            large = F.one_hot(large.argmax(1), large.shape[1]).to(large.dtype)
        targets = [None] + [large] * (len(routes) - 1)
    else:
        with torch.no_grad():
            taught = [stage.average.model.run_stages(of[0], r, TEACHER) for r in routes[:-1]]
        large = taught[0][0].softmax(1)
        targets = [None] + [large] * (len(routes) - 1)
        if "e-ib" in text:
            targets[-1] = sum(logits.softmax(1) for logits, _ in taught) / len(taught)
    losses = [label[0]]
    for i in range(1, len(routes)):
        loss = -(targets[i] * outputs[i][0].log_softmax(1)).sum(1).mean()
        if "h-ib" in text:
            predicted = stage.projector(outputs[i][1])
            parts = [
                ((p - f) ** 2).sum(1).mean() / p.shape[1]
                for p, f in zip(predicted, taught[0][1], strict=True)
            ]
            loss = 0.5 * loss + 0.5 * sum(parts) / len(parts)
        losses.append(0.5 * loss + 0.5 * label[i] if "label" in text else loss)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("name", KINDS)
def test_a_step_equals_the_paper_written_out(name: str, text: str) -> None:
    model, stage, routes, views, labels = setting(name, text)
    other = copy.deepcopy(model)
    other_stage = copy.deepcopy(stage)
    losses = stage.step(model, routes, views, labels)
    expected = by_hand(other, other_stage, text, routes, views, labels)
    expected.backward()
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-10)
    pairs = list(zip(model.named_parameters(), other.parameters(), strict=True))
    if stage.projector is not None:
        pairs += zip(stage.projector.named_parameters(), other_stage.projector.parameters(), strict=True)
    compared = 0
    for (parameter_name, ours), theirs in pairs:
        assert (ours.grad is None) == (theirs.grad is None), parameter_name
        if ours.grad is not None and theirs.grad.abs().max() > 1e-3:
            assert_close(ours.grad, theirs.grad, 1e-8)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", KINDS)
def test_routing_heads_and_averages_get_no_gradient(name: str) -> None:
    model, stage, routes, views, labels = setting(name, "e-ib+h-ib")
    before = {k: v.clone() for k, v in stage.average.model.state_dict().items()}
    stage.step(model, routes, views, labels)
    for gate in model.gates:
        assert all(p.grad is None for p in gate.routing.parameters())
        assert gate.attention.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in stage.average.model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in stage.average.model.state_dict().items())


def test_losses_can_be_added_instead_of_averaged() -> None:
    totals = []
    for add in (False, True):
        model, stage, routes, views, labels = setting("ds_mbnet_tiny", "label")
        stage = Stage1(scheme=stage.scheme, add=add)
        totals.append((stage.step(model, routes, views, labels).total, model.stem.conv.weight.grad))
    assert totals[1][0].item() == pytest.approx(4 * totals[0][0].item())
    assert_close(totals[1][1], 4 * totals[0][1], 1e-10)


def test_a_step_may_be_by_labels_only() -> None:
    results = []
    for text, labels_only in (("label", False), ("ib+label", True), ("label", True)):
        model, stage, routes, views, labels = setting("ds_mbnet_tiny", text)
        if stage.average is not None:
            stage.average.model.register_forward_hook(lambda *_: pytest.fail("the teacher has run"))
        losses = stage.step(model, routes, views, labels, labels_only=labels_only)
        assert all([name for name, _ in network.terms] == ["label"] for network in losses.networks)
        results.append([losses.total, *(p.grad for p in model.parameters() if p.grad is not None)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("text", "passes"), [("label", 1), ("ib", 1), ("id", 1), ("ib+mvco", 4), ("h-ib", 4)]
)
def test_networks_with_the_same_view_share_the_prefix(text: str, passes: int) -> None:
    model, stage, routes, views, labels = setting("ds_mbnet_tiny", text)
    seen = []
    model.stem.register_forward_hook(lambda *_: seen.append(1))
    stage.step(model, routes, views, labels)
    assert len(seen) == passes


@pytest.mark.parametrize("name", KINDS)
def test_the_largest_network_may_have_a_mode_of_its_own(name: str) -> None:
    model, stage, _, views, labels = setting(name, "ib")
    routes = (model.space.largest, model.space[1], model.space.smallest)
    before = copy.deepcopy(model)
    stage = replace(stage, largest_mode=TEACHER)
    losses = stage.step(model, routes, views, labels)
    same = Stage1(scheme=stage.scheme, average=stage.average, smoothing=0.1).step(
        before, routes, views, labels
    )
    assert losses.total.item() == pytest.approx(same.total.item(), rel=1e-10)
    if name == "ds_mbnet_tiny":  # statistics of the largest are left alone, those of the others are not
        norm = model.blocks[-1].pointwise.norm
        assert [norm.states[route.number].name for route in routes] == ["CALIBRATED", "RUNNING", "RUNNING"]


def test_under_autocast_losses_stay_precise() -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny"), seed=1).train()
    routes = (model.space[3], model.space[1], model.space[0])
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    gradients = []
    for autocast in (None, torch.bfloat16):
        model.zero_grad()
        stage = Stage1(scheme=Scheme.parse("ib"), average=Average(model), autocast=autocast)
        losses = stage.step(model, routes, [images(model, 64)], torch.arange(64) % 10)
        assert {losses.total.dtype, *(value.dtype for n in losses.networks for _, value in n.terms)} == {
            torch.float32
        }
        gradients.append(model.head.classifier.weight.grad.clone())
    assert seen == [torch.float32] * 4 + [torch.bfloat16] * 4  # the average has the hook too
    assert_close(gradients[1], gradients[0], 0.1)


def test_halves_of_the_schemes_with_labels() -> None:
    """id+label: the largest's decision as a hard label; id and ib+label: probabilities."""
    logits = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    taught = (torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64),)  # decides for class 0
    log_p = logits[0] - logits[0].exp().sum().log()
    q = taught[0][0].exp() / taught[0][0].exp().sum()
    hard, soft = -log_p[0].item(), -(q * log_p).sum().item()
    average = Average(dsnet.create_model("ds_mbnet_tiny"))
    for text, expected in (("id+label", hard), ("id+label+mvco", hard), ("id", soft), ("ib+label", soft)):
        scheme = Scheme.parse(text)
        own = average if scheme.uses_average else None
        stage = Stage1(scheme=scheme, average=own, smoothing=0.1)
        value = stage.value(scheme.target, logits, (), torch.tensor([1]), taught)
        assert value.item() == pytest.approx(expected, rel=1e-12), text
        if "label" in text:  # the true label, smoothed
            value = stage.value("label", logits, (), torch.tensor([1]), taught)
            assert value.item() == pytest.approx(-0.9 * log_p[1].item() - 0.1 * log_p.mean().item())
            assert scheme.terms(1) == (("label", 0.5), (scheme.target, 0.5))
    assert "hard is for id" in error_of(lambda: Scheme(target="ib", hard=True))


def test_only_the_keys_of_the_steps_routes_are_updated() -> None:
    model = dsnet.create_model("ds_mbnet_tiny").train()
    routes = (model.space[3], model.space[1], model.space[0])
    stage = Stage1(scheme=Scheme.parse("label"))
    stage.step(model, routes, [images(model, 8)], torch.arange(8))
    suffix = [m for m in model.modules() if isinstance(m, SplitBatchNorm2d) and m.keys == 4]
    assert suffix
    for norm in suffix:
        assert [bool(s) for s in norm.states] == [True, True, False, True]


def test_the_average_follows_parameters_only() -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny", dtype=torch.float64), seed=1)
    average = Average(model, 0.9)
    start = model.stem.conv.weight.detach().clone()
    statistics = average.model.stem.norm.mean.clone()
    randomise(model, seed=2)
    for _ in range(3):
        average.update(model)
    expected = 0.9**3 * start + (1 - 0.9**3) * model.stem.conv.weight
    assert_close(average.model.stem.conv.weight, expected.detach(), 1e-12)
    assert torch.equal(average.model.stem.norm.mean, statistics)
    x = images(model, 6)
    stored = Average(model, mode=Mode())
    assert_close(stored.model(x, 1, mode=stored.mode), model.eval()(x, 1).detach(), 1e-12)
    assert relative_error(average.model(x, 1, mode=average.mode), model(x, 1)) > 0.01
    warm = Average(model, 0.997, warmup=True)
    assert [warm.alpha_at(t) for t in (0, 1, 10**6)] == [1 / 10, 2 / 11, 0.997]


def test_missing_arguments_of_a_stage_are_errors() -> None:
    assert "needs the argument average" in error_of(lambda: Stage1(scheme=Scheme.parse("ib")))
    assert "needs the argument teacher" in error_of(lambda: Stage1(scheme=Scheme.parse("ed")))
    model, stage, routes, views, labels = setting("ds_mbnet_tiny", "ib+mvco")
    assert "needs 4 views here, not 1" in error_of(lambda: stage.step(model, routes, views[:1], labels))
    assert "below 1" in error_of(lambda: Average(model, 1.0))


# --- image sizes -------------------------------------------------------------------------------------------
SIZES = (8, 16)


def at_sizes(name: str, seed: int) -> CompositeNetwork:
    network = dsnet.create_model(name, dtype=torch.float64)
    return randomise(with_image_sizes(network, SIZES), seed=seed).train()


@pytest.mark.parametrize("text", ["label", "id", "e-ib", "h-ib", "ib+mvco", "ed"])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_over_sizes_equals_its_networks_by_hand(name: str, text: str) -> None:
    """The same weights in an ordinary network, on images resized by hand."""
    model, scheme = at_sizes(name, 1), Scheme.parse(text)
    average = projector = teacher = None
    other = SimpleNamespace(average=None, projector=None, teacher=None)
    if scheme.uses_average:
        average = Average(at_sizes(name, 2))
        other.average = SimpleNamespace(model=ByHand(average.model))
    if scheme.hierarchical:
        projector = randomise(Projector.of(model, "all"), seed=3)
        other.projector = copy.deepcopy(projector)
    if scheme.external is not None:
        frozen = at_sizes(name, 4).requires_grad_(False).eval()
        teacher = other.teacher = frozen.bind(frozen.space.largest)
    stage = Stage1(scheme=scheme, average=average, projector=projector, teacher=teacher, smoothing=0.1)
    space = model.space
    small = [route for route in space if route.image_size == 8]
    large = [route for route in space if route.image_size == 16]
    routes = (space.largest, small[-1], large[0], large[len(large) // 2], space.smallest)
    views = [images(model, 6, seed=10 + i) for i in range(scheme.views(len(routes)))]
    labels = torch.arange(6)
    losses = stage.step(model, routes, views, labels)
    hand = ByHand(model)
    expected = by_hand(hand, other, text, routes, views, labels)
    expected.backward()
    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-10)
    assert [network.route for network in losses.networks] == [route.number for route in routes]
    theirs = dict(hand.network.named_parameters())
    compared = 0
    for parameter_name, ours in model.networks[0].named_parameters():
        if "routing" in parameter_name:
            assert ours.grad is None
            continue
        gradient = theirs[parameter_name].grad
        assert (ours.grad is None) == (gradient is None), parameter_name
        if gradient is not None and gradient.abs().max() > 1e-3:
            assert_close(ours.grad, gradient, 1e-8)
            compared += 1
    assert compared > 20
    if projector is not None:
        for ours, gradient in zip(projector.parameters(), other.projector.parameters(), strict=True):
            assert_close(ours.grad, gradient.grad, 1e-8)


def test_each_size_of_a_step_updates_keys_of_its_own() -> None:
    model = dsnet.create_model("ds_mbnet_tiny", image_sizes=SIZES).train()
    routes = (model.space.largest, model.space[1], model.space.smallest)
    assert [route.image_size for route in routes] == [16, 8, 8]
    Stage1(scheme=Scheme.parse("label")).step(model, routes, [images(model, 8)], torch.arange(8))
    used = {(norm, key) for route in routes for norm, key in model.norms(route.choices)}
    for norm in (m for m in model.modules() if isinstance(m, SplitBatchNorm2d)):
        assert [bool(state) for state in norm.states] == [(norm, key) in used for key in range(norm.keys)]
    stem = model.networks[0].stem.norm
    assert stem.count.tolist() == [2 * 8 * 8 * 8, 8 * 16 * 16]  # each network runs its prefix


def test_transformers_drop_branches_at_every_route_of_every_size() -> None:
    for name in KINDS:
        model = dsnet.create_model(name, image_sizes=SIZES)
        assert model.drops_everywhere == dsnet.create_model(name).drops_everywhere == ("vit" in name)
