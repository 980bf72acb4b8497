"""Times every part of a plan, for a table of latencies of what one will serve with.

>>> import dsnet
>>> table = profile_plan(dsnet.create_model("ds_mbnet_tiny"), backend="eager", batches=(1, 4), repeats=1)
>>> table.backend, table.memory, table.batches
('eager', 'packed', (1, 4))
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from dsnet.core.timer import Progress, silent
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.routing.latency import LatencyTable
from dsnet.runtime.api import compile as make_plan
from dsnet.runtime.backends.base import get_backend
from dsnet.runtime.profile_network import check_counts, copy_to_time, measure

__all__ = ["profile_plan"]

PACKAGES = ("onnxruntime", "openvino", "triton")  # backends with a version of their own; the others are torch


def profile_plan(
    model: Supernet,
    *,
    backend: str = "auto",
    precision: str | None = None,
    batches: Sequence[int] = (1,),
    repeats: int = 30,
    image_size: int | tuple[int, int] | None = None,
    progress: Progress = silent,
) -> LatencyTable:
    """Makes a packed plan of all routes on the network's device, and times its front and every part.

    Batches run as in a plan with the batch sizes that the backend has by default: a large one may run as
    several smaller ones. The network stays as it is, and statistics that its norms lack do not matter.
    """
    if not isinstance(model, Supernet):
        raise DsnetError(f"only a supernet has parts to time, not a {type(model).__name__}")
    check_counts(batches, repeats)
    copied = copy_to_time(model)
    # Statistics do not change a part's time, so that one history stands for all with the same last choices.
    copied.bn_key = "stage"
    make = functools.partial(make_plan, copied, precision=precision, image_size=image_size, progress=progress)
    if backend == "auto":
        backend = make(backend="auto", batch_buckets=(1,), routes=[0]).network.backend
    sizes = get_backend(backend).buckets
    enough = min((size for size in sizes if size >= max(batches)), default=max(sizes))
    sizes = tuple(size for size in sizes if size <= enough)  # what is larger would be made for nothing
    compiled = make(backend=backend, batch_buckets=sizes, routes=range(len(model.space))).network
    return measure(
        compiled,
        spec=model.spec,
        image=model.input_spec.shape(image_size),
        device=compiled.device,
        dtype=compiled.precision,
        backend=compiled.backend,
        backend_version=_version(compiled.backend),
        memory="packed",
        batches=batches,
        repeats=repeats,
        progress=progress,
    )


def _version(backend: str) -> str:
    return str(importlib.import_module(backend if backend in PACKAGES else "torch").__version__)
