"""The training loop: resumed runs equal uninterrupted ones; files, messages and errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dsnet
from dsnet.core.metrics_log import DivergedError, LossBuffer, MetricsFile
from dsnet.core.settings import to_plain
from dsnet.training import load_checkpoint, load_model
from dsnet.training.api import Outcome, read_config, train
from dsnet.training.config import SchemeConfig
from tests.support import error_of
from tests.support.training import BUSY, CONFIGS, OPTIM, Listen, StopAt, metrics

pytestmark = pytest.mark.xdist_group("loop")


def assert_same_runs(one: Path, other: Path) -> None:
    """Compare weights, statistics, average, projector, optimizer, metrics and results bit by bit."""
    for name in ("last", "best", "final"):
        ours, theirs = load_checkpoint(one, name), load_checkpoint(other, name)
        assert ours.data == theirs.data
        assert set(ours.tensors) == set(theirs.tensors)
        for group, tensors in ours.tensors.items():
            assert set(tensors) == set(theirs.tensors[group])
            for key, value in tensors.items():
                assert torch.equal(value, theirs.tensors[group][key]), (name, group, key)
    # A stop is one more look at the losses, so their means are not comparable; validation is.
    assert metrics(one, "validate") == metrics(other, "validate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    for name, config in CONFIGS.items():
        assert train(config, folder / name).status.finished
    return {name: folder / name for name in CONFIGS}


@pytest.mark.parametrize(
    ("name", "number"), [*((name, signal.SIGTERM) for name in CONFIGS), ("mbnet", signal.SIGINT)]
)
def test_a_stopped_run_resumes_bit_identically(
    whole: dict[str, Path], tmp_path: Path, name: str, number: int
) -> None:
    config = CONFIGS[name]
    stopped = train(config, tmp_path / "run", callback=StopAt(3, number))
    assert (stopped.status.step, stopped.status.steps, stopped.status.signal) == (3, 10, number)
    assert not (tmp_path / "run" / "final").exists()
    assert load_checkpoint(tmp_path / "run").data["step"] == 3
    again = train(config, tmp_path / "run", resume=True, callback=StopAt(5, number))  # at the end of an epoch
    assert again.status.step == 5
    assert train(config, tmp_path / "run", resume=True).status.finished
    assert_same_runs(tmp_path / "run", whole[name])


def test_a_run_over_image_sizes_resumes_bit_identically(tmp_path: Path) -> None:
    config = replace(BUSY, options={"image_sizes": (8, 16)})
    assert train(config, tmp_path / "whole").status.finished
    stopped = train(config, tmp_path / "run", callback=StopAt(3))
    assert (stopped.status.step, stopped.status.finished) == (3, False)
    again = train(config, tmp_path / "run", resume=True)
    assert again.status.finished
    assert_same_runs(tmp_path / "run", tmp_path / "whole")
    model = load_model(tmp_path / "run")
    assert model.image_sizes == (8, 16)
    assert read_config(tmp_path / "run").options == {"image_sizes": (8, 16)}
    assert [result.route for result in again.test] == list(range(8))
    assert [result.madds for result in again.test] == [dsnet.madds(model, n) for n in range(8)]
    assert {result.statistics for result in again.test} == {"calibrated"}


KILL = """
import os, signal, sys
from pathlib import Path
import dsnet.core.checkpoint as checkpoint
from dsnet.training.callbacks import Callback
from dsnet.training.api import train
from tests.support.training import CONFIGS
from dataclasses import replace

where, count = sys.argv[2], int(sys.argv[3])
calls = 0

def then_die(original):
    def call(*args, **options):
        global calls
        calls += 1
        if calls == count:
            if where == "save_file":  # a file cut short
                original(*args, **options)
                with open(args[1], "r+b") as file:
                    file.truncate(100)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)
    return call

class Die(Callback):
    def on_step_end(self, step, epoch, images):
        if where == "step" and step == count:
            os.kill(os.getpid(), signal.SIGKILL)

if where != "step":
    setattr(checkpoint, where, then_die(getattr(checkpoint, where)))
config = CONFIGS["mbnet"]
train(replace(config, run=replace(config.run, save_steps=2)), Path(sys.argv[1]), callback=Die())
"""


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("step", 3),  # in the middle of an epoch
        ("step", 5),  # at its end, before validation
        ("save_file", 6),  # in the middle of writing the second checkpoint
        ("write_text", 2),  # between renaming it and naming it the last
        ("_prune", 2),  # before the older one is removed
    ],
)
def test_a_killed_run_resumes_bit_identically(
    whole: dict[str, Path], tmp_path: Path, where: str, count: int
) -> None:
    arguments = [str(tmp_path / "run"), where, str(count)]
    same = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums depend on the threads
    died = subprocess.run(
        [sys.executable, "-c", KILL, *arguments], timeout=300, capture_output=True, env=same
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert load_checkpoint(tmp_path / "run").data["step"] in (2, 4)
    config = CONFIGS["mbnet"]
    assert train(config, tmp_path / "run", resume=True).status.finished
    left = [p.name for p in (tmp_path / "run").glob(".*")]
    assert left == [".lock"]  # nothing unfinished is left behind
    again, never = load_checkpoint(tmp_path / "run", "final"), load_checkpoint(whole["mbnet"], "final")
    for key, value in never.tensors["model"].items():
        assert torch.equal(value, again.tensors["model"][key]), key


def test_another_seed_is_another_run(whole: dict[str, Path], tmp_path: Path) -> None:
    config = replace(BUSY, run=replace(BUSY.run, seed=1))
    train(config, tmp_path)
    ours, theirs = load_model(tmp_path), load_model(whole["mbnet"])
    assert not torch.equal(ours.head.classifier.weight, theirs.head.classifier.weight)


def test_a_run_writes_settings_metrics_and_results(whole: dict[str, Path]) -> None:
    folder = whole["mbnet"]
    assert read_config(folder) == BUSY
    lines = metrics(folder, "train")
    steps = [line["step"] for line in lines]
    assert steps == [3, 5, 6, 9, 10]
    terms = {"largest/label", "random/e-ib", "random/h-ib", "smallest/e-ib", "smallest/h-ib", "loss", "lr"}
    assert terms < set(lines[0])
    assert [line["step"] for line in metrics(folder, "validate")] == [5, 10]
    final = load_checkpoint(folder, "final")
    assert set(final.tensors) == {"model"}  # neither projector nor average nor optimiser
    assert final.data["recipe"] == to_plain(BUSY)
    results = json.loads((folder / "results.json").read_text())
    assert [r["route"] for r in results["test"]] == [0, 1, 2, 3]
    assert {r["statistics"] for r in results["test"]} == {"calibrated"}
    before, after = results["held_out"][0]
    assert (before["statistics"], after["statistics"]) == ("running", "calibrated")
    assert before["images"] == 143


def test_the_best_network_is_the_one_that_validated_best(whole: dict[str, Path]) -> None:
    scores = {line["step"]: line["score"] for line in metrics(whole["mbnet"], "validate")}
    best = load_checkpoint(whole["mbnet"], "best")
    assert scores[best.data["step"]] == max(scores.values()) == best.data["best"]["score"]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    config = replace(
        BUSY,
        scheme=SchemeConfig(name="label"),
        optim=replace(OPTIM, lr=1e30, warmup=0),
        run=replace(BUSY.run, log_every=1, save_steps=1),
    )
    with pytest.raises(DivergedError) as caught:
        train(config, tmp_path)
    message = str(caught.value)
    assert "the loss term largest/label is nan" in message
    assert "is kept" in message
    kept = load_checkpoint(tmp_path, "last")
    assert f"the checkpoint of step {kept.data['step']} is kept" in message
    assert not (tmp_path / "final").exists()


def test_the_first_term_that_is_not_finite_is_named() -> None:
    buffer = LossBuffer()
    buffer.add(1, {"a": torch.tensor(1.0), "b": torch.tensor(3.0)})
    buffer.add(2, {"a": torch.tensor(2.0), "b": torch.tensor(torch.inf), "c": torch.tensor(torch.nan)})
    assert "step 2: the loss term b is inf" in error_of(buffer.means)
    buffer.add(3, {"a": torch.tensor(1.0)})
    buffer.add(4, {"a": torch.tensor(2.0), "b": torch.tensor(5.0)})
    assert buffer.means() == {"a": 1.5, "b": 5.0}
    assert buffer.means() == {}


def test_metrics_after_the_checkpoint_are_replaced(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path, after=0)
    for step in (5, 10, 15):
        file.write("train", step, {"loss": 1.0})
    file.close()
    with (tmp_path / "metrics.jsonl").open("a") as cut:
        cut.write('{"kind": "tra')
    file = MetricsFile(tmp_path, after=10)
    file.write("train", 12, {"loss": 2.0})
    file.close()
    steps = [line["step"] for line in metrics(tmp_path, "train")]
    assert steps == [5, 10, 12]


def test_a_folder_with_a_run_is_not_overwritten(whole: dict[str, Path]) -> None:
    assert "holds a run already" in error_of(lambda: train(BUSY, whole["mbnet"]))
    other = replace(BUSY, optim=replace(OPTIM, lr=0.2))
    told = error_of(lambda: train(other, whole["mbnet"], resume=True))
    assert "optim.lr was 0.1, not 0.2" in told
    assert "holds no run" in error_of(lambda: read_config(whole["mbnet"] / "nothing"))


def test_resuming_a_finished_run_gives_its_results_again(whole: dict[str, Path]) -> None:
    before = json.loads((whole["vit"] / "results.json").read_text())
    outcome: Outcome = train(CONFIGS["vit"], whole["vit"], resume=True)
    assert outcome.status.finished
    assert json.loads((whole["vit"] / "results.json").read_text()) == before


def test_a_batch_larger_than_the_data_is_an_error(tmp_path: Path) -> None:
    config = replace(BUSY, optim=replace(OPTIM, batch=5000))
    assert "optim.batch=5000 is more than the 1295 training images" in error_of(
        lambda: train(config, tmp_path)
    )


def test_a_network_at_chance_level_is_reported(tmp_path: Path) -> None:
    config = replace(BUSY, scheme=SchemeConfig(name="ib"), optim=replace(OPTIM, lr=1e-9, warmup=0, epochs=1))
    callback = Listen()
    train(config, tmp_path, callback=callback)
    assert any("not converging: after epoch 1 route" in message for message in callback.messages)
    assert callback.results
    assert callback.values[0]["images_per_s"] > 0


def test_a_route_alone_is_initialised_and_trained_alone(tmp_path: Path) -> None:
    config = replace(BUSY, scheme=SchemeConfig(name="label", route=1), optim=replace(OPTIM, epochs=1))
    outcome = train(config, tmp_path)
    assert [r.route for r in outcome.test] == [1]
    model = load_model(tmp_path)
    states = {number: {int(s) for s in model.key_states(number)} for number in range(4)}
    assert states[1] == {2}
    assert 0 in states[0]
    assert 0 in states[3]
