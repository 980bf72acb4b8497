"""Schemes: their parts, those of a user, and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dsnet
from dsnet.routes import Route, RouteSpace
from dsnet.training import Scheme, register_scheme, train
from dsnet.training.config import SchemeConfig
from dsnet.training.stage1 import scheme as schemes
from tests.support import error_of
from tests.support.training import SHORT, metrics


def test_the_sandwich_is_largest_random_smallest() -> None:
    space = dsnet.create_model("ds_mbnet", device="meta").space
    for seed in range(20):
        routes = Scheme.parse("ib").draw(space, 2, torch.Generator().manual_seed(seed))
        assert (routes[0], routes[-1]) == (space.largest, space.smallest)
        assert all(0 < route.number < 13 for route in routes[1:-1])
    single = {
        Scheme.parse("label+single").draw(space, 2, torch.Generator().manual_seed(s)) for s in range(200)
    }
    assert {len(routes) for routes in single} == {1}
    assert len(single) == 14


def test_the_sandwich_over_image_sizes() -> None:
    """The largest slice at the largest size, the smallest at the smallest; all other pairs between them."""
    space = dsnet.create_model("ds_mbnet_tiny", image_sizes=(8, 16), device="meta").space
    plain = dsnet.create_model("ds_mbnet_tiny", device="meta").space
    seen = set()
    for seed in range(60):
        routes = Scheme.parse("ib").draw(space, 2, torch.Generator().manual_seed(seed))
        assert (routes[0].image_size, routes[0].stages) == (16, plain.largest.stages)
        assert (routes[-1].image_size, routes[-1].stages) == (8, plain.smallest.stages)
        seen |= {(route.image_size, route.stages) for route in routes}
    assert seen == {(size, route.stages) for size in (8, 16) for route in plain}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("iib", ["'iib'", "e-ib"]),
        ("id+ib", ["id and ib", "one teacher"]),
        ("ib+ib", ["twice"]),
        ("ed+ib", ["cannot be combined"]),
        ("id+h-ib", ["h-ib", "e-ib"]),
        ("ib+single", ["single", "label"]),
    ],
)
def test_parts_that_do_not_combine_are_errors(text: str, words: list[str]) -> None:
    message = error_of(lambda: Scheme.parse(text))
    for word in words:
        assert word in message


@pytest.fixture
def ends_by_squares(monkeypatch: pytest.MonkeyPatch) -> str:
    """The smallest and the largest network; the smallest learns the average's probabilities by squares."""
    monkeypatch.setattr(schemes, "_PARTS", dict(schemes._PARTS))

    def squares(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        return (logits.softmax(1) - target.softmax(1)).square().sum(1).mean()

    def ends(space: RouteSpace, random: int, generator: torch.Generator | None) -> tuple[Route, ...]:
        return space.largest, space.smallest

    @register_scheme("ends-by-squares")
    def ends_by_squares(scheme: Scheme) -> Scheme:
        return replace(scheme, target="ib", label_share=0.25, draw=ends, soft_loss=squares)

    return "ends-by-squares"


def test_a_registered_scheme_trains(ends_by_squares: str, tmp_path: Path) -> None:
    config = replace(SHORT, scheme=SchemeConfig(name=f"{ends_by_squares}+mvco"))
    assert train(config, tmp_path / "run").status.finished
    (losses,) = metrics(tmp_path / "run", "train")
    assert {key for key in losses if "/" in key} == {"largest/label", "smallest/label", "smallest/ib"}
    assert 0 < losses["smallest/ib"] < 2  # squares of probabilities; a cross-entropy begins at ln 10


def test_a_registered_part_combines_with_others(ends_by_squares: str) -> None:
    scheme = Scheme.parse(f"{ends_by_squares} + mvco")
    space = dsnet.create_model("ds_mbnet_tiny", device="meta").space
    assert (scheme.own_views, scheme.target, scheme.label_share) == (True, "ib", 0.25)
    assert scheme.networks(space, random=2) == 2


def test_a_name_is_registered_once_and_without_a_plus(ends_by_squares: str) -> None:
    message = error_of(lambda: register_scheme(ends_by_squares)(lambda scheme: scheme))
    assert "registered already; registered: id, ib, e-ib, h-ib, ed, label, mvco, single" in message
    assert "not a possible name" in error_of(lambda: register_scheme("a+b")(lambda scheme: scheme))


def test_an_unknown_scheme_is_an_error_that_lists_the_registered_ones() -> None:
    message = error_of(lambda: SchemeConfig(name="label+mine"))
    assert "unknown scheme 'mine'; registered: id, ib, e-ib, h-ib, ed, label, mvco, single" in message
    assert "--import" in message
