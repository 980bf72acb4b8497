"""``dsnet transfer``: a trained supernet for other data, routers included."""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsnet.cli import gate as gate_command
from dsnet.cli import train as train_command
from dsnet.cli.live import LiveWatch
from dsnet.data.survey import survey
from dsnet.errors import DsnetError
from dsnet.routing.config import GateConfig
from dsnet.routing.run import train_gate
from dsnet.training.checkpoint import Checkpoint
from dsnet.training.config import TrainConfig
from dsnet.training.folder import read_config
from dsnet.training.run import train
from dsnet.training.settings import override, parse_assignments
from dsnet.training.transfer import checkpoint_of, trained_on

__all__ = ["add_command", "gate_like"]

PAPER = {"optim.epochs": 70, "optim.warmup": 15}
RATE = 0.7 / 1024  # of learning, for every image of a batch


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "transfer",
        help="fine-tune a trained supernet on other data",
        description="Takes all weights of a run but its classifier, fine-tunes all routes together on other\n"
        "data by the run's own scheme, makes their batch-norm statistics, and trains a gate like the run's,\n"
        "if it has one: anew, or from the run's routing heads (--gate-transfer). Image size and\n"
        "normalisation are those of the run. Settings are the run's but for the paper's schedule: 70\n"
        "epochs, 15 of warm-up, learning rate 0.7 for a batch of 1024; --set changes them.",
        epilog="Examples:\n"
        "  dsnet transfer runs/imagenet --data /data/flowers --out runs/flowers\n"
        "  dsnet transfer runs/digits_mbnet --data my-digits --set optim.epochs=10 --set optim.warmup=1\n"
        "  dsnet transfer runs/imagenette_mbnet --data cifar10   # resized to the run's 128 pixels\n"
        "  dsnet transfer runs/imagenet --data /data/flowers --gate-transfer --gate-set epochs=5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--data", required=True, metavar="NAME|DIR", help="a data set, or a folder of images")
    parser.add_argument("--out", type=Path, help="folder of the new run (default: RUN-DATA)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; may be repeated"
    )
    gates = parser.add_mutually_exclusive_group()
    gates.add_argument("--gate-transfer", action="store_true", help="begin with the run's routing heads")
    gates.add_argument("--no-gate", action="store_true", help="train no gate")
    parser.add_argument(
        "--gate-set", action="append", default=[], metavar="KEY=VALUE", help="change a setting of the gate"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    parser.set_defaults(run_command=run)


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
        survey(config.data.name, config.data.root).check()
        outcome = train(config, folder, resume=args.resume, watch=LiveWatch())
        status = train_command.tell(outcome, config, as_json=False)
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
    return override(GateConfig(), changes)


def _train_gate(folder: Path, config: GateConfig, device: str, *, resume: bool) -> int:
    kept = f"The network is finished and saved: {folder / 'final'}."
    try:
        found = train_gate(folder, config, device=device, resume=resume, watch=LiveWatch())
    except KeyboardInterrupt:  # what is kept in memory has no steps to stop after
        print(
            f"Stopped while the gate was trained. {kept} Train the gate with the same command and --resume.",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    if not found.done:
        print(kept, file=sys.stderr)
    elif found.first:
        train_command.write_page_again(folder)
    return gate_command.tell(found, as_json=False)


def _nothing_left(folder: Path) -> str:
    if (folder / "gated").is_file():
        told = f"{folder} is finished, its gate included: nothing is left to train."
        return f"{told} Next: dsnet calibrate {folder}"
    return f"{folder} is finished: nothing is left to train. `dsnet gate {folder}` would train a gate."


def _config(args: argparse.Namespace, saved: Checkpoint) -> TrainConfig:
    """The run's own settings on other data."""
    old, known = read_config(args.run), trained_on(saved, args.run)
    given = parse_assignments(args.set)
    batch = given.get("optim.batch", given.get("batch", old.optim.batch))
    if type(batch) is not int:
        raise DsnetError(f"optim.batch must be a whole number, not {batch!r}")
    changes: dict[str, Any] = {
        "start": str(args.run),
        "data.name": args.data,
        "data.size": known["size"],
        "optim.lr": RATE * batch,
        **PAPER,
    }
    options = {key: value for key, value in old.options.items() if key != "num_classes"}
    return override(replace(old, options=options), {**changes, **given})


def gate_like(saved: Checkpoint) -> dict[str, object]:
    """The same choices and form of head as the run's gate."""
    plain = saved.data.get("gate")
    kept = (
        "space",
        "goal",
        "head",
        "first_layer",
        "width",
        "strategy",
        "target",
        "complexity",
        "sgs",
        "even",
    )
    return {key: plain[key] for key in kept if key in plain} if isinstance(plain, dict) else {}
