"""``dsnet bench``: what routing saves on this machine."""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from dsnet.cli.options import check_out, image_size, open_network, positive
from dsnet.cli.progress import progress
from dsnet.errors import DsnetError
from dsnet.report.text import human, table
from dsnet.routing import GateConfig
from dsnet.runtime import list_backends
from dsnet.runtime.bench import BenchResult, bench
from dsnet.training.run import pick_device

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="what routing saves on this machine, beside ideal stand-alone networks",
        description="Times mixed batches, in which every image takes its own route, side by side with\n"
        "everyone at the largest route, with ideal stand-alone networks in the same mix, with a\n"
        "cascade, and with the static network that one would take instead. Weights do not\n"
        "matter, so a model by name will do.",
        epilog="Examples:\n"
        "  dsnet bench ds_mbnet --routes S --backend openvino --batch 1 16\n"
        "  dsnet bench ds_mbnet_cifar --device cuda --precision bfloat16 --batch 64 256 1024\n"
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
        metavar="uniform|FILE",
        help="a JSON file: shares by route (default: uniform)",
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
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Measures, writes and prints."""
    check_out(args.out)
    model, size = open_network(args.network, args.set)
    if args.routes is not None:
        model.reset_routing(GateConfig(space=args.routes).routes(model))
    found = bench(
        model.eval().to(pick_device(args.device)),
        batches=args.batch,
        mix=_mix(args.mix),
        backend=args.backend,
        precision=args.precision,
        memory=args.memory,
        image_size=args.image_size or size,
        repeats=args.repeats,
        progress=progress,
    )
    if args.out is not None:
        args.out.write_text(json.dumps(_record(found), indent=2) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(_record(found), indent=2))
        return 0
    _show(found)
    if args.out is not None:
        print(f"\nwrote {args.out}")
    return 0


def _record(found: BenchResult) -> dict[str, Any]:
    """The figures, with when and how they were made."""
    words = [word for word in sys.argv[1:] if word != "--json"]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"benchmark": "bench", "date": today, "command": f"dsnet {shlex.join(words)}", **found.to_dict()}


def _mix(given: str) -> str | dict[int, float]:
    if given == "uniform":
        return given
    try:
        data = json.loads(Path(given).read_text(encoding="utf-8"))
        return {int(route): share for route, share in data.items()}
    except OSError as error:
        raise DsnetError(f"--mix {given} cannot be read: {error.strerror}; or give uniform") from error
    except (ValueError, AttributeError) as error:
        raise DsnetError(f'--mix {given} is no JSON of shares by route, as {{"0": 0.7, "3": 0.3}}') from error


def _show(found: BenchResult) -> None:
    mix = ", ".join(f"{share:.0%} at {route}" for route, share in found.shares.items())
    print(
        f"{found.network} on {found.device}, {found.backend}, {found.precision}, {found.memory}, "
        f"{found.threads} threads, torch {found.torch}\n"
        f"routes: {mix}; {human(found.resident)}B of weights in {found.programs} programs\n"
        f"by multiply-adds the mix is {found.theory:.2f} × as fast as everyone at the largest route\n"
    )
    header = ["batch", "largest", "grouped", "gated", "ideal", "ratio", "speed-up", "cascade", "ratio "]
    header += [found.twin] if found.twin else []
    rows = []
    for r in found.results:
        ms = {way: spread.median for way, spread in r.times.items()}
        cells = [f"{ms['full']:.2f}", f"{ms['grouped']:.2f}", f"{ms['gated']:.2f}", f"{r.ideal:.2f}"]
        cells += [f"{r.ratio:.2f}", f"{r.speedup:.2f} ×", f"{ms['cascade']:.2f}", f"{r.ratio_cascade:.2f}"]
        rows.append([str(r.batch), *cells, *([f"{ms['twin']:.2f}"] if found.twin else [])])
    print(table(header, rows))
    print(
        f"\nMilliseconds a batch, medians of {found.repeats} rounds. largest: all at the largest route.\n"
        "grouped: the network itself, no plan. gated: the plan, images at their routes. ideal: stand-alone\n"
        "networks, weighted by the mix; ratio: ideal over gated. speed-up: largest over gated. cascade: the\n"
        "smallest route for all, the largest for a fifth of them; its ratio to its own ideal."
        + (f"\n{found.twin}: the static network." if found.twin else "")
    )
