"""How worker processes end, and what they report."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsnet.data._decode_workers import BatchDecoder
from tests.support import error_of
from tests.support.image_files import lazy

# Said where there are fewer than two processors.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class _Dying(BatchDecoder):
    def __getitems__(self, positions: list[int]) -> object:
        os._exit(3)


def test_a_worker_that_dies_is_explained(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsnet.data.lazy.BatchDecoder", _Dying)
    assert "/dev/shm" in error_of(lambda: list(lazy(root, workers=1).epoch(4)))


SCRIPT = """
import signal
import sys
from dataclasses import replace
import torch
from dsnet.data import load_dataset

asked = []

if __name__ == "__main__":
    # Not by an exception: Python drops one that is raised in a destructor, and they run all the time here.
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    given = replace(load_dataset("imagenet", "train", root=sys.argv[1], size=16, lazy=True), workers=2)
    for images, labels in given.batches([torch.arange(12)] * 10**5):
        print("going", flush=True)
        if asked:
            asked.append(True)
        if len(asked) > 50:  # the workers went on
            sys.exit("stopped")
"""


@pytest.mark.skipif(os.name == "nt", reason="there are no process groups")
def test_workers_ignore_interrupts(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        # An interrupt may fall between the two lines in which Python itself gives a semaphore back.
        [sys.executable, "-W", "ignore:This DataLoader", "-W", "ignore:resource_tracker", script, root],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for _ in range(20):  # by now every worker has sent something
            assert process.stdout.readline() == "going\n"
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors == "stopped\n"


LEAVES = """
import sys
from dataclasses import replace
from multiprocessing import connection
import time
import torch
from dsnet.data import load_dataset

handovers = 0
connect = connection.SocketClient

def leave(address):
    global handovers
    handovers += 1
    made = connect(address)
    if handovers == 5:
        made.close()
        time.sleep(0.5)
        raise KeyboardInterrupt
    return made

if __name__ == "__main__":
    connection.SocketClient = leave
    given = replace(load_dataset("imagenet", "train", root=sys.argv[1], size=16, lazy=True), workers=1)
    for _ in given.batches([torch.arange(12)] * 10**5):
        pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="tensors are handed over in another way")
def test_a_disconnected_worker_prints_no_traceback(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAVES)
    ended = subprocess.run(
        [sys.executable, str(script), str(root)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode != 0
    assert "in leave" in ended.stderr
    assert ended.stderr.count("Traceback") == 1, ended.stderr
