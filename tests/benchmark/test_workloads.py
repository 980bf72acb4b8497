"""Mixes: shares that add up to 1, forced routes, and the routes that a calibrated router chose."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsnet
from dsnet.benchmark.workloads import CASCADE_SHARE, Cascade, measured_mix, mix_of
from dsnet.calibration.calibration import Calibration
from dsnet.cli import main
from dsnet.models.group_by_route import run_assigned
from dsnet.routing import CostTable
from dsnet.routing.policies import OperatingPoint
from dsnet.routing.router import Router
from dsnet.runtime.forced_routes import sample_routes
from dsnet.training import save_checkpoint
from tests.support import assert_close, error_of
from tests.support.networks import network, pictures, plan_of

SHARES = st.dictionaries(st.integers(0, 13), st.floats(0.01, 1), min_size=1, max_size=6)


@given(weights=SHARES, images=st.integers(1, 300), seed=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_forced_routes_have_the_shares_up_to_one_image(
    weights: dict[int, float], images: int, seed: int
) -> None:
    total = sum(weights.values())
    shares = {number: weight / total for number, weight in weights.items()}
    routes = sample_routes(shares, images, seed)
    assert len(routes) == images
    counts = Counter(routes)
    assert all(abs(counts[number] - share * images) < 1 for number, share in shares.items())
    assert routes == sample_routes(shares, images, seed)


def test_shares() -> None:
    model = network("ds_mbnet_tiny")
    assert mix_of(model, "uniform").shares == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    assert mix_of(model, {3: 1, 0: 3, 1: 0}).shares == {0: 0.75, 3: 0.25}
    assert "possible: uniform" in error_of(lambda: mix_of(model, "even"))
    assert "no route 9" in error_of(lambda: mix_of(model, {9: 1}))
    assert "at least 0" in error_of(lambda: mix_of(model, {0: -1}))
    assert "above 0" in error_of(lambda: mix_of(model, {0: 0}))
    assert "finite sum" in error_of(lambda: mix_of(model, dict.fromkeys(range(4), 1e308)))
    narrowed = copy.deepcopy(model)
    narrowed.reset_routing(model.space.narrow([0, 3]))
    assert mix_of(narrowed, "uniform").shares == {0: 0.5, 3: 0.5}
    assert "does not decide for route 1" in error_of(lambda: mix_of(narrowed, {0: 0.5, 1: 0.5}))


def test_a_uniform_mix_of_many_routes_is_sampled_and_says_so() -> None:
    few, many = network("ds_resnet_tiny"), dsnet.create_model("ds_resnet_cifar", device="meta")
    assert set(mix_of(few, "uniform").shares) == set(range(16))
    assert mix_of(few, "uniform").source == "uniform"
    mix = mix_of(many, "uniform")
    assert len(mix.shares) == 32
    assert set(mix.shares.values()) == {1 / 32}
    assert max(mix.shares) > 128, "not only the small ones"
    assert mix == mix_of(many, "uniform")
    assert mix.source == "uniform over 32 of 256 routes, sampled"


@pytest.mark.parametrize(("name", "bn_key"), [("ds_mbnet_tiny", None), ("ds_resnet_tiny", "stage")])
@given(numbers=st.lists(st.integers(0, 3) | st.integers(0, 15), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_images_run_at_their_forced_routes(name: str, bn_key: str | None, numbers: list[int]) -> None:
    model = network(name, torch.float64, bn_key)
    routes = [model.space[number % len(model.space)] for number in numbers]
    x = pictures(model, len(routes))
    output = run_assigned(model, x, torch.tensor([route.choices for route in routes]))
    assert [tuple(choices) for choices in output.choices.tolist()] == [route.choices for route in routes]
    for image, route in enumerate(routes):
        assert_close(output.logits[image : image + 1], model(x[image : image + 1], route), 1e-9)


def test_plans_run_images_at_their_forced_routes() -> None:
    model, compiled = network("ds_resnet_tiny"), plan_of("ds_resnet_tiny", "eager").network
    numbers = sample_routes(mix_of(model, "uniform").shares, 40)
    x = pictures(model, 40)
    output = run_assigned(compiled, x, torch.tensor([model.space[number].choices for number in numbers]))
    counts = Counter(model.space.of_choices(tuple(choices)).number for choices in output.choices.tolist())
    assert counts == Counter(numbers)
    assert set(counts.values()) == {2, 3}
    for number in set(numbers):
        rows = [row for row, route in enumerate(numbers) if route == number]
        assert_close(output.logits[rows], model(x[rows], number), 1e-4)


# --- measured mixes --------------------------------------------------------------------------------------
COSTS = CostTable(unit="madds", prefix=100.0, segments=(((100.0, 200.0, 400.0, 900.0),),))
GATE = Router(
    kind="gate",
    costs=COSTS,
    curve=(
        OperatingPoint(cost=250.0, accuracy=0.6, parameters=(2.0,), route_counts=((0, 6), (1, 2))),
        OperatingPoint(cost=500.0, accuracy=0.8, parameters=(1.0,), route_counts=((0, 1), (2, 3), (3, 4))),
    ),
)
CASCADE = Router(
    kind="cascade",
    costs=COSTS,
    curve=(
        OperatingPoint(cost=200.0, accuracy=0.7, routes=(0,), route_counts=((0, 8),)),
        OperatingPoint(
            cost=510.0,
            accuracy=0.7,
            parameters=(0.5, 0.2),
            routes=(0, 2, 3),
            route_counts=((0, 4), (2, 3), (3, 1)),
        ),
        OperatingPoint(
            cost=990.0, accuracy=0.9, parameters=(0.9, 0.0), routes=(0, 1, 3), route_counts=((1, 8),)
        ),
    ),
)
CALIBRATION = Calibration(
    images=8, digest="x", routers={"gate": GATE, "cascade": CASCADE}, singles={0: 0.5, 3: 0.9}
)


def test_a_measured_mix_has_the_routes_that_the_router_chose_at_the_budget() -> None:
    model = network("ds_mbnet_tiny")
    gated = measured_mix(model, CALIBRATION, "50%")
    assert gated.shares == {0: 1 / 8, 2: 3 / 8, 3: 4 / 8}
    assert gated.cascade == Cascade((0, 3), (1.0, CASCADE_SHARE))
    assert gated.source == "as chosen by its gate at 500 MAdds for 8 calibration images"
    cascade = measured_mix(model, CALIBRATION, "51%", "cascade")
    assert cascade.shares == {0: 4 / 8, 2: 3 / 8, 3: 1 / 8}
    assert cascade.cascade == Cascade((0, 2, 3), (1.0, 4 / 8, 1 / 8))
    assert cascade.cascade.final_shares == {0: 4 / 8, 1: 3 / 8, 2: 1 / 8}
    alone = measured_mix(model, CALIBRATION, "20%")
    assert (alone.shares, alone.cascade) == ({0: 1.0}, Cascade((0,), (1.0,)))
    unreached_last = measured_mix(model, CALIBRATION, 990.0)
    assert unreached_last.cascade == Cascade((0, 1), (1.0, 1.0))


def test_a_measured_mix_needs_a_reachable_budget_and_counts_of_routes() -> None:
    model = network("ds_mbnet_tiny")
    assert "out of reach" in error_of(lambda: measured_mix(model, CALIBRATION, "5%"))
    assert "another unit" in error_of(lambda: measured_mix(model, CALIBRATION, "5ms"))
    bare = Router(
        kind="gate", costs=COSTS, curve=(OperatingPoint(cost=250.0, accuracy=0.6, parameters=(2.0,)),)
    )
    without_counts = Calibration(images=8, digest="x", routers={"gate": bare}, singles={})
    assert "no counts of routes" in error_of(lambda: measured_mix(model, without_counts, 250.0))
    assert "no cascade here" in error_of(lambda: measured_mix(model, without_counts, 250.0, "cascade"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, of which one has a calibration in its final checkpoint."""
    runs = tmp_path_factory.mktemp("runs")
    for name, data in (("calibrated", {"routing": CALIBRATION.to_dict()}), ("bare", {})):
        (runs / name).mkdir()
        save_checkpoint(runs / name, "final", network("ds_mbnet_tiny"), step=1, data=data)
    return runs


def test_the_command_times_a_measured_mix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mix", "measured", "--budget", "51%", "--router", "cascade", "--batch", "4", "--repeats", "1"]
    words += ["--backend", "eager", "--device", "cpu"]
    assert main(["bench", str(folder / "calibrated"), *words]) == 0
    shown = capsys.readouterr().out
    assert "as chosen by its cascade at 510 MAdds for 8 calibration images: 50% at 0 (" in shown
    assert re.search(r"50% at 0 \(\S+\), 38% at 2 \(\S+\), 12% at 3 \(\S+\)", shown)
    assert "cascade plan: route 0 for all images, then route 2 for 50%, then route 3 for 12%" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bare", "--mix", "measured", "--budget", "50%"], "is not calibrated; run `dsnet calibrate"),
        (["calibrated", "--mix", "measured"], "needs --budget"),
        (["calibrated", "--mix", "measured", "--budget", "1%"], "out of reach"),
        (
            ["calibrated", "--mix", "measured", "--budget", "50%", "--routes", "0,1"],
            "--routes is for other mixes",
        ),
        (["calibrated", "--budget", "50%"], "are for --mix measured"),
    ],
)
def test_invalid_options_are_refused(
    folder: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(folder / words[0]), "--backend", "eager", *words[1:]]) == 2
    assert says in capsys.readouterr().err


def test_a_model_by_name_has_no_measured_mix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ds_mbnet_tiny", "--mix", "measured", "--budget", "50%"]) == 2
    assert "folder of a run that `dsnet calibrate` has calibrated" in capsys.readouterr().err
