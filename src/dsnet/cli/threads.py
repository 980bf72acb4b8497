"""``--threads``: how many threads of the CPU a command computes with.

More threads are not always faster: small layers, and machines with other load, run several times slower with
all CPUs than with one. The library leaves the number to whoever uses it; the command line measures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from dsnet.core.checkpoint import current_folder
from dsnet.core.cpus import available_cpus
from dsnet.core.distributed.launch import launched
from dsnet.core.schema import read_json
from dsnet.errors import DsnetError, DsnetWarning
from dsnet.models import Supernet

__all__ = ["Work", "fastest", "forward_work", "kept_threads", "settle", "settle_for"]

Work = Callable[[int], object]
"""Computes on so many images, as the command will."""

PATIENCE = 0.05  # seconds of one thread that a measured piece of work takes, if the batch is large enough
LIMIT = 2.0  # seconds for the whole measurement
REPEATS = 3
WORTH = 0.9  # more threads are taken where they need at most this share of the time
FIRST = 8  # images that measuring begins with


def settle(
    args: argparse.Namespace,
    device: torch.device,
    make_work: Callable[[], Work],
    *,
    batch: int,
    kept: int | None = None,
    say: bool = False,
) -> None:
    """Sets the number of threads: as asked for, as ``kept`` by the run that goes on, or the fastest.

    What the user has set (OMP_NUM_THREADS, `torch.set_num_threads`) stays unless ``--threads`` is given.
    Among several processes the CPUs of a machine are divided. With ``say`` the choice is printed.
    """
    cpus, asked = available_cpus(), args.threads
    if isinstance(asked, int):
        torch.set_num_threads(_checked(asked, cpus))
    elif kept is not None and asked is None:
        _resume(kept, cpus)
    elif asked is None and _chosen_by_user(args):
        return
    elif launched().several:
        torch.set_num_threads(max(1, cpus // (launched().local_world or launched().world)))
    elif device.type != "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), cpus))
    else:
        torch.set_num_threads(1 if cpus == 1 else fastest(make_work(), cpus, batch))
        if say:
            threads = torch.get_num_threads()
            print(
                f"Computing with {threads} of {cpus} CPUs, the fastest by a short measurement "
                f"(--threads {threads} sets it)",
                file=sys.stderr,
                flush=True,
            )


def settle_for(
    args: argparse.Namespace,
    model: Supernet,
    size: int | tuple[int, int] | None,
    *,
    batch: int,
    say: bool = False,
) -> None:
    """As `settle`, for passes of a network where it lies."""
    device = next(model.parameters()).device
    settle(args, device, lambda: forward_work(model, size), batch=batch, say=say)


def forward_work(model: Supernet, size: int | tuple[int, int] | None) -> Work:
    """Passes at the largest route on images of this size."""
    height, width = size if isinstance(size, tuple) else (size or model.input_spec.image_size,) * 2
    weight = next(model.parameters())
    route = model.space.largest

    @torch.no_grad()
    def work(count: int) -> object:
        x = torch.zeros(count, model.input_spec.channels, height, width, dtype=weight.dtype)
        return model.run_route(x, route)

    return work


def fastest(work: Work, cpus: int, batch: int) -> int:
    """The number of threads, up to ``cpus``, that needs the least time; fewer where it is nearly the same."""
    deadline = time.perf_counter() + LIMIT
    torch.set_num_threads(1)
    count = min(FIRST, batch)
    work(count)
    while _seconds(work, count) < PATIENCE and count < batch:
        count = min(2 * count, batch)
    counts = [2**power for power in range(1, cpus.bit_length()) if 2**power < cpus]
    best, least = 1, _median(work, count)
    for threads in (*counts, cpus):
        torch.set_num_threads(threads)
        started = _seconds(work, count)
        if min(started, _seconds(work, count)) > 2 * least:  # they hinder each other: more would be worse
            break
        taken = _median(work, count)
        if taken < WORTH * least:
            best, least = threads, taken
        if time.perf_counter() > deadline:
            break
    torch.set_num_threads(best)
    return best


def _seconds(work: Work, count: int) -> float:
    begun = time.perf_counter()
    work(count)
    return time.perf_counter() - begun


def _median(work: Work, count: int) -> float:
    return statistics.median(_seconds(work, count) for _ in range(REPEATS))


def kept_threads(folder: Path) -> int | None:
    """The number of threads that a run's last checkpoint was computed with; none where it does not say."""
    found = current_folder(folder, "last")
    try:
        data = None if found is None else read_json(found / "checkpoint.json")
    except DsnetError:  # loading says what is wrong
        return None
    threads = data.get("threads") if isinstance(data, dict) else None
    return threads if type(threads) is int and 1 <= threads <= 4096 else None


def _chosen_by_user(args: argparse.Namespace) -> bool:
    return bool(args.keep_threads or os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def _checked(threads: int, cpus: int) -> int:
    cores = os.cpu_count() or 1
    if threads > cores:
        raise DsnetError(f"--threads {threads} would wait for each other: this machine has {cores} cores")
    if threads > cpus:
        warnings.warn(
            f"--threads {threads}: this process may use {cpus} CPUs, so threads will wait for each other",
            DsnetWarning,
            stacklevel=3,
        )
    return threads


def _resume(kept: int, cpus: int) -> None:
    """Takes the number that the run began with, which its results depend on."""
    if kept > cpus:
        warnings.warn(
            f"the run was started with {kept} threads and this process may use {cpus} CPUs: it goes on with "
            f"{kept}, so that results stay the same, but slowly; --threads {cpus} is faster",
            DsnetWarning,
            stacklevel=3,
        )
    elif kept != torch.get_num_threads() and os.environ.get("OMP_NUM_THREADS"):
        warnings.warn(
            f"going on with {kept} threads, as the run was started, not with those of OMP_NUM_THREADS; "
            "--threads changes them",
            DsnetWarning,
            stacklevel=3,
        )
    torch.set_num_threads(kept)
