"""Ranks: inconsistent ones are refused, and a lost one is named by the others."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsnet.core.device import pick_device
from dsnet.core.distributed.launch import Launch, launched
from dsnet.core.distributed.ranks import Ranks, joined
from dsnet.core.settings import to_plain
from dsnet.data import load_dataset
from dsnet.errors import DsnetError
from dsnet.models import create_model
from dsnet.runtime.profile import profile
from dsnet.training import GateConfig, save_checkpoint, train_gate
from dsnet.training.agreement import code_digest, settings_facts, state_facts
from dsnet.training.api import train
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from dsnet.training.loop import TrainingLoop
from tests.support import error_of

pytestmark = pytest.mark.xdist_group("ranks")

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
CONFIG = TrainConfig(
    model="ds_mbnet_tiny",
    data=DataConfig(name="digits", calibration=64),
    scheme=SchemeConfig(name="label"),
    optim=OptimConfig(epochs=3, batch=64),
    run=RunConfig(device="cpu", save_steps=4, timeout_minutes=0.5),
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


# --- the environment ----------------------------------------------------------------------------------
def test_the_environment_gives_the_rank(environment: pytest.MonkeyPatch) -> None:
    assert launched() == Launch(rank=1, world=2, local=1, host="127.0.0.1", port=29500)
    for name in WHOLE:
        environment.delenv(name)
    assert launched() == Launch()
    assert not launched().several


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "2", ["RANK='2'", "below WORLD_SIZE=2"]),
        ("RANK", "-1", ["RANK='-1'", "whole number"]),
        ("RANK", "one", ["RANK='one'", "whole number"]),
        ("LOCAL_RANK", "2", ["LOCAL_RANK='2'", "below WORLD_SIZE=2"]),
        ("LOCAL_RANK", "", ["not LOCAL_RANK", "torchrun"]),
        ("LOCAL_WORLD_SIZE", "0", ["LOCAL_WORLD_SIZE='0'", "at least 1"]),
        ("LOCAL_WORLD_SIZE", "two", ["LOCAL_WORLD_SIZE='two'", "whole number"]),
        ("WORLD_SIZE", "0", ["WORLD_SIZE='0'", "at least 1"]),
        ("WORLD_SIZE", "1e3", ["WORLD_SIZE='1e3'", "whole number"]),
        ("WORLD_SIZE", "", ["RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT but not WORLD_SIZE"]),
        ("MASTER_ADDR", "", ["not MASTER_ADDR"]),
        ("MASTER_PORT", "70000", ["MASTER_PORT='70000'", "1 to 65535"]),
        ("MASTER_PORT", "9" * 5000, ["MASTER_PORT='999", "1 to 65535"]),
        ("MASTER_PORT", "http", ["MASTER_PORT='http'", "whole number"]),
    ],
)
def test_an_inconsistent_environment_is_refused_at_once(
    name: str, value: str, words: list[str], environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv(name, value)
    for refused in (launched, lambda: pick_device("auto"), lambda: train(CONFIG, tmp_path / "run")):
        error = error_of(refused)
        assert len(error) < 500
        for word in words:
            assert word in error
    assert not (tmp_path / "run").exists()


def test_ranks_that_never_start_are_named(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RANK", "0")
    environment.setenv("WORLD_SIZE", "3")
    environment.setenv("MASTER_PORT", str(free_port()))
    with (
        pytest.raises(
            DsnetError, match=r"ranks 1, 2 did not start within 0\.3 seconds; what is kept"
        ) as refused,
        joined(torch.device("cpu"), timeout=0.3, kept=lambda: "what is kept"),
    ):
        pass
    assert refused.value.exit_status == 75
    environment.setenv("RANK", "1")
    environment.setenv("MASTER_PORT", str(free_port()))
    with (
        pytest.raises(DsnetError, match=r"rank 1 could not reach rank 0 at 127\.0\.0\.1:\d+"),
        joined(torch.device("cpu"), timeout=0.3),
    ):
        pass


# --- what is compared ---------------------------------------------------------------------------------
def test_facts_cover_settings_code_images_and_weights() -> None:
    cpu = torch.device("cpu")
    facts = settings_facts(CONFIG, CONFIG.model, cpu, resume=False)
    assert facts["optim.lr"] == 0.1
    assert facts["dsnet source code"] == code_digest()
    elsewhere = replace(
        CONFIG, data=replace(CONFIG.data, root="/elsewhere"), run=replace(CONFIG.run, timeout_minutes=9)
    )
    assert settings_facts(elsewhere, CONFIG.model, cpu, resume=False) == facts
    assert settings_facts(replace(CONFIG, optim=OptimConfig(lr=0.2)), CONFIG.model, cpu) != facts


# --- several processes --------------------------------------------------------------------------------
def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def say(what: str, message: str) -> None:
    sys.stdout.write(f"{what}: {message}\n")
    sys.stdout.flush()


def play(rank: int, ports: list[int], folder: str) -> None:
    """One process: refused for its settings, ended by another's error, and then rank 1 is killed."""
    torch.set_num_threads(1)
    for name, value in {**WHOLE, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
        os.environ[name] = value
    os.environ["MASTER_PORT"] = str(ports[0])
    other = replace(CONFIG, optim=replace(CONFIG.optim, lr=0.1 * (rank + 1)))
    say("differ", error_of(lambda: train(other, f"{folder}/differ{rank}")))
    os.environ["MASTER_PORT"] = str(ports[1])
    try:
        with joined(torch.device("cpu"), timeout=30) as ranks:
            assert ranks.sum(torch.ones(2)).tolist() == [2, 2]
            if rank:
                raise DsnetError("disk full")
            ranks.wait()
    except DsnetError as error:
        say("raise", f"{type(error).__name__} {error}")
    os.environ["MASTER_PORT"] = str(ports[2])
    due = TrainingLoop._save_is_due

    def killed(loop: TrainingLoop) -> bool:
        if rank and loop.step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return due(loop)

    TrainingLoop._save_is_due = killed  # type: ignore[method-assign]
    try:
        train(CONFIG, f"{folder}/run")
    except DsnetError as error:
        say("kill", str(error))
        raise SystemExit(error.exit_status) from None


def test_ranks_refuse_different_settings_and_name_a_lost_rank(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(3)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from {__name__} import play; play({rank}, {ports}, {str(tmp_path)!r})",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    told = [dict(line.split(": ", 1) for line in out.splitlines()) for out, _ in outputs]
    for rank in range(2):
        assert "rank 1 was started with other settings than rank 0" in told[rank]["differ"], outputs
        assert "optim.lr is 0.2 there, 0.1 on rank 0" in told[rank]["differ"]
        assert not (tmp_path / f"differ{rank}").exists()
    assert told[1]["raise"] == "DsnetError disk full"
    assert told[0]["raise"].startswith("LostRankError rank 1 stopped: DsnetError: disk full; ")
    assert re.match(r"rank 1 is lost: .*run/last-00000004 is the checkpoint to resume from", told[0]["kill"])
    assert [process.returncode for process in processes] == [75, -signal.SIGKILL]


def told_before_training(monkeypatch: pytest.MonkeyPatch, begin: Callable[[], object]) -> dict[str, Any]:
    """All that is compared across ranks before the first step."""
    facts: dict[str, Any] = {}

    class BegunError(Exception):
        pass

    def begun(*args: object, **settings: object) -> None:
        raise BegunError

    monkeypatch.setattr(Ranks, "agree", lambda self, told, what: facts.update({what: told()}))
    monkeypatch.setattr(TrainingLoop, "run", begun)
    with pytest.raises(BegunError):
        begin()
    return facts


def test_the_weights_of_teachers_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their name may differ between machines, so that it says nothing."""
    facts = []
    for seed in (0, 1):
        teacher = create_model("ds_mbnet_tiny", generator=torch.Generator().manual_seed(seed))
        data = {"input": {"mean": [0.5] * 3, "std": [0.5] * 3}}
        save_checkpoint(tmp_path / f"teacher{seed}", "last", teacher, step=1, data=data)
        taught = replace(CONFIG, scheme=SchemeConfig(name="ed", teacher=str(tmp_path / f"teacher{seed}")))
        run = tmp_path / f"run{seed}"
        facts.append(told_before_training(monkeypatch, lambda taught=taught, run=run: train(taught, run)))
    assert facts[0].pop("weights of the teacher") != facts[1].pop("weights of the teacher")
    assert facts[0] == facts[1]


def test_routing_heads_and_costs_of_gates_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes from the files of ``start`` and ``latency``, whose names may differ between machines."""
    data = {"recipe": to_plain(CONFIG), "input": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    for seed in (0, 1, 2):
        model = create_model("ds_mbnet_tiny", generator=torch.Generator().manual_seed(seed))
        save_checkpoint(tmp_path / f"run{seed}", "final", model, step=0, data=data)
        profile(model.eval(), batches=(1,), repeats=1).save(tmp_path / f"times{seed}.json")
    facts = [
        told_before_training(
            monkeypatch,
            lambda start=start, times=times: train_gate(
                tmp_path / "run0",
                GateConfig(passes=0, start=str(tmp_path / start), latency=str(tmp_path / times)),
                device="cpu",
            ),
        )["images, weights or costs"]
        for start, times in (("run1", "times1.json"), ("run2", "times1.json"), ("run1", "times2.json"))
    ]
    different = [{key for key in told if told[key] != facts[0][key]} for told in facts]
    assert different == [set(), {"weights"}, {"costs"}]


def test_weights_and_images_are_part_of_the_state() -> None:
    images = load_dataset("digits", "train")
    first, second = (
        create_model("ds_mbnet_tiny", generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
    )
    assert state_facts(first, images, 0) == state_facts(first, images, 0)
    assert state_facts(first, images, 0)["weights"] != state_facts(second, images, 0)["weights"]
