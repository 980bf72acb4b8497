"""``dsnet bench``: what routing saves on this machine."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dsnet.benchmark.api import BenchResult, bench
from dsnet.benchmark.workloads import Mix, measured_mix, read_mix
from dsnet.calibration.calibration import Calibration
from dsnet.cli.options import check_out, locking, open_network
from dsnet.cli.stage_progress import StageLog
from dsnet.cli.threads import settle_for
from dsnet.core.device import pick_device
from dsnet.core.files import write_output
from dsnet.errors import DsnetError, shorten
from dsnet.models import Supernet, list_models
from dsnet.models.loading import load_checkpoint
from dsnet.report.bench import bench_page, bench_plot, bench_text
from dsnet.report.provenance import provenance
from dsnet.training import GateConfig

__all__ = ["run"]


@locking("out", "plot")
def run(args: argparse.Namespace) -> int:
    """Measures, writes and prints."""
    check_out(args.out)
    check_out(args.plot, "--plot")
    if args.plot is not None and args.plot.suffix not in (".svg", ".html"):
        raise DsnetError(f"--plot writes .svg or .html, not {shorten(args.plot.name)}")
    model, size = open_network(args.network, args.set)
    if args.routes is not None:
        model.reset_routing(GateConfig(space=args.routes).routes(model))
    model = model.eval().to(pick_device(args.device))
    batches = args.batch or ([1, 8] if args.quick else [1, 8, 64])
    settle_for(args, model, args.image_size or size, batch=max(batches), say=not args.json)
    found = bench(
        model,
        batches=batches,
        mix=_mix(args, model),
        backend=args.backend,
        precision=args.precision,
        memory=args.memory,
        batch_buckets=args.buckets,
        image_size=args.image_size or size,
        repeats=args.repeats or (3 if args.quick else 20),
        time_limit=args.time_limit,
        quick=args.quick,
        progress=StageLog(),
    )
    if args.out is not None:
        write_output(args.out, json.dumps(_record(found), indent=2, allow_nan=False) + "\n")
    if args.plot is not None:
        title = f"{found.network} on {found.device}, {found.backend}"
        svg = args.plot.suffix == ".svg"
        write_output(args.plot, bench_plot(found).svg(title) if svg else bench_page(found))
    if args.json:
        print(json.dumps(_record(found), indent=2, allow_nan=False))
        return 0
    print(bench_text(found))
    for path in (args.out, args.plot):
        if path is not None:
            print(f"\nwrote {path}")
    return 0


def _record(found: BenchResult) -> dict[str, Any]:
    """The figures, with when and how they were made."""
    words = [word for word in sys.argv[1:] if word != "--json"]
    for option in ("--out", "--plot"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    about = provenance(found.device, f"dsnet {shlex.join(words)}")
    return {"benchmark": "bench", **about, **found.to_dict()}


def _mix(args: argparse.Namespace, model: Supernet) -> str | dict[int, float] | Mix:
    given = args.mix
    if given == "measured":
        return _measured(args, model)
    if args.budget is not None or args.router != "auto":
        raise DsnetError("--budget and --router are for --mix measured")
    if given == "uniform":
        return "uniform"
    return read_mix(Path(given))


def _measured(args: argparse.Namespace, model: Supernet) -> Mix:
    """What the router of a calibrated run takes."""
    if args.network in list_models("supernet"):
        raise DsnetError(
            "--mix measured is for the folder of a run that `dsnet calibrate` has calibrated; "
            f"{args.network} is a model by name"
        )
    if args.routes is not None:
        raise DsnetError("--routes is for other mixes: a measured one says itself which routes there are")
    if args.budget is None:
        raise DsnetError("--mix measured needs --budget: at 45%, say, of the largest route's cost")
    calibration = Calibration.of(load_checkpoint(Path(args.network)), args.network)
    return measured_mix(model, calibration, args.budget, args.router)
