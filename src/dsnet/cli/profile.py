"""``dsnet profile``: how long every route of a network, or of a plan of it, takes on this machine."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch

from dsnet.cli.options import check_out, image_size, open_network, positive
from dsnet.cli.progress import progress
from dsnet.cost import madds
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.report.text import bar, human, table
from dsnet.routes import evenly
from dsnet.routing import LatencyTable, profile
from dsnet.runtime import list_backends, profile_plan
from dsnet.training.run import pick_device

__all__ = ["add_command"]

MOST_ROWS = 32
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "profile",
        help="time every route of a network on this machine, for budgets in milliseconds",
        description="Times a network's parts on this machine: what runs before the first gate, and what\n"
        "runs behind every choice of every gate. A route's time is the sum of its parts'. The\n"
        "file that --out writes is a table of latencies, by which budgets can be given in\n"
        "milliseconds; it holds for this network on this device and backend. --backend other\n"
        "than eager times a plan, as `dsnet.runtime.compile` makes it: take what you will serve\n"
        "with. Weights do not matter, so a model by name will do.",
        epilog="Examples:\n"
        "  dsnet profile ds_mbnet\n"
        "  dsnet profile ds_mbnet_cifar --set num_classes=100 --batch 1 8 64\n"
        "  dsnet profile runs/digits_mbnet --threads 1 --out latency.json\n"
        "  dsnet profile runs/mine --backend openvino --out openvino.json\n"
        "  dsnet profile ds_resnet --device cuda --batch 32 --image-size 160 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "network", metavar="MODEL|RUN", help="a supernet (`dsnet models` lists them), or the folder of a run"
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1], metavar="N", help="batch sizes (default: 1)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument(
        "--backend",
        choices=["eager", "auto", *(name for name in list_backends() if name != "eager")],
        default="eager",
        help="eager: the network itself; others: a plan; auto: of the fastest backend here (default: eager)",
    )
    parser.add_argument("--precision", choices=list(PRECISIONS), help="default: the network's own")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="of the CPU (default: torch's own choice)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=30, metavar="N", help="times each part is timed (default: 30)"
    )
    parser.add_argument(
        "--image-size",
        type=image_size,
        metavar="N",
        help="height and width (default: what the run was trained at, or the model is made for)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the model, as create_model takes it; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the table of latencies here")
    parser.add_argument("--json", action="store_true", help="print the table of latencies as JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Measures, writes and prints."""
    check_out(args.out)
    cores = os.cpu_count() or 1
    if args.threads is not None and args.threads > cores:
        raise DsnetError(
            f"--threads {args.threads} would wait for each other: this machine has {cores} cores"
        )
    device = pick_device(args.device)
    model, size = open_network(args.network, args.set)
    threads = torch.get_num_threads()
    try:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        measured = _measure(model.to(device), args, args.image_size or size)
    finally:
        torch.set_num_threads(threads)
    if args.out is not None:
        measured.save(args.out)
    if args.json:
        print(json.dumps(measured.to_dict(), indent=2))
        return 0
    _show(model, measured, args.repeats)
    if args.out is not None:
        print(f"\nwrote {args.out}")
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
    routes = [model.space[i] for i in evenly(len(model.space), MOST_ROWS)]
    several = model.space.gates > 1
    print(f"{model.spec.name} at {height} × {width}: {measured.ran}; {repeats} repeats")
    header = ["route", *(["choices"] if several else []), "MAdds", "ms an image", "p95", "of the slowest"]
    for entry in measured.entries:
        times = [entry.of(route.choices) for route in routes]
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
        "\nMilliseconds an image: a batch's time over its size. A route's time is the sum of its parts'\n"
        "medians, its p95 the sum of theirs, which is on the high side. Deciding and regrouping are left out."
    )
