"""``dsnet transfer``: fine-tune a trained supernet and its gate on other data."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from dsnet.cli.gate import report_gates
from dsnet.cli.progress import TrainingProgress
from dsnet.cli.train import print_stopped, report_outcome, set_training_threads
from dsnet.core.checkpoint import Checkpoint
from dsnet.core.interrupt import stopped_status
from dsnet.core.settings import override, parse_assignments
from dsnet.data.inspect import inspect_dataset
from dsnet.errors import DsnetError, printable
from dsnet.models.loading import build_network
from dsnet.report.run_page import update_run_page
from dsnet.training.api import train
from dsnet.training.config import TrainConfig
from dsnet.training.run_dir import read_config
from dsnet.training.stage2.api import train_gate
from dsnet.training.stage2.config import GateConfig
from dsnet.training.transfer import checkpoint_of, fine_tuning, gate_like, trained_on

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Fine-tune the network, then train its gate."""
    saved = checkpoint_of(args.run)
    if args.gate_transfer and saved.data.get("gate") is None:
        raise DsnetError(f"{args.run} has no trained gate to begin with: `dsnet gate {args.run}` trains one")
    config, gate = _config(args, saved), _gate_config(args, saved)
    folder: Path = args.out or args.run.with_name(f"{args.run.name}-{Path(args.data).name}")
    finished = args.resume and (folder / "final").is_file()
    if finished and (folder / "gated").is_file():
        print(printable(f"{folder} is finished, its gate included: nothing is left to train."), end=" ")
        print(printable(f"Next: dsnet calibrate {folder}"))
        return 0
    if finished and gate is None:
        text = f"{folder} is finished: nothing is left to train. `dsnet gate {folder}` would train a gate."
        print(printable(text))
        return 0
    if not finished:
        inspect_dataset(config.data.name, config.data.root).check()
        set_training_threads(args, folder, config, announce=True)
        try:
            outcome = train(config, folder, resume=args.resume, callback=TrainingProgress())
        except KeyboardInterrupt as stopped:
            return print_stopped(stopped, folder)
        status = report_outcome(outcome, config, as_json=False)
        if status or not outcome.first:
            return status
    return 0 if gate is None else _train_gate(folder, gate, config.run.device, resume=finished)


def _config(args: argparse.Namespace, saved: Checkpoint) -> TrainConfig:
    """Return the run's settings for the other data."""
    old = read_config(args.run)
    changes = parse_assignments(args.set)
    options = {key: value for key, value in old.options.items() if key != "num_classes"}
    data = replace(old.data, name=args.data, size=trained_on(saved, args.run)["size"])
    start = replace(
        old, options=options, start=str(args.run), weights=None, weights_by_order=False, data=data
    )
    config = fine_tuning(start, changes)
    if old.scheme.teacher is not None and config.scheme.teacher is None and "scheme.name" not in changes:
        print(
            f"The teacher {printable(old.scheme.teacher)} knows other classes: fine-tuning by scheme "
            f"{config.scheme.name}; --set scheme.name=ed --set scheme.teacher=RUN gives another teacher",
            file=sys.stderr,
        )
    return config


def _gate_config(args: argparse.Namespace, saved: Checkpoint) -> GateConfig | None:
    """Return the settings of the gate; None if none is to be trained."""
    if args.no_gate or (saved.data.get("gate") is None and not args.gate_set):
        return None
    changes = {**gate_like(saved), **parse_assignments(args.gate_set)}
    if args.gate_transfer:
        changes["start"] = str(args.run)
    config = override(GateConfig(), changes)
    config.resolved(build_network(saved))  # refuses a space that the network lacks before training starts
    return config


def _train_gate(folder: Path, config: GateConfig, device: str, *, resume: bool) -> int:
    saved = printable(f"The network is finished and saved: {folder / 'final'}.")
    try:
        outcome = train_gate(folder, config, device=device, resume=resume, callback=TrainingProgress())
    except KeyboardInterrupt as stopped:  # gates trained from outputs in memory cannot resume
        print(
            f"Stopped while the gate was trained. {saved} Train the gate with the same command and --resume.",
            file=sys.stderr,
        )
        return stopped_status(stopped)
    if not outcome.done:
        print(saved, file=sys.stderr)
    elif outcome.first:
        update_run_page(folder)
    return report_gates(outcome, as_json=False)
