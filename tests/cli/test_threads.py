"""The number of threads of a command: measured, requested, or that of the resumed run."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsnet.cli import main, threads
from dsnet.core.cpus import available_cpus, cgroup_quota
from dsnet.errors import DsnetWarning
from dsnet.models.loading import build_network
from dsnet.training import load_checkpoint, save_checkpoint
from dsnet.training.api import train
from dsnet.training.callbacks import Callback
from dsnet.training.config import DataConfig, OptimConfig, RunConfig, SchemeConfig, TrainConfig
from tests.support import error_of

CPU = torch.device("cpu")
CONFIG = TrainConfig(
    model="ds_mbnet_tiny",
    data=DataConfig(name="digits_7_to_9", calibration=64),
    scheme=SchemeConfig(name="label"),
    optim=OptimConfig(epochs=1, batch=256),
    run=RunConfig(device="cpu"),
)


class Machine:
    """Torch's threads without any, and a clock on which work takes as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: int, seconds: dict[int, float]) -> None:
        self.threads, self.now, self.seconds, self.tried = 7, 0.0, seconds, []
        monkeypatch.setattr(torch, "set_num_threads", self.set)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(threads, "available_cpus", lambda: cpus)
        monkeypatch.setattr(threads.os, "cpu_count", lambda: cpus)
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)

    def set(self, count: int) -> None:
        self.threads = count
        self.tried.append(count)

    def work(self, count: int) -> None:
        self.now += self.seconds[self.threads] * count / 64

    def settle(self, asked: int | str | None = None, *, keep: bool = False, **options: object) -> int:
        args = argparse.Namespace(threads=asked, keep_threads=keep)
        threads.set_threads(args, CPU, lambda: self.work, batch=64, **options)  # type: ignore[arg-type]
        return self.threads


@pytest.mark.parametrize(
    ("cpus", "seconds", "best"),
    [
        (2, {1: 0.016, 2: 0.4}, 1),  # a machine with other load
        (2, {1: 0.016, 2: 0.009}, 2),
        (2, {1: 0.016, 2: 0.0155}, 1),  # hardly faster: not worth it
        (6, {1: 0.08, 2: 0.04, 4: 0.03, 6: 0.02}, 6),
        (8, {1: 0.02, 2: 0.012, 4: 0.05}, 2),  # 8 is not even tried
    ],
)
def test_the_fastest_number_of_threads_is_measured(
    cpus: int, seconds: dict[int, float], best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, cpus, seconds)
    assert machine.settle() == best
    assert machine.now < 3 * threads.LIMIT


def test_threads_set_by_the_user_or_the_run_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4, {1: 0.01, 2: 1, 4: 1})
    assert machine.settle(keep=True) == 7
    assert machine.settle("auto", keep=True) == 1
    assert machine.settle(3, keep=True) == 3
    assert machine.settle(kept=2) == 2
    assert machine.settle(4, kept=2) == 4
    with pytest.warns(DsnetWarning, match="started with 8 threads and this process may use 4 CPUs"):
        assert machine.settle(kept=8) == 8
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    machine.threads = 3
    assert machine.settle() == 3
    with pytest.warns(DsnetWarning, match="not with those of OMP_NUM_THREADS"):
        assert machine.settle(kept=2) == 2
    assert "4 cores" in error_of(lambda: machine.settle(5))
    monkeypatch.setattr(threads, "available_cpus", lambda: 2)
    with pytest.warns(DsnetWarning, match="may use 2 CPUs"):
        machine.settle(3)


def test_ranks_divide_the_cpus_and_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 8, {})
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name, value in (("WORLD_SIZE", "4"), ("MASTER_ADDR", "host"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert machine.settle() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert machine.settle() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert machine.settle() == 1


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/cpu.max": "300000 100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/../../elsewhere\nnonsense\n", "sys/fs/cgroup/cpu.max": "what\n"}, None),
        ({}, None),
    ],
)
def test_quotas_of_control_groups(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_quota(tmp_path) == quota


def test_a_quota_limits_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda who: set(range(8)), raising=False)
    for quota, cpus in ((None, 8), (2.9, 2), (0.2, 1), (64.0, 8)):
        monkeypatch.setattr("dsnet.core.cpus.cgroup_quota", lambda quota=quota: quota)
        assert available_cpus() == cpus


# --- with real runs -----------------------------------------------------------------------------------
class Told(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, message: str) -> None:
        self.messages.append(message)


def test_a_run_remembers_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, count = tmp_path / "run", torch.get_num_threads()
    train(CONFIG, run)
    for name in ("last", "final"):
        assert load_checkpoint(run, name).data["threads"] == count
    assert threads.kept_threads(run) == count
    callback = Told()
    monkeypatch.setattr(torch, "get_num_threads", lambda: count + 1)
    train(CONFIG, run, resume=True, callback=callback)
    (message,) = callback.messages
    assert f"resuming with {count + 1} threads after {count}: results are no longer bit-identical" in message
    assert threads.kept_threads(tmp_path / "none") is None
    with_old = load_checkpoint(run, "last")
    data = {k: v for k, v in with_old.data.items() if k in ("recipe", "input")}
    save_checkpoint(run, "last", build_network(with_old), step=1, data={**data, "threads": "two"})
    assert threads.kept_threads(run) is None


def test_the_command_sets_threads_and_a_program_keeps_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_num_threads()
    run = tmp_path / "run"
    train(replace(CONFIG, optim=replace(CONFIG.optim, epochs=1)), run)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--threads", "1", "--json"]) == 0
    assert torch.get_num_threads() == before
    with pytest.raises(SystemExit):
        main(["evaluate", str(run), "--threads", "many"])
    assert "number of threads (or auto)" in capsys.readouterr().err
    code = (
        "import sys\n"
        "from dsnet.cli import main\n"
        "status = main(['train', 'run/recipe.json', '--out', 'new', '--threads', 'auto'])\n"
        "import torch; sys.stdout.write(f'\\nthreads {torch.get_num_threads()}\\n'); sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (chosen,) = re.findall(r"^threads (\d+)$", done.stdout, re.M)
    last = tmp_path / "new" / (tmp_path / "new" / "last").read_text().strip()
    assert json.loads((last / "checkpoint.json").read_text())["threads"] == int(chosen)
    if available_cpus() > 1:
        assert f"Computing with {chosen} of {available_cpus()} CPUs" in done.stderr
