"""What the commands that train share."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

from dsnet.cli.threads import Work, forward_work, kept_threads, settle
from dsnet.core.device import pick_device
from dsnet.core.settings import keys_of
from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import printable
from dsnet.models import create_model
from dsnet.training.config import TrainConfig
from dsnet.training.loop import RunStatus

__all__ = ["settings_text", "settle_for_training", "stop_status"]


def settings_text(config: TrainConfig | DetectionConfig) -> str:
    """Format all settings, one ``key = value`` per line."""
    return "\n".join(f"{key} = {printable(str(attrgetter(key)(config)))}" for key, _ in keys_of(type(config)))


def settle_for_training(
    args: argparse.Namespace,
    config: TrainConfig | DetectionConfig,
    folder: Path,
    make_work: Callable[[], Work] | None = None,
    *,
    say: bool,
) -> None:
    """Set the number of threads for a run; measure ``make_work`` (default: forward passes) if it is open."""
    settle(
        args,
        pick_device(config.run.device),
        make_work or (lambda: forward_work(create_model(config.model, **config.options), config.data.size)),
        batch=config.optim.batch,
        kept=kept_threads(folder) if args.resume else None,
        say=say,
    )


def stop_status(status: RunStatus, folder: Path | None = None) -> int:
    """Print where a run stopped and how to continue; return the exit status of its signal."""
    saved = "" if folder is None else f"; saved in {folder}"
    print(
        f"Stopped after step {status.step} of {status.steps}{saved}. "
        "Go on with the same command and --resume.",
        file=sys.stderr,
    )
    return 128 + (status.signal or signal.SIGINT)
