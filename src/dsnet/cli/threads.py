"""``--threads``: how many CPU threads a command computes with.

More threads are not always faster: small layers, and machines with other load, run several times slower with
all CPUs than with one. The library leaves the number to its caller; the command line measures.
"""

from __future__ import annotations

import argparse
import itertools
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

__all__ = ["Work", "fastest", "forward_work", "kept_threads", "set_threads", "set_threads_for"]

Work = Callable[[int], object]
"""Computes on a number of images, as the command will."""

PATIENCE = 0.05  # seconds that one thread takes for a measured piece of work, if the batch is large enough
LIMIT = 2.0  # seconds for the whole measurement
REPEATS = 3
WORTH = 0.9  # more threads are used where they need at most this share of the time
FIRST = 8  # images that measuring begins with


def set_threads(
    args: argparse.Namespace,
    device: torch.device,
    make_work: Callable[[], Work],
    *,
    batch: int,
    kept: int | None = None,
    announce: bool = False,
) -> None:
    """Set the number of threads.

    The number is that of ``--threads``, else ``kept``, else what the user has set (OMP_NUM_THREADS,
    `torch.set_num_threads`), else the fastest. Several processes divide the CPUs of a machine.

    Args:
        args: Arguments of the command.
        device: Device that the command computes on.
        make_work: Returns the work to measure, called only if the fastest number is wanted.
        batch: Images that the command computes on together.
        kept: Number of threads of the run that continues.
        announce: Whether to print a measured number.
    """
    cpus, requested = available_cpus(), args.threads
    if isinstance(requested, int):
        torch.set_num_threads(_checked(requested, cpus))
    elif requested is None and kept is not None:
        _warn_of_kept(kept, cpus)
        torch.set_num_threads(kept)
    elif requested is None and (
        args.keep_threads or os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS")
    ):
        return
    elif launched().several:
        torch.set_num_threads(max(1, cpus // (launched().local_world or launched().world)))
    elif device.type != "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), cpus))
    else:
        threads = 1 if cpus == 1 else fastest(make_work(), cpus, batch)
        torch.set_num_threads(threads)
        if announce:
            text = f"Computing with {threads} of {cpus} CPUs, the fastest by a short measurement"
            print(f"{text} (--threads {threads} sets it)", file=sys.stderr, flush=True)


def set_threads_for(
    args: argparse.Namespace,
    model: Supernet,
    size: int | tuple[int, int] | None,
    *,
    batch: int,
    announce: bool = False,
) -> None:
    """Set the number of threads for forward passes of a network, on its device."""
    device = next(model.parameters()).device
    set_threads(args, device, lambda: forward_work(model, size), batch=batch, announce=announce)


def forward_work(model: Supernet, size: int | tuple[int, int] | None) -> Work:
    """Return forward passes at the largest route on images of this size (None: the model's default)."""
    height, width = size if isinstance(size, tuple) else (size or model.input_spec.image_size,) * 2
    dtype = next(model.parameters()).dtype

    @torch.no_grad()
    def work(count: int) -> object:
        x = torch.zeros(count, model.input_spec.channels, height, width, dtype=dtype)
        return model.run_route(x, model.space.largest)

    return work


def fastest(work: Work, cpus: int, batch: int) -> int:
    """Return the fastest number of threads up to ``cpus``; a smaller one where it is nearly as fast."""
    deadline = time.perf_counter() + LIMIT
    torch.set_num_threads(1)
    count = min(FIRST, batch)
    work(count)
    while _seconds(work, count, 1) < PATIENCE and count < batch:
        count = min(2 * count, batch)
    best, shortest = 1, _seconds(work, count)
    powers = [2**power for power in range(1, cpus.bit_length()) if 2**power < cpus]
    for threads in (*powers, cpus):
        torch.set_num_threads(threads)
        if min(_seconds(work, count, 1), _seconds(work, count, 1)) > 2 * shortest:  # more would be worse
            break
        seconds = _seconds(work, count)
        if seconds < WORTH * shortest:
            best, shortest = threads, seconds
        if time.perf_counter() > deadline:
            break
    torch.set_num_threads(best)
    return best


def _seconds(work: Work, count: int, repeats: int = REPEATS) -> float:
    """Return the median duration of the work."""
    times = [time.perf_counter()]
    for _ in range(repeats):
        work(count)
        times.append(time.perf_counter())
    return statistics.median(end - start for start, end in itertools.pairwise(times))


def kept_threads(folder: Path) -> int | None:
    """Return the number of threads in a run's last checkpoint; None if it is not recorded."""
    checkpoint = current_folder(folder, "last")
    try:
        data = None if checkpoint is None else read_json(checkpoint / "checkpoint.json")
    except DsnetError:  # loading reports what is wrong
        return None
    threads = data.get("threads") if isinstance(data, dict) else None
    return threads if type(threads) is int and 1 <= threads <= 4096 else None


def _checked(threads: int, cpus: int) -> int:
    cores = os.cpu_count() or 1
    if threads > cores:
        raise DsnetError(f"--threads {threads} would wait for each other: this machine has {cores} cores")
    if threads > cpus:
        _warn(f"--threads {threads}: this process may use {cpus} CPUs, so threads will wait for each other")
    return threads


def _warn_of_kept(kept: int, cpus: int) -> None:
    """Warn where the number that the run's results depend on is slow, or not the one in the environment."""
    if kept > cpus:
        _warn(
            f"the run was started with {kept} threads and this process may use {cpus} CPUs: it continues "
            f"with {kept}, so that results stay the same, but slowly; --threads {cpus} is faster"
        )
    elif kept != torch.get_num_threads() and os.environ.get("OMP_NUM_THREADS"):
        _warn(
            f"continuing with {kept} threads, as the run was started, not with those of OMP_NUM_THREADS; "
            "--threads changes them"
        )


def _warn(text: str) -> None:
    warnings.warn(text, DsnetWarning, stacklevel=4)
