"""``dsnet transfer``: a trained supernet for other data, routers included."""

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
    """Trains the network, then its gate."""
    saved = checkpoint_of(args.run)
    gated = saved.data.get("gate") is not None
    if args.gate_transfer and not gated:
        raise DsnetError(f"{args.run} has no trained gate to begin with: `dsnet gate {args.run}` trains one")
    config, wanted = _config(args, saved), _gate(args, saved)
    folder: Path = args.out or args.run.with_name(f"{args.run.name}-{Path(args.data).name}")
    finished = args.resume and (folder / "final").is_file()
    if finished and (wanted is None or (folder / "gated").is_file()):
        print(_nothing_left(folder))
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
    return 0 if wanted is None else _train_gate(folder, wanted, config.run.device, resume=finished)


def _gate(args: argparse.Namespace, saved: Checkpoint) -> GateConfig | None:
    """The settings of the gate; none where none is to be trained."""
    if args.no_gate or (saved.data.get("gate") is None and not args.gate_set):
        return None
    changes = {**gate_like(saved), **parse_assignments(args.gate_set)}
    if args.gate_transfer:
        changes["start"] = str(args.run)
    config = override(GateConfig(), changes)
    config.resolved(
        build_network(saved)
    )  # a space that the network does not have is refused before anything is trained
    return config


def _train_gate(folder: Path, config: GateConfig, device: str, *, resume: bool) -> int:
    kept = f"The network is finished and saved: {folder / 'final'}."
    try:
        found = train_gate(folder, config, device=device, resume=resume, callback=TrainingProgress())
    except KeyboardInterrupt as stopped:  # what is kept in memory has no steps to stop after
        print(
            f"Stopped while the gate was trained. {kept} Train the gate with the same command and --resume.",
            file=sys.stderr,
        )
        return stopped_status(stopped)
    if not found.done:
        print(kept, file=sys.stderr)
    elif found.first:
        update_run_page(folder)
    return report_gates(found, as_json=False)


def _nothing_left(folder: Path) -> str:
    if (folder / "gated").is_file():
        told = f"{folder} is finished, its gate included: nothing is left to train."
        return f"{told} Next: dsnet calibrate {folder}"
    return f"{folder} is finished: nothing is left to train. `dsnet gate {folder}` would train a gate."


def _config(args: argparse.Namespace, saved: Checkpoint) -> TrainConfig:
    """The run's own settings on other data."""
    old, known = read_config(args.run), trained_on(saved, args.run)
    given = parse_assignments(args.set)
    options = {key: value for key, value in old.options.items() if key != "num_classes"}
    data = replace(old.data, name=args.data, size=known["size"])
    config = fine_tuning(replace(old, options=options, start=str(args.run), data=data), given)
    if old.scheme.teacher is not None and config.scheme.teacher is None and "scheme.name" not in given:
        print(
            f"The teacher {printable(old.scheme.teacher)} knows other classes: fine-tuning by scheme "
            f"{config.scheme.name}; --set scheme.name=ed --set scheme.teacher=RUN gives another teacher",
            file=sys.stderr,
        )
    return config
