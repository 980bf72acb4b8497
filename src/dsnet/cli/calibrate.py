"""``dsnet calibrate``: routers that keep a budget, from one pass over held-out images."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from dsnet.calibration.calibration import Calibration, has_trained_gates
from dsnet.calibration.compare import compare
from dsnet.calibration.search import interpolate, static_points
from dsnet.cli.options import run_text
from dsnet.cli.output import print_json
from dsnet.cli.progress import progress
from dsnet.cli.threads import forward_work, set_threads
from dsnet.core.device import pick_device
from dsnet.errors import DsnetError, printable
from dsnet.models.loading import build_network, load_classifier
from dsnet.report.run_page import update_run_page
from dsnet.report.text import table
from dsnet.routing.cost_table import CostTable
from dsnet.routing.policies import policy_class
from dsnet.routing.route_outputs import RouteOutputs, simulate
from dsnet.routing.router import format_cost, parse_budget
from dsnet.training.stage2.calibrate import calibrate_run

__all__ = ["run"]

FEW_IMAGES = 200  # below, a percent of the images is one or two of them


def run(args: argparse.Namespace) -> int:
    """Calibrate, save, and print costs and accuracies at budgets."""
    if args.target_ms is not None and args.latency_table is None:
        raise DsnetError(
            "--target-ms needs --latency-table FILE: `dsnet profile RUN --out FILE` measures one here"
        )
    if args.target_madds is not None and args.latency_table is not None:
        raise DsnetError(
            "--target-madds counts multiply-adds, --latency-table milliseconds; give --target-ms"
        )
    saved = load_classifier(args.run, args.name)
    gated = has_trained_gates(saved)
    if args.router != "auto":
        policy_class(args.router)
    if args.router == "gate" and not gated:
        raise DsnetError(f"the gates of {run_text(args)} are not trained; run `dsnet gate {args.run}` first")
    target = args.target_madds if args.target_ms is None else args.target_ms
    set_threads(args, pick_device(args.device), lambda: forward_work(build_network(saved), None), batch=256)
    calibrated = calibrate_run(
        args.run,
        name=args.name,
        latency=args.latency_table,
        budget=target,
        router=args.router,
        device=args.device,
        progress=progress,
    )
    update_run_page(args.run)
    calibration, outputs, costs = calibrated.calibration, calibrated.outputs, calibrated.calibration.costs
    budget = None if target is None else parse_budget(target, costs)
    low, high = calibration.budget_range(args.router)
    budgets = [budget] if budget else [low + share / 8 * (high - low) for share in range(9)]
    rows = [_row(calibration, outputs, b, args.router) for b in budgets]
    verdict = compare(outputs, calibration, budgets, images="held-out images").verdict
    if args.json:
        print_json(
            {
                "images": calibration.images,
                "digest": calibration.digest,
                "unit": costs.unit,
                "verdict": None if verdict is None else verdict.to_dict(),
                "budgets": rows,
            }
        )
        return 0
    print(f"{calibrated.run.model.spec.name}, {calibration.images} held-out images")
    if calibrated.latency is not None:
        print(f"milliseconds of {calibrated.latency.ran}, batch {calibrated.latency.batches[0]}")
    print()
    print(_table(rows, costs))
    if calibration.images < FEW_IMAGES:
        print(
            f"\nwarning: {calibration.images} images are few: on others a budget may give another mean cost."
        )
    if verdict is not None:
        print(f"\n{verdict}")
        print("Both were chosen on these images; `dsnet evaluate --routed` judges them on others.")
    if not gated and calibrated.run.model.has_gate:
        print(printable(f"\nNo gate: the gates are not trained (`dsnet gate {args.run}`)."))
    if budget is not None:
        _advise(calibration, rows[0], args.router)
    saved_in = args.run / calibrated.name
    print(printable(f"\nSaved in {saved_in}. Next: dsnet evaluate {run_text(args)} --routed"))
    return 0


def _advise(calibration: Calibration, row: dict[str, Any], router: str) -> None:
    """Print the chosen router and its gain, and a cheaper setting that is as accurate."""
    unit = calibration.costs.unit
    if row["gain"] is not None:
        chosen = f"the {row['router']}"
        if row["router"] == "single":
            chosen = f"route {row['setting']['routes'][0]} for all images"
        print(f"\nTaken: {chosen}, {100 * row['gain']:.2f} points above the next best router.")
    kinds = [r for kind, r in calibration.routers.items() if router in ("auto", kind)]
    as_good = [
        p for r in kinds for p in r.curve if p.accuracy >= row["accuracy"] and p.cost < 0.95 * row["cost"]
    ]
    if as_good:
        least = min(as_good, key=lambda point: point.cost)
        print(f"\n{format_cost(least.cost, unit)} would do: {100 * least.accuracy:.2f} % on the same images.")


def _row(calibration: Calibration, outputs: RouteOutputs, budget: float, router: str) -> dict[str, Any]:
    """Return cost and accuracy at a budget, on the calibration images."""
    pick = calibration.pick(budget)
    kind = pick.kind if router == "auto" else router
    policy = calibration.router(kind, budget).policy(budget)
    simulation = simulate(policy, outputs)
    mix = interpolate(static_points(outputs, calibration.costs), simulation.cost)
    accuracies = {k: r.point(budget).accuracy for k, r in calibration.routers.items() if r.keeps(budget)}
    return {
        "target": budget,
        "cost": simulation.cost,
        "cost_error": simulation.cost_error,
        "router": kind,
        "gain": pick.gain if router == "auto" else None,
        "accuracy": simulation.accuracy,
        "static_mix": mix,
        "accuracies": accuracies,
        "setting": {k: v for k, v in asdict(policy).items() if k != "costs"},
    }


def _table(rows: list[dict[str, Any]], costs: CostTable) -> str:
    kinds = [kind for kind in ("single", "gate", "cascade") if any(kind in row["accuracies"] for row in rows)]
    body = []
    for row in rows:
        body.append(
            [
                format_cost(row["target"], costs.unit),
                f"{format_cost(row['cost'], costs.unit)} ± {row['cost_error'] / row['cost']:.1%}",
                f"{row['cost'] / costs.largest:.0%}",
                *(f"{100 * row['accuracies'][k]:.2f} %" if k in row["accuracies"] else "–" for k in kinds),
                f"{100 * row['static_mix']:.2f} %",
                f"route {row['setting']['routes'][0]}" if row["router"] == "single" else row["router"],
            ]
        )
    header = ["budget", "mean cost", "of the largest", *kinds, "static mix", "router"]
    return table(header, body, left=("router",))
