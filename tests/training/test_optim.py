"""Which weights decay, and how the learning rate moves."""

from __future__ import annotations

import pytest
import torch

import dsnet
from dsnet.training import Projector
from dsnet.training.optim import cosine, make_optimizer, parameter_groups, set_learning_rate
from tests.support import TINY, error_of


@pytest.mark.parametrize("name", TINY)
def test_gates_norms_biases_and_tokens_do_not_decay_and_routing_heads_do_not_train(name: str) -> None:
    model = dsnet.create_model(name)
    decayed, plain = (
        {id(p) for p in group["params"]} for group in parameter_groups([model, Projector.of(model)], 0.1)
    )
    assert not decayed & plain
    for parameter_name, parameter in model.named_parameters():
        routing = ".routing." in parameter_name
        bare = parameter_name.endswith("bias") or any(
            word in parameter_name for word in ("norm", "gate", "positions", "class_token")
        )
        assert (id(parameter) in decayed) == (not routing and not bare), parameter_name
        assert (id(parameter) in plain) == (not routing and bare), parameter_name


def test_the_learning_rate_rises_in_a_line_and_falls_as_a_cosine() -> None:
    factors = [cosine(step, steps=20, warmup=5) for step in range(21)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5] == 1.0
    assert factors[5 + 5] == pytest.approx(0.75)  # a third of the way down
    assert factors[20] == pytest.approx(0)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert cosine(0, steps=10, warmup=0) == 1.0


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_optimizers_step_all_groups(kind: str) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make_optimizer(kind, [{"params": [weight], "weight_decay": 0.0}], lr=1.0)
    set_learning_rate(optimizer, 0.25)
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    expected = 1 - 0.25 * (1.9 if kind == "sgd" else 1.0)  # Nesterov: g + 0.9 g
    assert weight[0, 0].item() == pytest.approx(expected, abs=1e-5)
    assert "sgd, adamw" in error_of(lambda: make_optimizer("lion", [], lr=1.0))
