"""Latency tables: their contents and their checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsnet
from dsnet.models.supernet import ModelSpec
from dsnet.routing import LatencyTable
from dsnet.routing.latency import BatchTimes, Time, device_name
from tests.support import error_of

NAMES = ["ds_mbnet_tiny", "ds_resnet_tiny", "ds_vit_plus_tiny"]
CPU = torch.device("cpu")


def entry(batch: int) -> BatchTimes:
    """Two gates of two and three choices; no two times are alike."""
    first = tuple(Time(10.0 + c, 20.0 + c) for c in range(2))
    second = tuple(tuple(Time(100.0 + 10 * p + c, 200.0 + 10 * p + c) for c in range(3)) for p in range(2))
    return BatchTimes(batch=batch, prefix=Time(float(batch), 2.0 * batch), segments=((first,), second))


def hand_made(**changes: Any) -> LatencyTable:  # noqa: ANN401  (any field)
    facts: dict[str, Any] = {
        "model": ModelSpec(name="mine", options=(("norm", "group"), ("num_classes", 7))),
        "image_size": (32, 64),
        "kind": "cpu",
        "device": "Some CPU",
        "backend": "eager",
        "backend_version": "2.11",
        "memory": "shared",
        "dtype": "float32",
        "threads": 2,
        "torch_version": "2.11",
        "date": "2026-01-31",
        "entries": (entry(2), entry(8)),
    }
    return LatencyTable(**(facts | changes))


def test_a_table_survives_plain_data(tmp_path: Path) -> None:
    table = hand_made()
    plain = json.loads(json.dumps(table.to_dict()))
    assert plain == table.to_dict()
    assert plain["format"] == 2
    assert plain["model"] == {"name": "mine", "options": {"norm": "group", "num_classes": 7}}
    assert plain["entries"][1]["segments"][1][0][2] == {"p50": 102.0, "p95": 202.0}
    assert LatencyTable.from_dict(plain) == table
    table.save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == table
    assert len({table, LatencyTable.load(tmp_path / "table.json"), hand_made(threads=3)}) == 2


def test_a_routes_time_is_the_sum_of_its_segments() -> None:
    table = hand_made()
    assert table.at(8).of((1, 2)) == (8.0 + 11.0 + 112.0, 16.0 + 21.0 + 212.0)
    assert table.at(8).of((0, 1)) == (8.0 + 10.0 + 101.0, 16.0 + 20.0 + 201.0)
    assert table.batches == (2, 8)
    assert table.at(8).choices == (2, 3)


def test_costs_are_milliseconds_an_image() -> None:
    table = hand_made()
    costs = table.costs(batch=8)
    assert costs.unit == "ms"
    assert costs.prefix == 1.0
    assert costs.segment(0, None, 1) == 11.0 / 8
    assert costs.segment(1, 1, 2) == 112.0 / 8
    assert costs.of((1, 2)) == pytest.approx(131.0 / 8)
    assert table.costs() == table.costs(2) != costs
    error = error_of(lambda: table.costs(4))
    assert "batch size 4" in error
    assert "2, 8" in error


def test_a_table_is_for_one_network_on_one_device() -> None:
    model = dsnet.create_model("ds_mbnet_tiny", num_classes=7)
    rows = ((tuple(Time(1.0, 1.0) for _ in range(4)),),)
    own = hand_made(
        model=model.spec,
        device=device_name(CPU),
        entries=(BatchTimes(batch=1, prefix=Time(1.0, 1.0), segments=rows),),
    )
    own.check(model, CPU)
    for other, device, words in (
        (replace(own, model=ModelSpec(name="mine")), CPU, ["mine()", "ds_mbnet_tiny(num_classes=7)"]),
        (
            replace(own, model=ModelSpec(name="ds_mbnet_tiny")),
            CPU,
            ["ds_mbnet_tiny()", "ds_mbnet_tiny(num_classes=7)"],
        ),
        (replace(own, entries=(entry(1),)), CPU, ["(2, 3)", "(4,)"]),
        (replace(own, device="Other CPU"), CPU, ["cpu (Other CPU)", f"cpu ({device_name(CPU)})"]),
        (replace(own, kind="cuda"), CPU, [f"cuda ({device_name(CPU)})", f"cpu ({device_name(CPU)})"]),
        (own, torch.device("cuda"), [f"cpu ({device_name(CPU)})", "not cuda"]),
    ):
        error = error_of(lambda other=other, device=device: other.check(model, device))
        for word in [*words, f"`dsnet profile RUN --device {device.type}`"]:
            assert word in error


def test_a_plans_table_names_its_backend_and_may_be_of_another_precision() -> None:
    model = dsnet.create_model("ds_mbnet_tiny")
    rows = ((tuple(Time(1.0, 1.0) for _ in range(4)),),)
    plan = hand_made(
        model=model.spec,
        device=device_name(CPU),
        backend="openvino",
        memory="packed",
        dtype="bfloat16",
        entries=(BatchTimes(batch=1, prefix=Time(1.0, 1.0), segments=rows),),
    )
    plan.check(model, CPU)
    network = replace(plan, memory="shared", backend="eager")
    assert "is of bfloat16, not float32" in error_of(lambda: network.check(model, CPU))
    again = "`dsnet profile RUN --device cpu --backend openvino --precision bfloat16`"
    assert again in error_of(lambda: replace(plan, model=ModelSpec(name="mine")).check(model, CPU))
    assert again in error_of(lambda: plan.check(model, CPU, 64))
    said = error_of(lambda: plan.check(model, torch.device("cuda")))
    assert "`dsnet profile RUN --device cuda`; or use it with --device cpu" in said
    assert "a plan, openvino 2.11, bfloat16, on cpu" in plan.ran


def test_a_table_of_the_first_format_is_one_of_the_network_itself() -> None:
    plain = hand_made().to_dict() | {"format": 1}
    del plain["memory"], plain["backend_version"]
    assert LatencyTable.from_dict(plain) == hand_made()
    del plain["torch_version"]
    assert "torch_version is missing" in error_of(lambda: LatencyTable.from_dict(plain))


def change(*path: str | int, to: object = None, drop: bool = False) -> Callable[[dict[str, Any]], object]:
    """Something to be done to the plain form, at one place of it."""

    def apply(plain: Any) -> object:  # noqa: ANN401  (a dict or a list)
        for key in path[:-1]:
            plain = plain[key]
        return plain.pop(path[-1]) if drop else plain.__setitem__(path[-1], to)

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (change("format", to=3), "format 3 cannot be read; only up to 2"),
        (change("memory", to="borrowed"), "memory is 'borrowed', expected 'shared' or 'packed'"),
        (change("backend", to=None), "backend is None, expected text"),
        (change("format", drop=True), "format is missing"),
        (change("threads", drop=True), "threads is missing, expected a whole number"),
        (change("colour", to="red"), "colour is unknown; possible: format, model"),
        (change("threads", to="two"), "threads is 'two', expected a whole number"),
        (change("kind", to="tpu"), "kind is 'tpu', expected 'cpu' or 'cuda'"),
        (change("model", to="mine"), "model is 'mine', expected an object with name, options"),
        (change("model", "options", drop=True), "model.options is missing"),
        (change("model", "options", to=[1]), "model.options is [1], expected an object"),
        (change("image_size", to=[32]), "image_size is [32], expected a list of 2"),
        (change("entries", to=[]), "entries is [], expected a list of at least 1"),
        (change("entries", to=5), "entries is 5, expected a list"),
        (change("entries", 1, "batch", to=2), "smallest first, not [2, 2]"),
        (change("entries", 1, "batch", to=1), "smallest first, not [2, 1]"),
        (change("entries", 1, "batch", to=0), "entries[1].batch is 0, expected a whole number from 1"),
        (change("entries", 0, "prefix", drop=True), "entries[0].prefix is missing"),
        (change("entries", 0, "prefix", to=[1, 2]), "prefix is [1, 2], expected an object with p50, p95"),
        (
            change("entries", 0, "prefix", "p50", to=-1.0),
            "prefix.p50 is -1.0, expected a finite number of at least 0",
        ),
        (change("entries", 0, "prefix", "p95", to=float("inf")), "entries[0].prefix.p95 is inf"),
        (change("entries", 0, "prefix", "p95", to=0.5), "in this order"),
        (change("entries", 0, "prefix", "p95", to="1"), "p95 is '1', expected a finite number"),
        (change("entries", 0, "prefix", "p95", to=10**400), "p95 is 1000"),
        (
            change("entries", 1, "segments", 1, 1, 2, "p50", to=float("nan")),
            "entries[1].segments[1][1][2].p50 is nan",
        ),
        (change("entries", 1, "segments", 1, 1, 2, drop=True), "gate 1: 2 × 3 times are needed"),
        (change("entries", 1, "segments", 1, 1, drop=True), "gate 1: 2 × 3 times are needed"),
        (change("entries", 1, "segments", 1, drop=True), "choices differ"),
        (change("entries", 1, "segments", to=[]), "entries[1].segments is []"),
        (change("entries", 1, "segments", 0, to=[]), "entries[1].segments[0] is []"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    spoil: Callable[[dict[str, Any]], object], words: str, tmp_path: Path
) -> None:
    plain = hand_made().to_dict()
    spoil(plain)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(plain))
    error = error_of(lambda: LatencyTable.load(path))
    assert str(path) in error
    assert words in error


def test_files_that_are_not_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    assert f"--out {path}" in error_of(lambda: LatencyTable.load(path))
    for content, words in (
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "the content is [1], expected an object"),
        (b"null", "the content is None, expected an object"),
    ):
        path.write_bytes(content)
        error = error_of(lambda: LatencyTable.load(path))
        assert str(path) in error
        assert words in error
    assert str(tmp_path) in error_of(lambda: LatencyTable.load(tmp_path))
    missing = tmp_path / "no" / "table.json"
    assert f"{missing} cannot be written" in error_of(lambda: hand_made().save(missing))
