"""Calibration of the routers of a run's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dsnet.calibration.calibration import Calibration, calibrate, has_trained_gates
from dsnet.calibration.compare import compare
from dsnet.core.checkpoint import default_name
from dsnet.models.loading import save_checkpoint
from dsnet.routes import evenly_spaced
from dsnet.routing.latency import LatencyTable
from dsnet.routing.route_outputs import RouteOutputs, collect
from dsnet.routing.router import parse_budget
from dsnet.training.stage2.trained_run import TrainedRun, lock_run, open_trained

__all__ = ["CalibratedRun", "calibrate_run"]

MAX_ROUTES = 32  # of cascades and comparisons


class CalibratedRun(NamedTuple):
    """A run with calibrated routers, and the outputs of its network on the calibration images."""

    run: TrainedRun
    name: str  # of the checkpoint
    outputs: RouteOutputs
    calibration: Calibration
    latency: LatencyTable | None  # the table whose milliseconds are the costs


def calibrate_run(
    folder: str | Path,
    *,
    name: str | None = None,
    latency: str | Path | None = None,
    budget: float | str | None = None,
    router: str = "auto",
    device: str = "auto",
    batch: int = 256,
    progress: Callable[[Iterator[Any], int, str], Iterator[Any]] = lambda batches, total, label: batches,
) -> CalibratedRun:
    """Calibrate the routers of a run's checkpoint on held-out images, and save them with it.

    Args:
        folder: Folder of the run.
        name: Name of the checkpoint (default: that of `load_checkpoint`).
        latency: File of a latency table whose milliseconds are the costs (default: multiply-adds).
        budget: A budget to check the router with.
        router: Name of that router.
        device: Device, or ``auto``.
        batch: Images at a time.
        progress: Passes on batches while it reports progress, given their number and a label.

    Raises:
        DsnetError: The router could not keep the budget; nothing is saved then.
    """
    folder = Path(folder)
    with lock_run(folder):
        run = open_trained(folder, name, device=device)
        model, images = run.model, run.calibration_images()
        costs, table = run.costs(latency)
        limit = None if budget is None else parse_budget(budget, costs)
        routes = [model.space[i] for i in evenly_spaced(len(model.space), MAX_ROUTES)]
        batches = progress(run.seen(images, batch), -(-len(images) // batch), "batch")
        outputs = collect(model, batches, routes)
        calibration = calibrate(outputs, costs, gate=has_trained_gates(run.saved))
        if limit is not None:
            calibration.router(router, limit).policy(limit)
        name = name or default_name(folder)
        tensors = {group: values for group, values in run.saved.tensors.items() if group != "model"}
        low, high = calibration.budget_range()
        budgets = [low + share / 8 * (high - low) for share in range(9)]
        verdict = compare(outputs, calibration, budgets, images="held-out images").verdict
        routing = {**calibration.to_dict(), "verdict": None if verdict is None else verdict.to_dict()}
        data = {**run.saved.own_data, "routing": routing}
        save_checkpoint(folder, name, model, step=run.saved.data["step"], tensors=tensors, data=data)
    return CalibratedRun(run, name, outputs, calibration, table)
