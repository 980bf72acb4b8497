"""``dsnet gate``: Stage II, a trained supernet's gates learn to decide."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import fields
from pathlib import Path

from dsnet.cli.live import LiveWatch
from dsnet.cli.train import write_page_again
from dsnet.report.text import bar, table
from dsnet.routing.config import GateConfig
from dsnet.routing.run import GateOutcome, train_gate
from dsnet.training.settings import override, parse_assignments, to_plain

__all__ = ["add_command", "tell"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    settings = "\n".join(
        f"  {f'{f.name}={_plain(f.default)}':19}{f.metadata['about']}" for f in fields(GateConfig)
    )
    parser = commands.add_parser(
        "gate",
        help="train the gates of a trained supernet (Stage II)",
        description="Gives the network of a run new routing heads and trains them; its weights do not\n"
        "change by a bit. Saved as the checkpoint `gated` of the run. Networks with one gate take\n"
        "seconds: what the frozen weights say of the images is kept in memory.\n\n"
        "Settings and their defaults:\n" + settings,
        epilog="Examples:\n"
        "  dsnet gate runs/digits_mbnet                                    the paper's losses\n"
        "  dsnet gate runs/mine --set goal=value                          scores learn the chance that each\n"
        "                                              route is right: what a budget is best spent by\n"
        "  dsnet gate runs/mine --set space=S --save-as gated-S           the paper's DS-MBNet-S\n"
        "  dsnet gate runs/mine --set latency=t.json                      a penalty in milliseconds\n"
        "Then: dsnet calibrate RUN, and dsnet evaluate RUN --routed.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, as `dsnet train` makes it")
    parser.add_argument("--name", help="which of its checkpoints to start from (default: final, else last)")
    parser.add_argument(
        "--save-as", default="gated", metavar="NAME", help="checkpoint to write (default: gated)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: auto)")
    parser.add_argument("--resume", action="store_true", help="go on with training that was stopped")
    parser.add_argument("--dry-run", action="store_true", help="show the settings; train nothing")
    parser.add_argument("--json", action="store_true", help="the settings (--dry-run) or the results as JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Trains, or shows what would be trained."""
    changes = parse_assignments(args.set)
    if isinstance(changes.get("space"), int | tuple):  # 0,3 reads as two numbers
        numbers = changes["space"] if isinstance(changes["space"], tuple) else (changes["space"],)
        changes["space"] = ",".join(map(str, numbers))
    config = override(GateConfig(), changes)
    if args.dry_run:
        plain = to_plain(config)
        print(
            json.dumps(plain, indent=2)
            if args.json
            else "\n".join(f"{k}={_plain(v)}" for k, v in plain.items())
        )
        return 0
    try:
        outcome = train_gate(
            args.run,
            config,
            name=args.name,
            save_as=args.save_as,
            device=args.device,
            resume=args.resume,
            watch=LiveWatch(quiet=args.json),
        )
    except KeyboardInterrupt:  # what is kept in memory has no steps to stop after
        print(
            f"Stopped; nothing of this gate is saved, {args.run} is as it was. "
            "The same command trains it from the beginning.",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    if outcome.done and outcome.first and outcome.name == "gated":
        write_page_again(args.run)
    return tell(outcome, as_json=args.json)


def tell(outcome: GateOutcome, *, as_json: bool) -> int:
    """Prints what gate training came to; the exit status."""
    if not outcome.done:
        ending = outcome.ending
        print(
            f"Stopped after step {ending.step} of {ending.steps}. Go on with the same command and --resume.",
            file=sys.stderr,
        )
        return 128 + (ending.signal or signal.SIGINT)
    if not outcome.first:
        return 0
    print(json.dumps([r.to_dict() for r in outcome.reports], indent=2) if as_json else _shown(outcome))
    return 0


def _plain(value: object) -> str:
    """As --set takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _shown(outcome: GateOutcome) -> str:
    lines = []
    for report in outcome.reports:
        total, most = sum(report.taken.values()), max(report.taken.values())
        which = f"Gate {report.gate}" if len(outcome.reports) > 1 else "The gate"
        lines.append(
            f"{which} on {total} held-out images: {report.entropy:.2f} bits of choice, "
            f"{report.information:.3f} of them about how hard an image is\n"
        )
        rows = [
            [str(choice), str(count), f"{count / total:.0%}", bar(count, most) if count else ""]
            for choice, count in report.taken.items()
        ]
        lines.append(table(["choice", "images", "share", ""], rows, left=("",)) + "\n")
    static = [report for report in outcome.reports if report.static]
    if outcome.goal == "value":
        lines.append(
            "Without a budget such a gate takes the most accurate route; with one it saves where it can.\n"
        )
    elif static:
        alone = len(outcome.reports) == 1
        who = "the gate decides" if alone else f"{len(static)} of {len(outcome.reports)} gates decide"
        better = "--set goal=value trains a gate for that; " if alone else ""
        lines.append(
            f"warning: {who} nothing: (nearly) all images get the same choice.\n"
            f"`dsnet calibrate` spreads them for a budget; {better}\n"
            "--set even=true gives rare targets more weight, --set images=held_out shows images that the\n"
            "weights have not learnt.\n"
        )
    named = "" if outcome.name == "gated" else f" --name {outcome.name}"
    lines.append(f"Saved as {outcome.folder / outcome.name}. Next: dsnet calibrate {outcome.folder}{named}")
    return "\n".join(lines)
