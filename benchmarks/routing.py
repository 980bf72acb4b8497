"""Routers side by side at equal mean cost: gates trained in several ways, and cascades.

    python -m benchmarks.routing RUN… [--gates paper value …] [--budgets 0.3 0.45 …] [--json FILE]

Every RUN is the folder of a trained supernet, one a seed (`dsnet train`, or `benchmarks.schemes --keep`).
Gates are trained on it, calibrated on its held-out images and judged on its test split: what they decide by
themselves, and what they reach at budgets given as shares of the largest route's cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import environment, write_json
from dsnet.calibration import calibrate, collect, simulate
from dsnet.calibration.compare import compare
from dsnet.calibration.difficulty import gate_reports
from dsnet.core.settings import override, to_plain
from dsnet.data.dataset import ImageDataset
from dsnet.report.text import table
from dsnet.routing import CostTable, GatePolicy
from dsnet.routing.route_outputs import RouteOutputs
from dsnet.training import GateConfig, open_trained, train_gate
from dsnet.training.stage2.api import TrainedRun, calibration_images

WIDE = {"first_layer": "separate", "width": 128, "lr": 0.2, "epochs": 30}
GATES: dict[str, dict[str, Any]] = {
    "paper": {},
    "target": {"complexity": 0, "sgs": 0},
    "complexity": {"target": 0, "sgs": 0},
    "sgs": {"target": 0, "complexity": 0},
    "target+complexity": {"sgs": 0},
    "target+sgs": {"complexity": 0},
    "give_up": {"strategy": "give_up"},
    "scalar": {"head": "scalar"},
    "separate": {"first_layer": "separate"},
    "even": {"even": True},
    "held_out": {"images": "held_out"},
    "value": {"goal": "value", "lr": 0.2},
    "value_wide": {"goal": "value", **WIDE},
    "value_wide_held_out": {"goal": "value", "images": "held_out", **WIDE},
}


def outputs_of(
    run: TrainedRun, images: ImageDataset, known: dict[str, RouteOutputs], what: str
) -> RouteOutputs:
    """What routes and gate say of images; of what is known already, the gate's part alone is made anew."""
    if what not in known:
        known[what] = collect(run.model, run.seen(images))
        return known[what]
    with torch.inference_mode():
        scores = [run.model.gate_scores(run.model.run_prefix(x)).float().cpu() for x, _ in run.seen(images)]
    return replace(known[what], scores=(torch.cat(scores)[None],))


def measure(run: Path, gates: Sequence[str], budgets: Sequence[float], device: str) -> list[dict[str, Any]]:
    """Every gate, and the cascade, on one run."""
    rows: list[dict[str, Any]] = []
    known: dict[str, RouteOutputs] = {}
    for name in gates:
        config = override(GateConfig(), GATES[name])
        start = time.perf_counter()
        saved_as = f"bench_{name.replace('+', '_')}"
        outcome = train_gate(run, config, save_as=saved_as, device=device)
        seconds = time.perf_counter() - start
        opened = open_trained(run, saved_as, device=device)
        costs = CostTable.of_model(opened.model, opened.test.size)
        tested = outputs_of(opened, opened.test, known, "test")
        held = calibration_images(opened)
        calibrated = outputs_of(opened, held, known, f"not learnt from, gates on {config.images}")
        calibration = calibrate(calibrated, costs)
        found = compare(tested, calibration, [share * costs.largest for share in budgets])
        own = simulate(GatePolicy(costs=costs), tested)
        report = gate_reports(tested, costs)[0]
        for kind in ("gate", "cascade") if not rows else ("gate",):
            curve = [r for r in found.rows if r.router == kind]
            rows.append(
                {
                    "run": run.name,
                    "router": name if kind == "gate" else "cascade",
                    "seconds": round(seconds, 1) if kind == "gate" else None,
                    "passes": outcome.kept if kind == "gate" else None,
                    "own": {
                        "cost": own.cost / costs.largest,
                        "accuracy": 100 * own.accuracy,
                        "entropy": report.entropy,
                        "information": report.information,
                    }
                    if kind == "gate"
                    else None,
                    "budgets": [
                        {
                            "share": r.budget / costs.largest,
                            "cost": r.cost / costs.largest,
                            "accuracy": 100 * r.accuracy,
                            "static": 100 * r.static_mix,
                        }
                        for r in curve
                    ],
                    "static": [[p.cost / costs.largest, 100 * p.accuracy] for p in found.singles],
                    "oracle": [found.oracle.cost / costs.largest, 100 * found.oracle.accuracy],
                    "shares": found.shares,
                }
            )
        print(report_rows(rows[-2:], budgets), flush=True)
    return rows


def report_rows(rows: Sequence[dict[str, Any]], budgets: Sequence[float]) -> str:
    """Mean over runs of accuracy, and how far above the static mix at the same cost."""
    header = ["router", "runs", "own cost", "own accuracy", *(f"{share:.0%}" for share in budgets)]
    body = []
    for name in dict.fromkeys(row["router"] for row in rows):
        same = [row for row in rows if row["router"] == name]
        cells = []
        for share in budgets:
            at = [b for row in same for b in row["budgets"] if abs(b["share"] - share) < 1e-9]
            if not at:
                cells.append("–")
                continue
            accuracy = statistics.mean(b["accuracy"] for b in at)
            gain = statistics.mean(b["accuracy"] - b["static"] for b in at)
            cells.append(f"{accuracy:.2f} ({gain:+.2f})")
        owns = [row["own"] for row in same if row["own"]]
        own = (
            [f"{statistics.mean(o[k] for o in owns):.2f}" for k in ("cost", "accuracy")]
            if owns
            else ["–", "–"]
        )
        body.append([name, str(len(same)), *own, *cells])
    return table(header, body, left=("router",))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--gates", nargs="*", choices=list(GATES), default=list(GATES))
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.3, 0.4, 0.45, 0.5, 0.65, 0.8])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for run in args.runs:
        rows += measure(run, args.gates, args.budgets, args.device)
        opened = open_trained(run, "final", device=args.device)
        device = opened.model.head.classifier.weight.device
        about = {"benchmark": "routing", **environment(device), "recipe": to_plain(opened.config)}
        about["gates"] = {name: GATES[name] for name in args.gates}
        if args.json:
            write_json(args.json, {**about, "budgets": args.budgets, "results": rows})
    print("\n" + report_rows(rows, args.budgets))
    print("In brackets: points above the static mix: two routes mixed at random to the same mean cost.")


if __name__ == "__main__":
    main()
