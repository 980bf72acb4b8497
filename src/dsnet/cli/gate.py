"""``dsnet gate``: train the gates of a trained supernet (Stage II)."""

from __future__ import annotations

import argparse
import sys

from dsnet.cli.output import print_json
from dsnet.cli.parsers.common import setting_text
from dsnet.cli.progress import TrainingProgress
from dsnet.cli.threads import forward_work, kept_threads, set_threads
from dsnet.cli.train import stop_status
from dsnet.core.device import pick_device
from dsnet.core.interrupt import stopped_status
from dsnet.core.settings import override, parse_assignments, to_plain
from dsnet.errors import printable
from dsnet.models.loading import build_network, load_classifier
from dsnet.report.run_page import update_run_page
from dsnet.report.text import counts_table
from dsnet.training.stage2.api import GateOutcome, train_gate
from dsnet.training.stage2.config import GateConfig

__all__ = ["report_gates", "run"]


def run(args: argparse.Namespace) -> int:
    """Train the gates, or show the settings."""
    changes = parse_assignments(args.set)
    if isinstance(changes.get("space"), int | tuple):  # 0,3 is parsed as two numbers
        numbers = changes["space"] if isinstance(changes["space"], tuple) else (changes["space"],)
        changes["space"] = ",".join(map(str, numbers))
    config = override(GateConfig(), changes)
    if args.dry_run:
        if args.run.is_dir():  # else the settings alone are shown
            config = config.resolved(build_network(load_classifier(args.run, args.name)))
        plain = to_plain(config)
        if args.json:
            print_json(plain)
        else:
            print("\n".join(f"{key}={setting_text(value)}" for key, value in plain.items()))
        return 0
    set_threads(
        args,
        pick_device(args.device),
        lambda: forward_work(build_network(load_classifier(args.run, args.name)), None),
        batch=config.batch or 512,
        kept=kept_threads(args.run / f"{args.save_as}.stage2") if args.resume else None,
        announce=not args.json,
    )
    try:
        outcome = train_gate(
            args.run,
            config,
            name=args.name,
            save_as=args.save_as,
            device=args.device,
            resume=args.resume,
            callback=TrainingProgress(quiet=args.json),
            said=lambda message: None if args.json else print(message, file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt as stopped:  # gates trained from outputs in memory cannot resume
        print(
            f"Stopped; nothing of this gate is saved, {printable(str(args.run))} is as it was. "
            "The same command trains it from the beginning.",
            file=sys.stderr,
        )
        return stopped_status(stopped)
    if outcome.done and outcome.first and outcome.name == "gated":
        update_run_page(args.run)
    return report_gates(outcome, as_json=args.json)


def report_gates(outcome: GateOutcome, *, as_json: bool) -> int:
    """Print the results of gate training; return the exit status."""
    if not outcome.done:
        return stop_status(outcome.status)
    if outcome.first and as_json:
        print_json([report.to_dict() for report in outcome.reports])
    elif outcome.first:
        print(printable(_report_text(outcome)))
    return 0


def _report_text(outcome: GateOutcome) -> str:
    lines = []
    for report in outcome.reports:
        name = f"Gate {report.gate}" if len(outcome.reports) > 1 else "The gate"
        lines.append(
            f"{name} on {sum(report.choice_counts.values())} held-out images: {report.entropy:.2f} bits of "
            f"choice, {report.information:.3f} of them about how hard an image is\n"
        )
        lines.append(counts_table("choice", report.choice_counts) + "\n")
    static = [report for report in outcome.reports if report.static]
    if outcome.goal == "value":
        lines.append(
            "Without a budget such a gate takes the most accurate route; with one it saves where it can.\n"
        )
    elif static:
        alone = len(outcome.reports) == 1
        subject = "the gate decides" if alone else f"{len(static)} of {len(outcome.reports)} gates decide"
        better = "--set goal=value trains a gate for that; " if alone else ""
        lines.append(
            f"warning: {subject} nothing: (nearly) all images get the same choice.\n"
            f"`dsnet calibrate` spreads them for a budget; {better}\n"
            "--set even=true gives rare targets more weight, --set images=held_out takes images that the\n"
            "weights have not learnt.\n"
        )
    named = "" if outcome.name == "gated" else f" --name {outcome.name}"
    lines.append(f"Saved as {outcome.folder / outcome.name}. Next: dsnet calibrate {outcome.folder}{named}")
    return "\n".join(lines)
