"""Compare networks on other data: from random weights, from another run, and with that run's routing heads.

    python -m benchmarks.transfer RECIPE --start RUN [--seeds 0 1 2] [--set KEY=VALUE …]
                                  [--gate-set KEY=VALUE …] [--keep DIR] [--json FILE]

RECIPE starts from another run (`imagenette_to_cifar10`, `digits_transfer`); RUN is the folder of that run,
with a trained gate. *scratch* is the same recipe from random weights. Every network is trained once for each
seed. On each a gate like RUN's is trained, from new routing heads and, on transferred networks, also from
RUN's. Figures are on the test split. Runs that are in the JSON file already are skipped.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.script import earlier_runs, make_parser, report
from benchmarks.timing import environment
from dsnet.calibration import collect, simulate
from dsnet.cli.progress import TrainingProgress
from dsnet.core.checkpoint import load_checkpoint
from dsnet.core.device import pick_device
from dsnet.core.settings import override, parse_assignments, to_plain
from dsnet.recipes.resolve import resolve_recipe
from dsnet.routing import CostTable, GatePolicy
from dsnet.training import GateConfig, open_trained, train_gate
from dsnet.training.api import train
from dsnet.training.transfer import gate_like

GATES = {"scratch": ("anew",), "transfer": ("anew", "transferred")}


def run_arm(args: argparse.Namespace, arm: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train a network and its gates; return a row for each gate."""
    base = resolve_recipe(args.recipe, args.set)
    config = replace(override(base, {"run.seed": seed}), start=str(args.start) if arm == "transfer" else None)
    begun = time.perf_counter()
    outcome = train(config, folder, callback=TrainingProgress())
    seconds = time.perf_counter() - begun
    routes = {str(result.route): round(100 * result.accuracy, 2) for result in outcome.test}
    madds = {str(result.route): result.madds for result in outcome.test}
    rows = []
    for kind in GATES[arm]:
        changes = {**gate_like(load_checkpoint(args.start)), **parse_assignments(args.gate_set), "seed": seed}
        if kind == "transferred":
            changes["start"] = str(args.start)
        name = f"gate_{kind}"
        begun = time.perf_counter()
        train_gate(folder, override(GateConfig(), changes), save_as=name, callback=TrainingProgress())
        gate_seconds = time.perf_counter() - begun
        opened = open_trained(folder, name)
        costs = CostTable.of_model(opened.model, opened.test.size)
        outputs = collect(opened.model, opened.seen(opened.test))
        own = simulate(GatePolicy(costs=costs), outputs)
        taken = Counter(str(outputs.routes[column].number) for column in own.columns.tolist())
        rows.append(
            {
                "network": arm,
                "gate": kind,
                "seed": seed,
                "seconds": round(seconds, 1),
                "gate_seconds": round(gate_seconds, 1),
                "test": routes,
                "madds": madds,
                "gated": {"accuracy": round(100 * own.accuracy, 2), "madds": own.cost, "taken": dict(taken)},
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--start", type=Path, required=True, metavar="RUN")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--arms", nargs="+", choices=list(GATES), default=list(GATES))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all networks")
    parser.add_argument("--gate-set", action="append", default=[], metavar="KEY=VALUE", help="for all gates")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' folders here")
    args = parser.parse_args()
    rows = earlier_runs(args.json)
    done = {(row["network"], row["seed"]) for row in rows}
    base = resolve_recipe(args.recipe, args.set)
    about = {"benchmark": "transfer", **environment(pick_device(base.run.device)), "recipe": to_plain(base)}
    for seed in args.seeds:
        for arm in args.arms:
            if (arm, seed) in done:
                continue
            with tempfile.TemporaryDirectory() as folder:
                trained = run_arm(args, arm, seed, (args.keep or Path(folder)) / f"{arm}-{seed}")
            rows += [{**row, "commit": about["commit"]} for row in trained]
            report({**about, "runs": rows}, args.json)


if __name__ == "__main__":
    main()
