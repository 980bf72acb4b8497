"""Traced graphs against the networks that they come from."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dsnet.errors import DsnetError
from dsnet.models.convert._tracing import trace, value_of
from tests.support import assert_close, error_of
from tests.support.small_networks import SMALL_NETWORKS, random_images, randomise_module

NAMES = list(SMALL_NETWORKS)
ANY_SIZE = [name for name in NAMES if not name.startswith("transformer")]


class Network(nn.Module):
    """A convolution, a function of the module and its maps [B, 8, H, W], and a linear layer."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.inner = nn.Conv2d(3, 8, 3, 2, 1), _Inner(function)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.conv(x)).mean((2, 3)))


class _Inner(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def network(function: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return randomise_module(Network(function).double()).eval()


def graph_of(module: nn.Module, batch: int = 2) -> fx.GraphModule:
    traced = trace(module, random_images(batch))
    return fx.GraphModule(module, traced.graph)


# --- the graph computes what the network computes ---------------------------------------------------------
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_equals_the_network_at_other_batch_sizes(name: str, batch: int) -> None:
    module, x = SMALL_NETWORKS[name].full(), random_images(batch, seed=7)
    assert_close(graph_of(module)(x), module(x), 1e-12)


@pytest.mark.parametrize("size", [8, 24, 32])
@pytest.mark.parametrize("name", ANY_SIZE)
def test_a_graph_equals_the_network_at_other_image_sizes(name: str, size: int) -> None:
    module, x = SMALL_NETWORKS[name].full(), random_images(3, size, seed=7)
    assert_close(graph_of(module)(x), module(x), 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_node_has_its_value_for_the_example(name: str) -> None:
    module, x = SMALL_NETWORKS[name].full(), random_images(2)
    traced = trace(module, x)
    seen: dict[str, Tensor] = {}
    for path, layer in module.named_modules():
        layer.register_forward_hook(lambda m, args, out, path=path: seen.update({path: out.clone()}))
    assert torch.equal(value_of(traced.output), module(x))
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert nodes
    in_place = {node.args[0] for node in traced.graph.nodes if node.target is operator.iadd}
    for node in nodes:
        if node not in in_place:
            assert torch.equal(value_of(node), seen[str(node.target)])


SHAPES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "unpacked": lambda m, x: (lambda b, c, h, w: x.reshape(b, c, h * w).reshape(b, c, h, w))(*x.shape),
    "size": lambda m, x: x.flatten(2).view(x.size(0), x.size(1), x.size(-2), -1),
    "arithmetic": lambda m, x: x.reshape(x.shape[0] * 2, x.shape[1] // 2, *x.shape[2:]).reshape(
        x.shape[0], -1, x.shape[2] * 2 - x.shape[2], x.shape[-1] % 1000
    ),
    "shape_of_another": lambda m, x: x.flatten(1).view(x.shape),
    "slice_of_shape": lambda m, x: x.flatten(2).reshape(*x.shape[:2], *x.shape[2:]),
    "numel": lambda m, x: x.reshape(x.shape.numel()).reshape(x.shape),
    "interpolate": lambda m, x: F.interpolate(x, (x.shape[2] // 2, x.shape[3] // 2)),
    "decision_by_shape": lambda m, x: F.pad(x, (1, 1)) if x.shape[1] == 8 and x.ndim == 4 else x,
    "decision_by_type": lambda m, x: x * 2 if x.dtype == torch.float64 and x.is_floating_point() else x,
    "decision_by_layout": lambda m, x: x * 2 if x.is_contiguous() else x,
    "new_tensor": lambda m, x: x + torch.arange(8, dtype=x.dtype, device=x.device).view(-1, 1, 1),
    "zeros": lambda m, x: x + x.new_ones(x.shape[0], 1, 1, 1),
    "parts": lambda m, x: torch.cat(list(x.chunk(2, 1))[::-1], 1),
    "starred": lambda m, x: torch.cat([*x.split(4, 1)], 1),
    "keywords": lambda m, x: torch.cat(tensors=[x, x], dim=1)[:, :8],
    "slices": lambda m, x: x[:, :, : x.shape[2] // 2, 1:],
    "in_place": lambda m, x: x.clone().mul_(2).add_(1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_stay_symbolic(name: str) -> None:
    module = network(SHAPES[name])
    graph = graph_of(module)
    for batch, size in ((1, 16), (3, 16), (2, 32), (5, 24)):
        x = random_images(batch, size, seed=3)
        assert_close(graph(x), module(x), 1e-12)


def test_the_network_and_its_modules_are_not_changed() -> None:
    module = SMALL_NETWORKS["depthwise"].full()
    before = copy.deepcopy(module.state_dict())
    attributes = {name: set(m.__dict__) for name, m in module.named_modules()}
    trace(module, random_images(2))
    assert {name: set(m.__dict__) for name, m in module.named_modules()} == attributes
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_optional_arguments_take_their_defaults() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 5)

        def forward(self, x: Tensor, scale: float = 2.0, mask: Tensor | None = None) -> Tensor:
            return self.head(x.mean((2, 3)) * scale if mask is None else x)

    module, x = randomise_module(Optional().double()).eval(), random_images(3)
    assert_close(graph_of(module)(x), module(x), 1e-12)


# --- what cannot be traced --------------------------------------------------------------------------------
def _branch(module: nn.Module, x: Tensor) -> Tensor:
    if x.mean() > 0:  # the line that a message names
        return x
    return -x


CONTROL_FLOW: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "if": (_branch, "a decision depends on the values of a tensor"),
    "while": (lambda m, x: x if bool((x > 0).all()) else -x, "a decision depends on the values of a tensor"),
    "item": (lambda m, x: x * x.max().item(), "a tensor is converted to a Python number"),
    "float": (lambda m, x: x * float(x.max()), "a tensor is converted to a Python number"),
    "int": (lambda m, x: x * int(x.max()), "a tensor is converted to a Python number"),
    "tolist": (lambda m, x: x * x.mean((0, 2, 3)).tolist()[0], "a tensor is converted to a Python number"),
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow_by_values_names_module_line_and_a_way_out(name: str) -> None:
    function, what = CONTROL_FLOW[name]
    message = error_of(lambda: trace(network(function), random_images(2)))
    assert "cannot trace module inner (_Inner)" in message
    assert what in message
    code = function.__code__
    line = code.co_firstlineno + (1 if name == "if" else 0)
    assert f"{__file__}:{line}, in {code.co_name}" in message
    assert "torch.where" in message


def test_an_error_of_the_network_itself_names_module_and_line() -> None:
    def wrong(module: nn.Module, x: Tensor) -> Tensor:
        return x @ torch.zeros(3, 3, dtype=x.dtype)

    message = error_of(lambda: trace(network(wrong), random_images(2)))
    assert "cannot trace module inner (_Inner)" in message
    assert f"{__file__}:{wrong.__code__.co_firstlineno + 1}, in wrong" in message
    assert "RuntimeError" in message
    assert "check that the network runs on the example" in message


def test_an_error_keeps_its_cause() -> None:
    with pytest.raises(DsnetError) as caught:
        trace(network(_branch), random_images(2))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_a_network_that_returns_several_tensors_is_refused(kind: str) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = SMALL_NETWORKS["plain"].full()

        def forward(self, x: Tensor) -> object:
            y = self.body(x)
            return {"tuple": (y, x), "list": [y, x], "dict": {"logits": y}}[kind]

    message = error_of(lambda: trace(Several().eval(), random_images(2)).output)
    assert kind in message
    assert "not one tensor of logits" in message
    assert "wrap it" in message
