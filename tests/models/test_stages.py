"""Pooled features of each stage: `run_stages` splits a segment by position, not by the identity of sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import dsnet
from dsnet.models import Step
from dsnet.models.layout import split_stages
from dsnet.routes import Slice
from tests.support import TINY, error_of, images, random_model, randomise


def with_copies(name: str) -> dsnet.Supernet:
    """A family that gives every step a copy of its stage's size."""
    model = randomise(dsnet.create_model(name, dtype=torch.float64)).requires_grad_(False)
    assert isinstance(model, dsnet.Supernet)
    plain = model.segment_steps

    def copied(choices: tuple[int, ...]) -> list[Step]:
        return [step._replace(size=replace(step.size)) for step in plain(choices)]

    model.segment_steps = copied  # type: ignore[method-assign]
    model.seal()
    return model


@pytest.mark.parametrize("name", TINY)
def test_stages_do_not_depend_on_the_identity_of_sizes(name: str) -> None:
    model, plain = with_copies(name), random_model(name)
    x = images(plain, 3)
    for route in (plain.space.smallest, plain.space.largest):
        logits, stages = model.run_stages(x, route)
        expected, told = plain.run_stages(x, route)
        assert torch.equal(logits, expected)
        assert torch.equal(logits, plain(x, route))
        assert len(stages) == len(route.stages)
        for stage, same in zip(stages, told, strict=True):
            assert torch.equal(stage, same)


def test_equal_sizes_of_consecutive_stages_need_distinct_objects() -> None:
    a, b = Slice(width=8), Slice(width=16)
    same = replace(a)
    block = dsnet.create_model("ds_mbnet_tiny", device="meta").chain(())[0].block

    def counts(given: list[Slice], sizes: tuple[Slice, ...]) -> list[int] | None:
        stages = split_stages([Step(block, size) for size in given], sizes)
        return None if stages is None else list(map(len, stages))

    assert counts([a, a, b], (a, b)) == [2, 1]
    assert counts([replace(a), replace(a), replace(b)], (a, b)) == [2, 1]
    assert counts([a, same, same], (a, same)) == [1, 2]
    assert counts([a, b, replace(a)], (a, b, a)) == [1, 1, 1]
    assert counts([replace(a)] * 3, (a, same)) is None  # nothing says where the first stage ends
    assert counts([a, a], (a, a)) is None
    assert counts([b, a], (a, b)) is None
    assert counts([a], (a, b)) is None


def test_steps_that_cannot_be_split_into_stages_are_an_error() -> None:
    model = randomise(dsnet.create_model("ds_mbnet_tiny"))
    assert isinstance(model, dsnet.Supernet)
    model._stages.update(dict.fromkeys(model._stages))
    message = error_of(lambda: model.run_stages(images(model, 1), 0))
    assert "segment_steps" in message
    assert "width=8" in message
