"""``dsnet bench``: what routing saves on this machine."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any, get_args

from dsnet.cli.options import check_out, image_size, open_network, positive
from dsnet.cli.progress import progress
from dsnet.errors import DsnetError
from dsnet.models import Supernet, list_models
from dsnet.report.bench import bench_page, bench_plot, bench_text
from dsnet.routing import GateConfig
from dsnet.routing.calibration import Calibration, RouterName
from dsnet.runtime import list_backends
from dsnet.runtime.bench import BenchResult, bench
from dsnet.runtime.mix import Mix, measured_mix
from dsnet.training.checkpoint import load_checkpoint
from dsnet.training.run import pick_device

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="what routing saves on this machine, beside ideal stand-alone networks",
        description="Times mixed batches, in which every image takes its own route, side by side with\n"
        "everyone at the largest route, with what others do (masking, indexing), with slicing\n"
        "without a plan, with ideal stand-alone networks in the same mix, with a cascade, and\n"
        "with the static network that one would take instead. Weights do not matter, so a\n"
        "model by name will do.",
        epilog="Examples:\n"
        "  dsnet bench ds_mbnet --routes S --backend openvino --batch 1 16 --plot bench.svg\n"
        "  dsnet bench ds_mbnet_cifar --device cuda --precision bfloat16 --batch 64 256 1024\n"
        "  dsnet bench ds_resnet_cifar --set bn_key=stage --batch 8\n"
        "  dsnet bench runs/cifar10_mbnet --mix measured --budget 45% --plot bench.html\n"
        '  dsnet bench runs/cifar10_mbnet --mix mix.json --json     (mix.json: {"0": 0.7, "13": 0.3})',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "network", metavar="MODEL|RUN", help="a supernet (`dsnet models` lists them), or the folder of a run"
    )
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 8, 64], metavar="N", help="default: 1 8 64"
    )
    parser.add_argument(
        "--mix",
        default="uniform",
        metavar="uniform|measured|FILE",
        help="measured: what the run's calibrated router takes at --budget; a JSON file: shares by route "
        "(default: uniform, over 32 drawn ones where there are more)",
    )
    parser.add_argument("--budget", metavar="COST", help="for --mix measured: 300M, 45%%, 5ms")
    parser.add_argument(
        "--router",
        choices=get_args(RouterName),
        default="auto",
        help="for --mix measured; auto: the more accurate one at the budget (default: auto)",
    )
    parser.add_argument(
        "--routes", metavar="S|0,3,7", help="what the gate decides between (default: what it does already)"
    )
    parser.add_argument(
        "--backend",
        choices=["auto", *list_backends()],
        default="auto",
        help="default: auto, the fastest here",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help="default: the network's own")
    parser.add_argument("--memory", choices=["packed", "shared"], default="packed", help="default: packed")
    parser.add_argument(
        "--buckets",
        type=positive,
        nargs="+",
        metavar="N",
        help="batch sizes that programs are made for (default: the backend's own)",
    )
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="rounds (default: 20)")
    parser.add_argument("--image-size", type=image_size, metavar="N", help="height and width")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the model; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the figures here")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="theory, ideal and measured as a picture (.svg or .html)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Measures, writes and prints."""
    check_out(args.out)
    check_out(args.plot, "--plot")
    if args.plot is not None and args.plot.suffix not in (".svg", ".html"):
        raise DsnetError(f"--plot writes .svg or .html, not {args.plot.name!r}")
    model, size = open_network(args.network, args.set)
    if args.routes is not None:
        model.reset_routing(GateConfig(space=args.routes).routes(model))
    found = bench(
        model.eval().to(pick_device(args.device)),
        batches=args.batch,
        mix=_mix(args, model),
        backend=args.backend,
        precision=args.precision,
        memory=args.memory,
        batch_buckets=args.buckets,
        image_size=args.image_size or size,
        repeats=args.repeats,
        progress=progress,
    )
    if args.out is not None:
        args.out.write_text(json.dumps(_record(found), indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        picture = bench_plot(found) if args.plot.suffix == ".svg" else bench_page(found)
        args.plot.write_text(picture, encoding="utf-8")
    if args.json:
        print(json.dumps(_record(found), indent=2))
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
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"benchmark": "bench", "date": today, "command": f"dsnet {shlex.join(words)}", **found.to_dict()}


def _mix(args: argparse.Namespace, model: Supernet) -> str | dict[int, float] | Mix:
    given = args.mix
    if given == "measured":
        return _measured(args, model)
    if args.budget is not None or args.router != "auto":
        raise DsnetError("--budget and --router are for --mix measured")
    if given == "uniform":
        return "uniform"
    try:
        data = json.loads(Path(given).read_text(encoding="utf-8"))
        return {int(route): share for route, share in data.items()}
    except OSError as error:
        raise DsnetError(
            f"--mix {given} cannot be read: {error.strerror}; or give uniform or measured"
        ) from error
    except (ValueError, AttributeError) as error:
        raise DsnetError(f'--mix {given} is no JSON of shares by route, as {{"0": 0.7, "3": 0.3}}') from error


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
