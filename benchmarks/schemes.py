"""Compare training schemes with each other and with stand-alone networks of the same recipe.

    python -m benchmarks.schemes RECIPE [--schemes label ib …] [--alone 0 13 …] [--epochs 30 90]
                                 [--seeds 0 1 2] [--set KEY=VALUE …] [--alone-set KEY=VALUE …] [--jobs 3]
                                 [--minutes 9] [--keep DIR] [--import MODULE] [--json FILE]

Each row is a run of `dsnet train` with its test accuracy at every route. A stand-alone network is one route
trained by itself for as many epochs; other settings differ only by --alone-set. Runs that are in the JSON
file already are skipped, so several calls can fill a table. --minutes stops starting runs after this time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import earlier_runs, make_parser, report
from benchmarks.timing import environment, write_json
from dsnet.cli.user_modules import import_modules
from dsnet.core.settings import from_plain, override, parse_assignments, to_plain
from dsnet.recipes.resolve import resolve_recipe
from dsnet.training.api import train
from dsnet.training.config import TrainConfig

Run = dict[str, Any]


def planned(base: TrainConfig, args: argparse.Namespace) -> Iterator[Run]:
    """Return the names of the runs and the settings that they change."""
    for epochs in args.epochs or [base.optim.epochs]:
        for seed in args.seeds:
            common = {"optim.epochs": epochs, "run.seed": seed}
            for scheme in args.schemes:
                yield {
                    "name": scheme,
                    "epochs": epochs,
                    "seed": seed,
                    "set": common | {"scheme.name": scheme},
                }
            for route in args.alone:
                alone = {"scheme.name": "label", "scheme.route": route} | parse_assignments(args.alone_set)
                yield {"name": f"alone {route}", "epochs": epochs, "seed": seed, "set": common | alone}


def run_one(plain: dict[str, Any], keep: Path | None, modules: list[str]) -> Run:
    """Train a run, in a temporary folder or one to keep, and return the test accuracy of every route."""
    import_modules(modules)  # in this process
    config = from_plain(TrainConfig, plain)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(config, keep or Path(folder) / "run")
    before = {str(old.route): round(100 * old.accuracy, 2) for old, _ in outcome.held_out if old is not None}
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "test": {str(r.route): round(100 * r.accuracy, 2) for r in outcome.test},
        "held_out": {str(after.route): round(100 * after.accuracy, 2) for _, after in outcome.held_out},
        "held_out_before": before,  # with the statistics that training left
        "madds": {str(r.route): r.madds for r in outcome.test},
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--schemes", nargs="*", default=["label", "ib", "e-ib", "h-ib+mvco"])
    parser.add_argument("--alone", nargs="*", type=int, default=[], help="routes to train alone")
    parser.add_argument("--epochs", nargs="*", type=int, default=[])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument(
        "--alone-set", action="append", default=[], metavar="KEY=VALUE", help="for stand-alone networks"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs' folders here")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this time")
    parser.add_argument(
        "--import", dest="modules", action="append", default=[], metavar="MODULE", help="registers networks"
    )
    args = parser.parse_args()
    import_modules(args.modules)
    base = resolve_recipe(args.recipe, args.set)
    device = torch.device("cuda" if torch.cuda.is_available() and base.run.device != "cpu" else "cpu")
    about = {"benchmark": "schemes", **environment(device), "recipe": to_plain(base)}
    about["stand-alone"] = parse_assignments(args.alone_set)
    runs = earlier_runs(args.json)
    done = {(run["name"], run["epochs"], run["seed"]) for run in runs}
    left = [run for run in planned(base, args) if (run["name"], run["epochs"], run["seed"]) not in done]
    deadline = time.monotonic() + 60 * args.minutes
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        waiting = iter(left)
        working: dict[Any, Run] = {}
        while True:
            while len(working) < args.jobs and time.monotonic() < deadline:
                run = next(waiting, None)
                if run is None:
                    break
                keep = args.keep and args.keep / f"{run['name']}-{run['epochs']}-{run['seed']}"
                plain = to_plain(override(base, run["set"]))
                working[pool.submit(run_one, plain, keep, args.modules)] = run
            if not working:
                break
            finished = next((future for future in working if future.done()), None)
            if finished is None:
                time.sleep(0.2)
                continue
            run = working.pop(finished)
            settings = {k: run[k] for k in ("name", "epochs", "seed", "set")}
            runs.append({**settings, "commit": about["commit"], **finished.result()})
            print(f"{run['name']}, seed {run['seed']}: {runs[-1]['test']}", flush=True)
            if args.json:
                write_json(args.json, {**about, "runs": runs})
    report({**about, "runs": runs}, args.json)


if __name__ == "__main__":
    main()
