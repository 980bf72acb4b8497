"""``dsnet profile``: time every route of a network, or of a plan of it, on this machine."""

from __future__ import annotations

import argparse

import torch

from dsnet.cli.options import open_network
from dsnet.cli.output import print_json, writes_files
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.device import pick_device
from dsnet.cost import madds
from dsnet.errors import printable
from dsnet.models import Supernet
from dsnet.report.text import bar, human, table
from dsnet.routes import evenly_spaced
from dsnet.routing import LatencyTable
from dsnet.runtime import get_backend, profile_plan
from dsnet.runtime.profile import profile

__all__ = ["run"]

MAX_ROWS = 32
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@writes_files("out")
def run(args: argparse.Namespace) -> int:
    """Measure, write and print."""
    if args.backend != "auto":
        get_backend(args.backend)  # raises if the name is not registered
    model, size = open_network(args)
    model = model.to(pick_device(args.device))
    set_threads_for(args, model, size, batch=max(args.batch), announce=not args.json)
    measured = _measure(model, args, size)
    if args.out is not None:
        measured.save(args.out)
    if args.json:
        print_json(measured.to_dict())
        return 0
    _show(model, measured, args.repeats)
    if args.out is not None:
        print(printable(f"\nwrote {args.out}"))
    return 0


def _measure(model: Supernet, args: argparse.Namespace, size: int | tuple[int, int] | None) -> LatencyTable:
    if args.backend != "eager":
        return profile_plan(
            model,
            backend=args.backend,
            precision=args.precision,
            batches=args.batch,
            repeats=args.repeats,
            image_size=size,
            progress=progress,
        )
    if args.precision is not None:
        model = model.to(PRECISIONS[args.precision])
    return profile(model, batches=args.batch, repeats=args.repeats, image_size=size, progress=progress)


def _show(model: Supernet, measured: LatencyTable, repeats: int) -> None:
    height, width = measured.image_size
    routes = [model.space[i] for i in evenly_spaced(len(model.space), MAX_ROWS)]
    several = model.space.gates > 1
    print(f"{model.spec.name} at {height} × {width}: {measured.ran}; {repeats} repeats")
    header = ["route", *(["choices"] if several else []), "MAdds", "ms an image", "p95", "of the slowest"]
    for entry in measured.entries:
        times = [measured.route_time(route.choices, entry.batch) for route in routes]
        slowest = max(t.p50 for t in times)
        body = [
            [
                str(route.number),
                *([" ".join(map(str, route.choices))] if several else []),
                human(madds(model, route, measured.image_size)),
                f"{t.p50 / entry.batch:.3f}",
                f"{t.p95 / entry.batch:.3f}",
                f"{bar(t.p50, slowest)} {t.p50 / slowest:.0%}",
            ]
            for route, t in zip(routes, times, strict=True)
        ]
        print(f"\nbatch {entry.batch}\n{table(header, body, left=('of the slowest',))}")
    if len(routes) < len(model.space):
        print(f"{len(routes)} of {len(model.space)} routes, evenly spaced")
    print(
        "\nMilliseconds an image: a batch's time over its size. A route's time is the sum of its segments'\n"
        "medians, and p95 the sum of theirs, which overestimates it. Regrouping is left out."
    )
