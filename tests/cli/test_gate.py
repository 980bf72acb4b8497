"""`dsnet gate`, `dsnet calibrate` and `dsnet evaluate --routed`, from a trained run to a comparison."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dsnet
from dsnet.calibration import Calibration, collect, simulate
from dsnet.calibration.compare import compare
from dsnet.cli import main
from dsnet.core.checkpoint import load_checkpoint
from dsnet.models.loading import build_network
from dsnet.routing import CostTable, LatencyTable, Routed
from dsnet.runtime.profile import profile
from dsnet.training import open_trained
from dsnet.training.api import train
from dsnet.training.run_dir import locked
from tests.support import error_of, rewrite
from tests.support.docs import code_blocks
from tests.support.routed_run import BASE

pytestmark = pytest.mark.xdist_group("commands")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose gate is trained and whose routers are calibrated."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    data = replace(BASE.data, hold_out=0.3)  # so that a budget can be kept to a percent
    train(replace(BASE, data=data), folder)
    assert main(["gate", str(folder), "--set", "goal=value", "--set", "lr=0.2"]) == 0
    assert main(["calibrate", str(folder)]) == 0
    return folder


def out_of(capsys: pytest.CaptureFixture[str], *args: object, status: int = 0) -> str:
    """What a command prints."""
    capsys.readouterr()
    assert main([str(arg) for arg in args]) == status
    printed = capsys.readouterr()
    return printed.out if status == 0 else printed.err


def test_budgets_are_kept_on_held_out_and_test_images(run: Path) -> None:
    """Within 2 % on the calibration images; on the test split within 5 % or three standard errors."""
    opened = open_trained(run, device="cpu")
    calibration = Calibration.of(opened.saved, run)
    held_out = collect(opened.model, opened.seen(opened.held_out))
    tested = collect(opened.model, opened.seen(opened.test))
    assert calibration.digest == held_out.digest
    assert calibration.images == len(held_out) > 400
    for kind, router in calibration.routers.items():
        low, high = router.curve[0].cost, router.curve[-1].cost
        kept = 0
        for share in (0.1, 0.3, 0.5, 0.7, 0.9):
            budget = low + share * (high - low)
            policy = router.policy(budget)
            if kind == "single":  # a budget need not be spent
                kept += simulate(policy, held_out).cost <= budget
                continue
            assert simulate(policy, held_out).cost == pytest.approx(budget, rel=0.02), kind
            seen = simulate(policy, tested)
            kept += abs(seen.cost - budget) <= max(0.05 * budget, 3 * seen.cost_error)
        assert kept == 5, kind


def test_calibration_is_saved_with_the_checkpoint(run: Path) -> None:
    saved = load_checkpoint(run)
    calibration = Calibration.of(saved, run)
    assert set(calibration.routers) == {"gate", "cascade", "single"}
    assert Calibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration
    for router in calibration.routers.values():
        assert all(sum(count for _, count in p.route_counts) == calibration.images for p in router.curve)
    routed = dsnet.load(run).routed("50%", router="cascade")
    assert isinstance(routed, Routed)
    opened = open_trained(run, device="cpu")
    x, _ = next(opened.seen(opened.test, 64))
    output = routed.run(x)
    assert torch.equal(routed(x), output.logits)
    for i in (0, 7, 31):  # an image alone gets the answer of its route
        alone = routed.model(x[i : i + 1], int(output.routes[i]))
        assert torch.allclose(output.logits[i : i + 1], alone, atol=1e-4)
    cheaper = routed.at("25%")
    costs = [sum(one.cost(r) for r in one.run(x).routes.tolist()) for one in (cheaper, routed)]
    assert costs[0] < costs[1]


def test_auto_picks_the_most_accurate_router(run: Path) -> None:
    calibration = Calibration.of(load_checkpoint(run), run)
    low, high = calibration.budget_range()
    for share in (0.2, 0.5, 0.8):
        budget = low + share * (high - low)
        found = {kind: r.point(budget).accuracy for kind, r in calibration.routers.items()}
        pick = calibration.pick(budget)
        assert found[pick.kind] == max(found.values())
        assert pick.gain == pytest.approx(max(found.values()) - sorted(found.values())[-2])
        assert calibration.router("auto", budget) is calibration.routers[pick.kind]


def test_calibrate_prints_cost_and_accuracy_of_a_budget(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(out_of(capsys, "calibrate", run, "--target-madds", "45%", "--json"))
    (row,) = told["budgets"]
    assert row["cost"] == pytest.approx(row["target"], rel=0.02) or row["router"] == "single"
    assert row["router"] in ("gate", "cascade", "single")
    assert set(row["accuracies"]) == {"gate", "cascade", "single"}
    assert told["verdict"]["text"].startswith("Routing ")
    page = run / "report.html"
    page.write_text("as training left it")
    shown = out_of(capsys, "calibrate", run, "--target-madds", "45%", "--router", "gate")
    said = load_checkpoint(run).data["routing"]["verdict"]["text"]
    assert said.startswith("Routing ")
    assert f"<strong>{said}</strong>" in page.read_text()
    page.unlink()
    assert "gate" in shown
    assert "dsnet evaluate" in shown
    before = load_checkpoint(run).data["routing"]
    assert "reach" in out_of(capsys, "calibrate", run, "--target-madds", "300M", status=2)
    assert "budget" in out_of(capsys, "calibrate", run, "--target-madds", "", status=2)
    assert load_checkpoint(run).data["routing"] == before
    assert "would do" in out_of(capsys, "calibrate", run, "--target-madds", "99%")
    assert "--latency-table" in out_of(capsys, "calibrate", run, "--target-ms", "5", status=2)
    assert "another unit" in out_of(capsys, "calibrate", run, "--target-madds", "5ms", status=2)


def test_milliseconds_as_the_cost(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_network(load_checkpoint(run))
    table = profile(model, batches=(1,), repeats=2)
    table.save(tmp_path / "t.json")
    other = profile(dsnet.create_model("ds_vit_plus_tiny"), batches=(1,), repeats=1)
    other.save(tmp_path / "other.json")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    told = json.loads(out_of(capsys, "calibrate", copy, "--latency-table", tmp_path / "t.json", "--json"))
    assert told["unit"] == "ms"
    routed = dsnet.load(copy).routed(told["budgets"][4]["target"])
    assert routed.router.costs.unit == "ms"
    given = ("calibrate", copy, "--latency-table", tmp_path / "t.json")
    assert "give --target-ms" in out_of(capsys, *given, "--target-madds", "60%", status=2)
    assert "another unit" in out_of(capsys, *given, "--target-ms", "300M", status=2)
    wrong = out_of(capsys, "calibrate", copy, "--latency-table", tmp_path / "other.json", status=2)
    assert "ds_vit_plus_tiny" in wrong
    capsys.readouterr()
    assert main(["gate", str(copy), "--set", f"latency={tmp_path / 't.json'}", "--set", "epochs=1"]) == 0
    logged = capsys.readouterr().err.splitlines()  # stderr is no terminal here, and not silent
    assert any(line.startswith("looking at the images: done after") for line in logged)
    assert any("epoch 1 step" in line for line in logged)


def test_milliseconds_of_a_plan(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openvino")
    table, copy = tmp_path / "t.json", tmp_path / "run"
    shutil.copytree(run, copy)
    options = ["--device", "cpu", "--backend", "openvino", "--repeats", "3", "--out", str(table)]
    assert main(["profile", str(copy), *options]) == 0
    assert "a plan, openvino 20" in capsys.readouterr().out
    costs = LatencyTable.load(table).costs()
    target = (costs.of((0,)) + costs.largest) / 2
    shown = out_of(capsys, "calibrate", copy, "--latency-table", table, "--target-ms", f"{target:.4f}")
    assert "milliseconds of a plan, openvino 20" in shown
    assert ", batch 1\n" in shown
    routed = dsnet.load(copy).routed(f"{target:.4f}ms")
    assert routed.router.costs == costs
    assert routed.router.point(target).cost <= target


def test_evaluate_compares_routers_with_single_routes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = replace(BASE.data, hold_out=0.3)
    alone = replace(
        BASE, data=data, scheme=replace(BASE.scheme, route=3), optim=replace(BASE.optim, epochs=1)
    )
    train(alone, tmp_path / "alone")
    common = ("evaluate", run, "--routed", "--alone", tmp_path / "alone")
    told = json.loads(
        out_of(capsys, *common, "--json", "--csv", tmp_path / "r.csv", "--plot", tmp_path / "r.svg")
    )
    opened = open_trained(run, device="cpu")
    outputs = collect(opened.model, opened.seen(opened.test))
    for row in told["rows"]:
        assert row["alone"] == pytest.approx(told["alone"][0][1])
        assert sum(row["taken"].values()) == told["images"] == len(outputs)
        assert row["by_difficulty"]["easy"] is not None
    assert sum(told["shares"].values()) == pytest.approx(1)
    accuracies = outputs.correct.double().mean(0).tolist()
    assert [p["accuracy"] for p in told["single_routes"]] == pytest.approx(accuracies)
    held_out = Calibration.of(opened.saved, run).singles
    for row in told[
        "rows"
    ]:  # one meaning in all: the measured accuracy of one route, chosen on held-out images
        priced = {p["route"]: p for p in told["single_routes"] if p["cost"] <= row["budget"]}
        assert row["single"] == max(priced, key=lambda n: (held_out[n], -priced[n]["cost"]))
        assert row["single_accuracy"] == priced[row["single"]]["accuracy"]
        assert row["gain"] == pytest.approx(row["accuracy"] - row["single_accuracy"])
        assert row["router"] != "single" or row["gain"] == row["gain_error"] == 0
    assert told["verdict"]["text"].startswith("Routing ")
    assert told["oracle"][1] == pytest.approx(outputs.correct.any(1).double().mean().item())
    with (tmp_path / "r.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(told["rows"])
    assert (tmp_path / "r.svg").read_text().startswith("<svg")
    text = out_of(capsys, *common, "--budget", "40%", "--plot", tmp_path / "r.html")
    assert "stand-alone" in text
    assert "Routes that answered, cascade" in text
    assert "Routing " in text.split("same histogram")[1]
    assert "static mix" in text
    shown = (tmp_path / "r.html").read_text()
    assert "<svg" in shown
    assert "<strong>Routing " in shown
    assert "static mix" not in shown  # the chart's single routes are measured ones, as the table's
    assert "scheme.route" in out_of(capsys, "evaluate", run, "--routed", "--alone", run, status=2)
    assert "for --routed" in out_of(capsys, "evaluate", run, "--budget", "40%", status=2)
    both = ("--budget", "40%", "--budget", "500%")
    assert "out of reach" in out_of(capsys, "evaluate", run, "--routed", *both, status=2)


def test_the_comparison_equals_a_run_of_the_router(run: Path) -> None:
    opened = open_trained(run, device="cpu")
    outputs = collect(opened.model, opened.seen(opened.test))
    calibration = Calibration.of(opened.saved, run)
    budget = 0.4 * calibration.costs.largest
    for row in compare(outputs, calibration, [budget]).rows:
        routed = Routed(opened.model, calibration.routers[row.router], budget)
        right, cost, count = 0, 0.0, 0
        for x, labels in opened.seen(opened.test, 100):
            output = routed.run(x)
            right += int((output.logits.argmax(1) == labels).sum())
            cost += sum(map(routed.cost, output.routes.tolist()))
            count += len(labels)
        assert row.accuracy == pytest.approx(right / count, abs=1.01 / count)  # rounding may tip an image
        assert row.cost == pytest.approx(cost / count, rel=0.005)


def test_errors_name_the_command_that_has_to_run_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = out_of(capsys, "evaluate", run, "--routed", "--name", "final", status=2)
    assert f"dsnet calibrate {run} --name final" in unknown
    assert f"dsnet calibrate {run} --name final" in error_of(lambda: dsnet.load(run, "final").routed("45%"))
    assert "dsnet gate" in out_of(capsys, "calibrate", run, "--name", "final", "--router", "gate", status=2)
    assert "no checkpoint" in out_of(capsys, "calibrate", tmp_path, status=2)
    assert "no checkpoint" in out_of(capsys, "gate", tmp_path, status=2)
    assert "did you mean" in out_of(capsys, "gate", run, "--set", "epoch=3", status=2)
    assert "goal must be paper or value" in out_of(capsys, "gate", run, "--set", "goal=best", status=2)
    plain = json.loads(out_of(capsys, "gate", run, "--dry-run", "--json", "--set", "space=0,3"))
    assert plain["space"] == "0,3"
    with pytest.raises(SystemExit):
        main(["calibrate", str(run), "--sweep", "--target-madds", "45%"])
    routers = Calibration.of(load_checkpoint(run), run)
    assert "needs a budget" in error_of(lambda: routers.router("auto"))
    assert "unknown router" in error_of(lambda: routers.router("best"))  # type: ignore[arg-type]


def test_recalibrating_norms_removes_the_calibration(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    assert "routing" in load_checkpoint(copy).data
    out_of(capsys, "recalibrate", copy, "--images", "300")
    assert "routing" not in load_checkpoint(copy).data
    assert CostTable.of_model(build_network(load_checkpoint(copy))).largest > 0
    before = load_checkpoint(run, "final").data["network"]["gates"]
    assert load_checkpoint(copy).data["network"]["gates"] == before


def test_escape_sequences_in_a_folder_name_are_not_printed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "\x1b[31mred")
    for words in (["gate", "--set", "epochs=1"], ["calibrate"]):
        assert main([words[0], str(copy), *words[1:], "--device", "cpu"]) == 0
        printed = capsys.readouterr()
        assert "\x1b" not in printed.out + printed.err
        assert "\\x1b[31mred" in printed.out


def test_training_a_gate_in_a_log_says_how_far_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", str(run), "--device", "cpu", "--set", "epochs=2", "--save-as", "logged"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("looking at the images") for line in lines)
    assert any(line.startswith("epoch 2 step") for line in lines)


def test_gates_without_a_choice_are_reported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "complexity=50", "--set", "sgs=0", "--set", "target=0", "--save-as", "static"]
    told = out_of(capsys, "gate", run, *settings)
    assert "warning" in told
    assert "goal=value" in told


def test_the_code_of_the_routing_page_runs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "runs" / "digits_mbnet")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"dsnet": dsnet, "images": torch.randn(8, 3, 16, 16)}
    for block in code_blocks("docs/routing.md"):
        exec(block, names)
    assert names["logits"].shape == (8, 10)  # type: ignore[attr-defined]
    assert names["session"].images == 8  # type: ignore[attr-defined]
    assert re.match(r"\((\d, )*\d,?\) [\d.]+$", capsys.readouterr().out.splitlines()[0])


@pytest.mark.parametrize(
    "damage",
    [
        {"routers": {}},
        {"format": 9},
        {"routers": 3},
        {"routers": {"gate": {"kind": "gate"}}},
        {"routers": {"gate": {"kind": "gate", "costs": {}, "curve": [[1]]}}},
    ],
)
def test_a_damaged_calibration_names_the_command_that_renews_it(
    run: Path, tmp_path: Path, damage: dict[str, object]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / (copy / "gated").read_text().strip() / "checkpoint.json"
    data = json.loads(path.read_text())
    data["routing"].update(damage)
    rewrite(path, json.dumps(data))
    message = error_of(lambda: dsnet.load(copy).routed("45%"))
    assert f"dsnet calibrate {copy}" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("gates", [[0, 1, 2, 9]]), ("gates", 3), ("name", "nothing"), ("space", {}), ("heads", [{"kind": 1}])],
)
def test_a_damaged_network_is_an_error_of_one_line(
    run: Path, tmp_path: Path, key: str, value: object
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / (copy / "gated").read_text().strip() / "checkpoint.json"
    data = json.loads(path.read_text())
    data["network"][key] = value
    rewrite(path, json.dumps(data))
    assert error_of(lambda: dsnet.load(copy).routed("45%"))


def test_a_locked_run_is_not_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(run):
        assert "another process" in out_of(capsys, "calibrate", run, status=2)
        assert "another process" in out_of(capsys, "gate", run, status=2)


def test_a_table_of_other_images_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile(build_network(load_checkpoint(run)), repeats=1, image_size=64).save(tmp_path / "t.json")
    said = out_of(capsys, "calibrate", run, "--latency-table", tmp_path / "t.json", status=2)
    assert "64 × 64" in said
    assert "16 × 16" in said


def test_few_calibration_images_give_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(BASE, data=replace(BASE.data, hold_out=0.006), optim=replace(BASE.optim, epochs=1))
    train(few, tmp_path / "few")
    assert "10 images are few" in out_of(capsys, "calibrate", tmp_path / "few")
    said = out_of(capsys, "gate", tmp_path / "few", "--set", "images=held_out", status=2)
    assert "splits 10 images into 10 to train on and 0" in said


def test_a_gate_of_one_route_calibrates(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_of(capsys, "gate", run, "--set", "space=1", "--set", "epochs=1", "--save-as", "one")
    told = json.loads(out_of(capsys, "calibrate", run, "--name", "one", "--router", "gate", "--json"))
    assert {row["cost"] for row in told["budgets"]} == {dsnet.madds(build_network(load_checkpoint(run)), 1)}
