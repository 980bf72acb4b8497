"""The page of a run, from the files of its folder."""

from __future__ import annotations

import warnings
from pathlib import Path

from dsnet.calibration.difficulty import GateReport
from dsnet.core.checkpoint import load_checkpoint
from dsnet.core.files import write_text
from dsnet.core.formats import GATE_REPORTS, ROUTING
from dsnet.core.metrics_log import read_metrics
from dsnet.core.schema import check
from dsnet.errors import DsnetError, DsnetWarning
from dsnet.report.training import training_page
from dsnet.training.config import TrainConfig
from dsnet.training.results import Outcome, read_outcome
from dsnet.training.run_dir import locked, read_config

__all__ = ["update_run_page", "write_run_page"]


def write_run_page(outcome: Outcome, config: TrainConfig) -> Path:
    """Write ``report.html`` of a run and return its path.

    Raises:
        LockedError: Another process is writing to the run.
    """
    folder = outcome.folder
    page = folder / "report.html"
    with locked(folder):
        gates: list[GateReport] = []
        verdict: str | None = None
        if any((folder / name).is_file() for name in ("gated", "final")):
            data = load_checkpoint(folder).data
            plain = data.get("gate_reports", [])
            check(GATE_REPORTS, plain, f"{folder}: gate_reports")
            gates = [GateReport.from_dict(report) for report in plain]
            if data.get("routing") is not None:
                check(ROUTING, data["routing"], f"{folder}: routing")
                verdict = (data["routing"].get("verdict") or {}).get("text")
        metrics = read_metrics(folder / "metrics.jsonl")
        write_text(page, training_page(outcome, config, metrics, gates=gates, verdict=verdict))
    return page


def update_run_page(folder: Path) -> None:
    """Write the page of a finished run again if it has one, for example after a gate was trained.

    A page that cannot be written is a warning.
    """
    try:
        outcome = read_outcome(folder)
        if outcome is not None and (folder / "report.html").is_file():
            write_run_page(outcome, read_config(folder))
    except DsnetError as error:
        warnings.warn(f"{folder / 'report.html'} is not brought up to date: {error}", DsnetWarning, 2)
