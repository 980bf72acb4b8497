"""The benchmark of plans: shares that add up, ideals by hand, a table and a file."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsnet
from dsnet.cli import main
from dsnet.runtime.bench import CASCADE_SHARE, bench, decisions, shares_of
from tests.runtime.conftest import network
from tests.support import error_of

SHARES = st.dictionaries(st.integers(0, 13), st.floats(0.01, 1), min_size=1, max_size=6)


@given(weights=SHARES, images=st.integers(1, 300), seed=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_decisions_are_as_near_to_the_shares_as_whole_images_come(
    weights: dict[int, float], images: int, seed: int
) -> None:
    total = sum(weights.values())
    shares = {number: weight / total for number, weight in weights.items()}
    made = decisions(shares, images, seed)
    assert len(made) == images
    counts = Counter(made)
    assert all(abs(counts[number] - share * images) < 1 for number, share in shares.items())
    assert made == decisions(shares, images, seed)


def test_shares() -> None:
    model = network("ds_mbnet_tiny")
    assert shares_of(model, "uniform") == {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}
    assert shares_of(model, {3: 1, 0: 3, 1: 0}) == {0: 0.75, 3: 0.25}
    assert "possible: uniform" in error_of(lambda: shares_of(model, "even"))
    assert "no route 9" in error_of(lambda: shares_of(model, {9: 1}))
    assert "at least 0" in error_of(lambda: shares_of(model, {0: -1}))
    assert "above 0" in error_of(lambda: shares_of(model, {0: 0}))
    assert "finite sum" in error_of(lambda: shares_of(model, dict.fromkeys(range(4), 1e308)))
    narrowed = copy.deepcopy(model)
    narrowed.reset_routing(model.space.narrow([0, 3]))
    assert "does not decide for route 1" in error_of(lambda: shares_of(narrowed, {0: 0.5, 1: 0.5}))
    for wrong in ({"batches": (0,)}, {"repeats": 0}, {"batches": ()}):
        assert "positive integers" in error_of(lambda wrong=wrong: bench(model, backend="eager", **wrong))


def test_ideal_ratio_and_theory_are_what_they_say() -> None:
    model = network("ds_mbnet_tiny")
    found = bench(model, batches=(1, 6), mix={0: 0.75, 3: 0.25}, backend="eager", repeats=2)
    cost = {number: dsnet.madds(model, number) for number in (0, 3)}
    assert found.theory == pytest.approx(cost[3] / (0.75 * cost[0] + 0.25 * cost[3]))
    for result in found.results:
        ms = {way: spread.median for way, spread in result.times.items()}
        assert result.ideal == pytest.approx(0.75 * ms["alone 0"] + 0.25 * ms["alone 3"])
        assert result.ideal_cascade == pytest.approx(ms["alone 0"] + CASCADE_SHARE * ms["suffix"])
        assert result.ratio == pytest.approx(result.ideal / ms["gated"])
        assert result.speedup == pytest.approx(ms["full"] / ms["gated"])
        assert all(spread.low <= spread.median <= spread.high for spread in result.times.values())
    assert json.loads(json.dumps(found.to_dict()))["shares"] == {"0": 0.75, "3": 0.25}
    assert "several gates" in error_of(lambda: bench(network("ds_resnet_tiny")))


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mix, out = tmp_path / "mix.json", tmp_path / "bench.json"
    mix.write_text('{"0": 7, "2": 3}', encoding="utf-8")
    words = [
        "bench",
        "ds_mbnet_tiny",
        "--batch",
        "1",
        "4",
        "--mix",
        str(mix),
        "--repeats",
        "2",
        "--backend",
        "eager",
    ]
    monkeypatch.setattr("sys.argv", ["dsnet", *words, "--out", str(out)])
    assert main([*words, "--device", "cpu", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "70% at 0, 30% at 2" in shown
    assert "speed-up" in shown
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["benchmark"] == "bench"
    assert [row["batch"] for row in data["results"]] == [1, 4]
    assert data["command"].startswith("dsnet bench ds_mbnet_tiny --batch 1 4")
    assert "--out" not in data["command"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mix", "nowhere.json"], "cannot be read"),
        (["--routes", "99"], "99"),
        (["--out", "no/such/folder/x.json"], "in a folder that is there"),
    ],
)
def test_what_cannot_be_benched(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "ds_mbnet_tiny", "--repeats", "1", "--batch", "1", "--backend", "eager", *words]) == 2
    )
    assert says in capsys.readouterr().err
