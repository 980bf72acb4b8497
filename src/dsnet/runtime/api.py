"""`compile`: from a network, a router and a budget to a plan."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

import torch
from torch import nn

from dsnet.core.device import pick_device
from dsnet.core.timer import Progress, logged
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet
from dsnet.models.composite import CompositeNetwork
from dsnet.routing.latency import DeviceKind
from dsnet.routing.router import Routed
from dsnet.runtime._autotune import choose_backend
from dsnet.runtime._compiler import Compiler, CompositeCompiler
from dsnet.runtime._resident_routes import (
    Options,
    RouteExtender,
    SourceNetwork,
    can_fall_back,
    choices_of_routes,
    needed_choices,
)
from dsnet.runtime.backends.base import get_backend, list_backends
from dsnet.runtime.executors.host import Memory
from dsnet.runtime.executors.ragged.support import unsupported
from dsnet.runtime.partition.partitioner import PartitionRequest, partitioner_of, segment_modules
from dsnet.runtime.plan import Plan

__all__ = ["CompileOptions", "compile"]

PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class CompileOptions(TypedDict, total=False):
    """The keyword arguments of `compile`."""

    device: torch.device | str | None
    backend: str
    precision: str | None
    memory: Memory
    batch_buckets: Sequence[int] | None
    image_size: int | tuple[int, int] | None
    routes: Sequence[int] | None
    budgets: Literal["all"] | None
    batch_invariant: bool | None
    progress: Progress


@overload
def compile(model: Supernet | Routed, **options: Unpack[CompileOptions]) -> Plan: ...  # noqa: A001
@overload
def compile(model: nn.Module, **options: Unpack[CompileOptions]) -> Any: ...  # noqa: A001, ANN401
def compile(  # noqa: A001  (dsnet.runtime.compile, as torch.compile)
    model: Supernet | Routed | nn.Module,
    *,
    device: torch.device | str | None = None,
    backend: str = "auto",
    precision: str | None = None,
    memory: Memory = "packed",
    batch_buckets: Sequence[int] | None = None,
    image_size: int | tuple[int, int] | None = None,
    routes: Sequence[int] | None = None,
    budgets: Literal["all"] | None = None,
    batch_invariant: bool | None = None,
    progress: Progress = logged,
) -> Any:
    """Compile a network, or another model with a registered partitioner such as a detector, for a device.

    Args:
        model: A network in eval mode, which is routed by its gates' own decisions; or a `Routed`, whose
            router and budget the plan keeps; or a detector.
        device: Where the plan runs (default: the network's device).
        backend: The name of a backend. ``"auto"`` times those that can be used here, takes the fastest and
            remembers it.
        precision: ``"float32"``, ``"float64"`` or ``"bfloat16"`` (default: the network's).
        memory: ``"packed"`` copies the weights of every route, contiguous and with batch norms folded;
            ``"shared"`` runs slices of the network's own weights.
        batch_buckets: Batch sizes to compile for, for backends that need to know them; other batches are
            split into these sizes by measured times. With a single size, a backend that takes any batch (such
            as eager) is not timed: it runs batches of up to this size whole.
        image_size: Height and width, or one number for both (default: the network's).
        routes: The routes to compile (default: those that the budget needs, see
            `dsnet.runtime._resident_routes`; `Plan.at` adds what another budget needs).
        budgets: ``"all"`` compiles the routes of all budgets at once.
        batch_invariant: Whether the gates of backend eager on a CPU decide bitwise alike in every batch
            (default: for images of at least 96 pixels, where that costs less than 5 % of the time). See
            `Plan.batch_invariant` for other backends.
        progress: Progress callback (default: log at level INFO).

    Returns:
        A `Plan`; for a detector a `dsnet.detection.deploy.plan.DetectorPlan`.

    Raises:
        DsnetError: If an argument is not possible, or the backend cannot be used.

    Examples:
        >>> import dsnet
        >>> plan = compile(dsnet.create_model("ds_mbnet_tiny").eval(), backend="eager", batch_buckets=(8,))
        >>> plan(torch.zeros(2, 3, 16, 16)).shape
        torch.Size([2, 10])
    """
    router, budget = (model.router, model.budget) if isinstance(model, Routed) else (None, None)
    partitioner = partitioner_of(model)
    network = partitioner.network(model)
    if network.training:
        raise DsnetError("a plan is for inference: call .eval() on the network first")
    weight = network.head.classifier.weight
    target = weight.device if device is None else pick_device(str(device))
    if target.type not in get_args(DeviceKind):
        raise DsnetError(f"a plan is for {' or '.join(get_args(DeviceKind))}, not for {target}")
    dtype = weight.dtype if precision is None else _parse_precision(precision)
    _check_memory(memory, backend, same=(target, dtype) == (weight.device, weight.dtype))
    _check_buckets(batch_buckets)
    requested = None if routes is None else _options_of(network, routes)
    if backend == "auto":
        candidates = ["eager"] if memory == "shared" else None
        if partitioner.has_shared_head:
            tried = requested or [network.gate(0).choices]
            candidates = _supporting_backends(model, tried, image_size, dtype, target)
        backend = choose_backend(
            network.at(network.space.largest)[0],
            device=target,
            precision=dtype,
            image_size=None if isinstance(network, CompositeNetwork) else image_size,
            candidates=candidates,
            progress=progress,
        )
    chosen = get_backend(backend)
    reason = chosen.unavailable(target, dtype)
    if reason is not None:
        raise DsnetError(f"backend {backend} cannot be used: {reason}")
    if budgets not in (None, "all") or (budgets is not None and routes is not None):
        raise DsnetError(
            f"budgets is 'all' or None, and excludes routes; not budgets={shorten(budgets)}, "
            f"routes={shorten(routes)}"
        )
    settings = Compiler(
        model=model,
        partitioner=partitioner,
        backend=chosen,
        buckets=batch_buckets,
        memory=memory,
        image_size=image_size,
        precision=dtype,
        device=target,
        batch_invariant=batch_invariant,
    )
    compiler: Any = settings
    if isinstance(network, CompositeNetwork):
        network.input_spec.shape(image_size)
        compiler = CompositeCompiler(network, settings)
    if requested is not None:
        plan = Plan(compiler(requested, None, progress), router, budget)
        return partitioner.plan(model, plan, image_size)
    all_budgets = budgets == "all" or memory == "shared"  # slices take no memory
    needed = needed_choices(
        network, router, None if budget is None else float(budget), all_budgets=all_budgets
    )
    falls_back = not all_budgets and not isinstance(network, CompositeNetwork)
    falls_back = falls_back and can_fall_back(network, target, dtype, captured=chosen.captures(target))
    options = needed.likely if falls_back else needed.possible
    compiled, extender = compiler(options, None, progress), None
    if router is not None:
        source = SourceNetwork(network)
        fallback = functools.partial(source.fallback_segments, image_size=image_size) if falls_back else None
        extender = RouteExtender(source, compiler, fallback, progress)
        if fallback is not None:
            compiled = replace(compiled, fallback=fallback(needed.possible, options))
    return partitioner.plan(model, Plan(compiled, router, budget, extender=extender), image_size)


def _supporting_backends(
    model: object,
    options: Options,
    image_size: int | tuple[int, int] | None,
    precision: torch.dtype,
    device: torch.device,
) -> list[str]:
    """Return all backends, but those of ragged kernels only if they support the layers of the model."""
    request = PartitionRequest(
        options=options, image_size=image_size, precision=precision, device=device, grouped=True, fused=True
    )
    segments, _ = partitioner_of(model).segments(model, request)
    supported = all(unsupported(modules) is None for modules in segment_modules(segments))
    return [name for name in list_backends() if supported or not get_backend(name).ragged]


def _check_memory(memory: str, backend: str, *, same: bool) -> None:
    """Raise if the memory does not exist or cannot be shared; ``same``: by device and precision it can."""
    if memory not in get_args(Memory):
        raise DsnetError(f"unknown memory {memory!r}; possible: {', '.join(get_args(Memory))}")
    if memory == "shared" and backend not in ("auto", "eager"):
        raise DsnetError(f"{backend} copies weights; memory='shared' is for eager")
    if memory == "shared" and not same:
        raise DsnetError("memory='shared' runs the network's own weights as they are: move or convert them")


def _parse_precision(name: str) -> torch.dtype:
    if name not in PRECISIONS:
        raise DsnetError(f"unknown precision {name!r}; possible: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _check_buckets(sizes: Sequence[int] | None) -> None:
    if sizes is None:
        return
    valid = isinstance(sizes, list | tuple) and all(type(size) is int and size > 0 for size in sizes)
    if not valid or not sizes:
        raise DsnetError(f"batch_buckets are positive integers, not {sizes!r}")


def _options_of(network: Supernet, routes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    if not isinstance(routes, list | tuple | range):
        raise DsnetError(f"routes are a list of numbers, not {shorten(routes)}")
    if not routes:
        raise DsnetError("a plan needs at least one route")
    return choices_of_routes(network, routes)
