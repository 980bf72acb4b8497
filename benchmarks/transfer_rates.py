"""Compare learning rates for fine-tuning a trained supernet, by optimizer and batch.

    python -m benchmarks.transfer_rates [--recipe digits_vit] [--cases adamw:64:5e-4,1e-3,2e-3 sgd:64:0.04 …]
                                        [--epochs 70] [--seeds 0 1 2] [--jobs 1] [--json FILE]

For each seed, RECIPE is trained on the digits 0 to 6 and then fine-tuned on the unseen classes 7 to 9, at
each rate of each case (OPTIMIZER:BATCH:RATE,RATE…), in one thread each. The warm-up takes 15 of 70 epochs, as
in `dsnet transfer`. Figures are on the test split, 107 images.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.script import make_parser, report
from benchmarks.timing import environment, write_json
from dsnet.core.settings import override, to_plain
from dsnet.recipes import get_recipe
from dsnet.training.api import train
from dsnet.training.config import DataConfig, TrainConfig


class Case(NamedTuple):
    """A network to fine-tune on the digits 7 to 9, with the folder of the run that it starts from."""

    recipe: str
    start: Path
    seed: int
    epochs: int
    kind: str
    batch: int
    lr: float


def first(recipe: str, seed: int) -> TrainConfig:
    """Train the run to start from."""
    config = replace(get_recipe(recipe).config, data=DataConfig(name="digits_0_to_6"))
    return override(config, {"run.seed": seed, "run.device": "cpu", "run.validate_every": 1000})


def train_first(work: tuple[str, int, Path]) -> None:
    recipe, seed, folder = work
    torch.set_num_threads(1)
    train(first(recipe, seed), folder)


def fine_tune(case: Case) -> dict[str, Any]:
    """Fine-tune and return a row of results."""
    torch.set_num_threads(1)
    own = {name: getattr(case, name) for name in ("kind", "batch", "lr", "epochs")}
    changes = {"start": str(case.start), "data.name": "digits_7_to_9", "optim.warmup": 15 / 70 * case.epochs}
    config = override(first(case.recipe, case.seed), changes | {f"optim.{key}": own[key] for key in own})
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(config, Path(folder) / "run")
    return {**own, "seed": case.seed, "test": {r.route: round(100 * r.accuracy, 2) for r in outcome.test}}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--recipe", default="digits_vit")
    parser.add_argument("--cases", nargs="+", default=["adamw:64:5e-4,1e-3,2e-3,4e-3"])
    parser.add_argument("--epochs", type=int, default=70)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args()
    about = {"benchmark": "transfer-rates", **environment(torch.device("cpu")), "threads": 1}
    about["recipe"] = to_plain(get_recipe(args.recipe).config)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(args.jobs) as pool,
    ):
        starts = {seed: Path(folder) / str(seed) for seed in args.seeds}
        pool.map(train_first, [(args.recipe, seed, start) for seed, start in starts.items()], 1)
        cases = [
            Case(args.recipe, start, seed, args.epochs, kind, int(batch), float(lr))
            for kind, batch, rates in (case.split(":") for case in args.cases)
            for lr in rates.split(",")
            for seed, start in starts.items()
        ]
        for row in pool.imap(fine_tune, cases, 1):
            rows.append(row)
            if args.json:
                write_json(args.json, {**about, "runs": rows})
    report({**about, "runs": rows}, args.json)


if __name__ == "__main__":
    main()
