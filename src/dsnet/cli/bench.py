"""``dsnet bench``: measure what routing saves on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

from dsnet.benchmark.api import bench
from dsnet.benchmark.results import BenchResult
from dsnet.benchmark.workloads import Mix, measured_mix, read_mix
from dsnet.calibration.calibration import Calibration
from dsnet.cli.options import open_network
from dsnet.cli.output import print_json, write_chart, writes_files
from dsnet.cli.progress import progress
from dsnet.cli.threads import set_threads_for
from dsnet.core.checkpoint import load_checkpoint
from dsnet.core.device import pick_device
from dsnet.core.files import write_output
from dsnet.errors import DsnetError, printable
from dsnet.models import Supernet, list_models
from dsnet.report.bench import bench_page, bench_plot, bench_text
from dsnet.report.provenance import provenance
from dsnet.runtime import get_backend
from dsnet.training import GateConfig

__all__ = ["run"]


@writes_files("out", "plot")
def run(args: argparse.Namespace) -> int:
    """Measure, write and print."""
    if args.backend != "auto":
        get_backend(args.backend)  # raises if the name is not registered
    model, size = open_network(args)
    if args.routes is not None:
        model.reset_routing(GateConfig(space=args.routes).routes(model))
    model = model.eval().to(pick_device(args.device))
    batches = args.batch or ([1, 8] if args.quick else [1, 8, 64])
    set_threads_for(args, model, size, batch=max(batches), announce=not args.json)
    result = bench(
        model,
        batches=batches,
        mix=_mix(args, model),
        backend=args.backend,
        precision=args.precision,
        memory=args.memory,
        batch_buckets=args.buckets,
        image_size=size,
        repeats=args.repeats or (3 if args.quick else 20),
        time_limit=args.time_limit,
        quick=args.quick,
        progress=partial(progress, stages=True),
    )
    record = _record(result)
    if args.out is not None:
        write_output(args.out, json.dumps(record, indent=2, allow_nan=False) + "\n")
    if args.plot is not None:
        title = f"{result.network} on {result.device}, {result.backend}"
        write_chart(args.plot, title, bench_plot(result), lambda: bench_page(result))
    if args.json:
        print_json(record)
        return 0
    print(bench_text(result))
    for path in (args.out, args.plot):
        if path is not None:
            print(printable(f"\nwrote {path}"))
    return 0


def _record(result: BenchResult) -> dict[str, Any]:
    """The result with its provenance; the command is recorded without its output options."""
    words = [word for word in sys.argv[1:] if word != "--json"]
    for option in ("--out", "--plot"):
        if option in words:
            index = words.index(option)
            del words[index : index + 2]
    about = provenance(result.device, f"dsnet {shlex.join(words)}")
    return {"benchmark": "bench", **about, **result.to_dict()}


def _mix(args: argparse.Namespace, model: Supernet) -> str | dict[int, float] | Mix:
    if args.mix == "measured":
        return _measured(args, model)
    if args.budget is not None or args.router != "auto":
        raise DsnetError("--budget and --router are for --mix measured")
    return "uniform" if args.mix == "uniform" else read_mix(Path(args.mix))


def _measured(args: argparse.Namespace, model: Supernet) -> Mix:
    """The shares of routes that a calibrated run's router takes at the budget."""
    if args.network in list_models("supernet"):
        raise DsnetError(
            "--mix measured is for the folder of a run that `dsnet calibrate` has calibrated; "
            f"{args.network} is a model by name"
        )
    if args.routes is not None:
        raise DsnetError("--routes is for other mixes: with --mix measured the run gives the routes")
    if args.budget is None:
        raise DsnetError("--mix measured needs --budget: at 45%, say, of the largest route's cost")
    calibration = Calibration.of(load_checkpoint(Path(args.network)), args.network)
    return measured_mix(model, calibration, args.budget, args.router)
