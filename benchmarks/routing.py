"""Compare routers at equal mean cost: gates trained in several ways, and cascades.

    python -m benchmarks.routing RUN… [--gates paper value …] [--budgets 0.3 0.45 …] [--json FILE]

Each RUN is the folder of a trained supernet of another seed (`dsnet train`, or `benchmarks.schemes --keep`).
Gates are trained on it, calibrated on its held-out images and evaluated on its test split, by their own
decision and at budgets. Budgets are shares of the largest route's cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import make_parser, report
from benchmarks.timing import environment
from dsnet.calibration import calibrate, collect, simulate
from dsnet.calibration.compare import compare
from dsnet.calibration.difficulty import gate_reports
from dsnet.core.settings import override, to_plain
from dsnet.data.dataset import ImageDataset
from dsnet.routing import CostTable, GatePolicy
from dsnet.routing.route_outputs import RouteOutputs
from dsnet.training import GateConfig, open_trained, train_gate
from dsnet.training.stage2.trained_run import TrainedRun

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
    """Record the outputs of routes and gate; with known route outputs, run the gate alone."""
    if what not in known:
        known[what] = collect(run.model, run.seen(images))
        return known[what]
    with torch.inference_mode():
        scores = [run.model.gate_scores(run.model.run_prefix(x)).float().cpu() for x, _ in run.seen(images)]
    return replace(known[what], scores=(torch.cat(scores)[None],))


def measure(run: Path, gates: Sequence[str], budgets: Sequence[float], device: str) -> list[dict[str, Any]]:
    """Train and evaluate every gate, and evaluate the cascade, on one run."""
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
        held = opened.calibration_images()
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
                    "passes": outcome.cached_passes if kind == "gate" else None,
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
        print(run.name, name, flush=True)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--gates", nargs="*", choices=list(GATES), default=list(GATES))
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.3, 0.4, 0.45, 0.5, 0.65, 0.8])
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for run in args.runs:
        rows += measure(run, args.gates, args.budgets, args.device)
        opened = open_trained(run, "final", device=args.device)
        device = opened.model.head.classifier.weight.device
        about = {"benchmark": "routing", **environment(device), "recipe": to_plain(opened.config)}
        about["gates"] = {name: GATES[name] for name in args.gates}
        report({**about, "budgets": args.budgets, "results": rows}, args.json)


if __name__ == "__main__":
    main()
