"""The connection between ranks: rendezvous, detection of lost ranks, and one common error.

Ranks meet in a key-value store that rank 0 (or torchrun) hosts. Every rank has a thread that writes a
heartbeat there; rank 0's thread watches all of them, the others watch rank 0's. The reason why a run ends is
written once, under ``failure``, so that all ranks report the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dsnet.core.distributed.launch import Launch
from dsnet.errors import DsnetError, printable, shorten

__all__ = ["LOST", "Link", "LostContactError", "LostRankError", "all_reduce", "barrier"]

LOST = 75  # exit status of a lost rank: try again with --resume (EX_TEMPFAIL of sysexits.h)
_C10D: Any = dist  # its stores are documented, but not declared
MAX_LISTED = 5  # settings in an error


class LostRankError(DsnetError):
    """A rank was lost or stopped with an error; the others cannot continue without it."""

    exit_status = LOST


class LostContactError(RuntimeError):
    """A collective operation failed; the responsible rank is not known yet."""


class _Collectives:
    """The number of collective operations that this process has begun: a rank with fewer is waited for."""

    begun = 0


def all_reduce(values: Tensor) -> None:
    """Sum over ranks, in place."""
    _Collectives.begun += 1
    try:
        dist.all_reduce(values)
    except RuntimeError as error:
        raise LostContactError(str(error)) from error


def barrier() -> None:
    """Return when all ranks have called this."""
    _Collectives.begun += 1
    try:
        dist.barrier()
    except RuntimeError as error:
        raise LostContactError(str(error)) from error


class Link:
    """The connection of this rank to the others.

    Args:
        launch: This process.
        timeout: Seconds to wait for others, and without a heartbeat after which a rank is lost.
        kept: Returns a sentence on where the run can continue, for errors.
    """

    def __init__(self, launch: Launch, timeout: float, kept: Callable[[], str]) -> None:
        self.launch, self.timeout, self.kept = launch, timeout, kept
        self.interval = min(1.0, timeout / 10)  # seconds between heartbeats
        self.patience = max(10 * self.interval, 2.0)  # seconds for ranks to report why they stop
        self.base = self._connect(host=launch.rank == 0 and not launch.agent)
        self.store = _C10D.PrefixStore(f"dsnet/{launch.restart}", self.base)
        self.failure: str | None = None
        self.rounds = 0
        self.lost: set[int] = set()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def _connect(self, *, host: bool = False) -> Any:  # noqa: ANN401  (torch does not declare its stores)
        launch, where = self.launch, f"{self.launch.host}:{self.launch.port}"
        try:
            return _C10D.TCPStore(
                launch.host,
                launch.port,
                launch.world,
                host,
                timedelta(seconds=self.timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            why = printable(str(error).splitlines()[0] if str(error) else type(error).__name__, 200)
            if host:
                raise DsnetError(
                    f"rank 0 cannot listen at {where} (MASTER_ADDR:MASTER_PORT): {why}"
                ) from error
            raise LostRankError(
                f"rank {launch.rank} could not reach rank 0 at {where} (MASTER_ADDR:MASTER_PORT) within "
                f"{_duration(self.timeout)}: {why}"
            ) from error

    def group_store(self) -> Any:  # noqa: ANN401  (torch does not declare its stores)
        """Return the store in which the process group finds its members."""
        return _C10D.PrefixStore("group", self.store)

    def join(self) -> None:
        """Wait for all ranks, then start the heartbeat."""
        rank, world = self.launch.rank, self.launch.world
        if self.store.add(f"count/{rank}", 1) > 1:
            self._stop(f"two processes were started with RANK={rank}")
        self.store.set(f"beat/{rank}", "0 0")
        self.store.set(f"here/{rank}", str(world))
        keys = [f"here/{other}" for other in range(world)]
        self._wait(keys, "did not start")
        for other, theirs in enumerate(self.store.multi_get(keys)):
            if int(theirs) != world:
                self._stop(
                    f"rank {other} was started with WORLD_SIZE={int(theirs)}, rank {rank} with {world}"
                )
        self._thread = threading.Thread(target=self._watch, name="dsnet-ranks", daemon=True)
        self._thread.start()

    def agree(self, facts: Mapping[str, Any], what: str) -> None:
        """Raise on all ranks if these facts differ between ranks; errors call the facts ``what``."""
        self.rounds += 1
        rank, world = self.launch.rank, self.launch.world
        mine = json.loads(json.dumps(facts))
        self.store.set(f"facts/{self.rounds}/{rank}", json.dumps(mine))
        if rank:
            self._wait([f"agreed/{self.rounds}"], "did not compare settings")
            return
        keys = [f"facts/{self.rounds}/{other}" for other in range(world)]
        self._wait(keys, f"did not come as far as to compare {what}")
        for other, theirs in enumerate(map(json.loads, self.store.multi_get(keys))):
            different = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
            if different:
                values = "; ".join(
                    f"{key} is {shorten(theirs.get(key))} there, {shorten(mine.get(key))} on rank 0"
                    for key in different[:MAX_LISTED]
                )
                more = f"; and {len(different) - MAX_LISTED} more" if len(different) > MAX_LISTED else ""
                self._stop(f"rank {other} was started with other {what} than rank 0: {values}{more}")
        self.store.set(f"agreed/{self.rounds}", "yes")

    def _wait(self, keys: list[str], lacks: str) -> None:
        """Return when all keys are set; raise if the run failed, or name the late ranks after the timeout."""
        deadline = time.monotonic() + self.timeout
        try:
            while not self.store.check(keys):
                self._raise_failure()
                if time.monotonic() > deadline:
                    ranks = [int(key.rpartition("/")[2]) for key in keys if not self.store.check([key])]
                    ranks = ranks if keys[0].startswith(("here/", "facts/")) else [0]
                    self._stop(f"{_ranks(ranks)} {lacks} within {_duration(self.timeout)}", lost=True)
                time.sleep(min(0.05, self.interval))
        except RuntimeError as error:
            raise self._error(self._no_store()) from error

    def _stop(self, why: str, *, lost: bool = False) -> None:
        """End the run on all ranks."""
        self._publish(why, lost=lost)
        self._raise_failure()

    def _publish(self, why: str, *, lost: bool = True) -> None:
        self.store.compare_set("failure", "", f"{'lost' if lost else 'refused'} {why}")

    def _raise_failure(self) -> None:
        if self.store.check(["failure"]):
            raise self._error(self.store.get("failure").decode())

    def _error(self, failure: str) -> DsnetError:
        kind, _, why = failure.partition(" ")
        return LostRankError(f"{why}; {self.kept()}") if kind == "lost" else DsnetError(why)

    def _no_store(self) -> str:
        launch = self.launch
        holder = "torchrun" if launch.agent else "rank 0"
        return f"lost {holder} is lost: the store at {launch.host}:{launch.port} does not answer"

    def _watch(self) -> None:
        """Write heartbeats and watch those of others, in a thread."""
        rank, world = self.launch.rank, self.launch.world
        others = range(1, world) if rank == 0 else range(1)
        seen = {other: (b"", time.monotonic()) for other in others}
        beats = 0
        try:
            store = _C10D.PrefixStore(f"dsnet/{self.launch.restart}", self._connect())
            while not self._ended.wait(self.interval):
                beats += 1
                store.set(f"beat/{rank}", f"{beats} {_Collectives.begun}")
                limit = 4 * self.interval if store.check(["alarm"]) else self.timeout
                now = time.monotonic()
                for other, value in zip(others, store.multi_get([f"beat/{o}" for o in others]), strict=True):
                    if value != seen[other][0]:
                        seen[other] = value, now
                    elif now - seen[other][1] > limit and not store.check([f"left/{other}"]):
                        self.lost.add(other)
                        store.compare_set(
                            "failure", "", f"lost rank {other} is lost: it gives no sign of life"
                        )
                if store.check(["failure"]):
                    self._exit_later(store.get("failure").decode())
        except (RuntimeError, LostRankError):
            if not self._ended.is_set():
                self._exit_later(self._no_store())

    def _exit_later(self, why: str) -> None:
        """Exit the process if the main thread does not end, as while it waits in operations of NCCL."""
        self.failure = why
        if self._ended.wait(2 * self.patience):
            return
        sys.stderr.write(f"dsnet: {printable(str(self._error(why)), 4000)}\n")
        sys.stderr.flush()
        os._exit(LOST)

    def blame(self, error: LostContactError) -> DsnetError:
        """Return the common error of all ranks after a collective operation failed."""
        try:
            self.store.set("alarm", "1")  # ranks watch heartbeats more closely
            deadline = time.monotonic() + self.patience
            while self.failure is None and time.monotonic() < deadline:
                time.sleep(min(0.05, self.interval))
            if self.failure is None:
                self._publish(self._behind(error))
            why = self.failure or self.store.get("failure").decode()
        except RuntimeError:
            why = self._no_store()
        return self._error(why)

    def _behind(self, error: LostContactError) -> str:
        keys = [f"beat/{other}" for other in range(self.launch.world)]
        begun = [int(value.split()[1]) for value in self.store.multi_get(keys)]
        late = [rank for rank, count in enumerate(begun) if count < max(begun)]
        if late:
            return f"{_ranks(late)} did not come to where the others waited within {_duration(self.timeout)}"
        return f"rank {self.launch.rank} lost contact: {printable(str(error), 300)}"

    def failed(self, error: BaseException) -> None:
        """Report to all ranks that this one stopped with an error."""
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        with contextlib.suppress(RuntimeError):  # the store may be lost as well
            self._publish(f"rank {self.launch.rank} stopped: {printable(what, 1000)}")

    def leave(self) -> None:
        """Leave; rank 0, which hosts the store, waits for the others for a short time."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self.patience)
        with contextlib.suppress(RuntimeError):  # the store is lost
            self.store.set(f"left/{self.launch.rank}", "1")
            deadline = time.monotonic() + self.patience
            left = [f"left/{other}" for other in {*range(self.launch.world)} - self.lost]
            while self.launch.rank == 0 and time.monotonic() < deadline and not self.store.check(left):
                time.sleep(min(0.05, self.interval))


def _ranks(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} seconds"
