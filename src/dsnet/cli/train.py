"""``dsnet train``: a recipe, from nothing to a network with known accuracy."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from dsnet.cli.live import LiveWatch
from dsnet.cost import madds
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.recipes import get_recipe, list_recipes
from dsnet.report.routes import route_rows, route_table
from dsnet.report.text import bar, human, table
from dsnet.training.config import TrainConfig
from dsnet.training.folder import read_recipe
from dsnet.training.run import Outcome, train
from dsnet.training.settings import keys_of, override, parse_assignments, to_plain

__all__ = ["add_command", "resolve_recipe", "tell"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    names = "\n".join(f"  {name:31}{summary}" for name, summary in list_recipes().items())
    parser = commands.add_parser(
        "train",
        help="train a supernet by a recipe (Stage I)",
        description="Trains a supernet, makes the batch-norm statistics of all its routes, and shows what\n"
        "every route reaches on the test split. The run's folder holds checkpoints (last, best, final),\n"
        "recipe.json, metrics.jsonl, results.json and, where it is installed, TensorBoard's events.\n"
        "Ctrl-C and SIGTERM save before they stop; --resume goes on.\n\nRecipes:\n" + names,
        epilog="Examples:\n"
        "  dsnet train digits_mbnet\n"
        "  dsnet train digits_mbnet --set scheme.name=h-ib+mvco --set epochs=30 --out runs/hib\n"
        "  dsnet train cifar10_mbnet --set data.root=/data --dry-run\n"
        "  dsnet train cifar10_mbnet --set data.name=/data/my-images      (train/CLASS/*.jpg and test/)\n"
        "  dsnet train cifar10_mbnet --set scheme.name=label --set scheme.route=0   (stand-alone network)\n"
        "  dsnet train runs/hib/recipe.json --out runs/again --set seed=1\n"
        "  torchrun --nproc-per-node 8 -m dsnet train imagenet_ds_mbnet --set data.root=/data",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe by name, or the recipe.json of a run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting; --dry-run shows all of them; may be repeated",
    )
    parser.add_argument("--out", type=Path, help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the settings, the routes and the cost of a step; train nothing",
    )
    parser.add_argument("--json", action="store_true", help="the settings (--dry-run) or the results as JSON")
    parser.set_defaults(run_command=run)


def resolve_recipe(name: str, settings: list[str]) -> TrainConfig:
    """The configuration of a recipe by name or file, changed by ``key=value`` settings."""
    if name.endswith(".json"):
        config = read_recipe(Path(name))
    elif (Path(name) / "recipe.json").is_file():
        raise DsnetError(f"{name} is the folder of a run; its recipe is {Path(name) / 'recipe.json'}")
    else:
        config = get_recipe(name).config
    return override(config, parse_assignments(settings))


def run(args: argparse.Namespace) -> int:
    """Trains, or shows what would be trained."""
    config = resolve_recipe(args.recipe, args.set)
    model: Supernet = create_model(config.model, device="meta", **config.options)
    if not isinstance(model, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    if args.dry_run:
        print(json.dumps(to_plain(config), indent=2) if args.json else _plan(args.recipe, config, model))
        return 0
    stem = args.recipe
    if stem.endswith(".json"):
        stem = Path(stem).resolve().parent.name if Path(stem).name == "recipe.json" else Path(stem).stem
    folder = args.out or Path("runs") / stem
    outcome = train(config, folder, resume=args.resume, watch=LiveWatch(quiet=args.json))
    return tell(outcome, config, as_json=args.json)


def tell(outcome: Outcome, config: TrainConfig, *, as_json: bool) -> int:
    """Prints what a run came to; the exit status."""
    if not outcome.first:
        return 0
    if not outcome.ending.done:
        ending = outcome.ending
        print(
            f"Stopped after step {ending.step} of {ending.steps}; saved in {outcome.folder}. "
            "Go on with the same command and --resume.",
            file=sys.stderr,
        )
        return 128 + (ending.signal or signal.SIGINT)
    if as_json:
        print((outcome.folder / "results.json").read_text(encoding="utf-8"), end="")
    else:
        print(_results(outcome, config))
    return 0


def _plan(name: str, config: TrainConfig, model: Supernet) -> str:
    lines = [f"{key} = {_value(config, key)}" for key, _ in keys_of(TrainConfig)]
    size = config.data.size or model.geometry.image_size
    networks, forward, teacher = _step(config, model, size)
    batch = config.optim.batch
    return "\n".join(
        [
            f"{name}: {config.model}, scheme {config.scheme.name}\n",
            *lines,
            "",
            route_table(model, route_rows(model, image_size=size), most=32),
            "",
            f"A step runs {networks}: {human(3 * forward)} multiply-adds an image, forward and backward "
            "(counted as three forwards)"
            + (f", and {human(teacher)} for the teacher's forward" if teacher else "")
            + f"; {human((3 * forward + teacher) * batch)} for the batch of {batch}.",
        ]
    )


def _step(config: TrainConfig, model: Supernet, size: int) -> tuple[str, int, int]:
    """What a step runs, in words; multiply-adds forward for an image, of its networks and its teacher."""
    costs = {route.number: madds(model, route, size) for route in model.space}
    mean = round(sum(costs.values()) / len(costs))
    scheme = config.scheme.parse()
    if config.scheme.route is not None:
        route = model.space.resolve(config.scheme.route)
        return f"route {route.number} alone", costs[route.number], 0
    if config.scheme.joint is not None:
        return "every image at the route that its gate draws (evenly, at first)", mean, 0
    if not scheme.sandwich:
        return "one random network", mean, 0
    count = scheme.networks(model.space, config.scheme.random) - 2
    smallest, largest = costs[model.space.smallest.number], costs[model.space.largest.number]
    forward, teacher = smallest + largest + count * mean, largest if scheme.uses_average else 0
    return f"largest, {count} random, smallest", forward, teacher


def _value(config: TrainConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _results(outcome: Outcome, config: TrainConfig) -> str:
    before = {after.route: (b, after) for b, after in outcome.held_out}
    largest = max(result.madds for result in outcome.test)
    rows = []
    for result in outcome.test:
        row = [str(result.route), human(result.madds), bar(result.madds, largest), f"{result.accuracy:.2%}"]
        if before:
            earlier, later = before[result.route]
            row += ["–" if earlier is None else f"{earlier.accuracy:.2%}", f"{later.accuracy:.2%}"]
        rows.append(row)
    if outcome.gated is not None:
        gated = outcome.gated
        cells = ["gated", human(gated.madds), bar(gated.madds, largest), f"{gated.accuracy:.2%}"]
        rows.append(cells + ["", ""] * bool(before))
    header = ["route", "MAdds", "cost", "test"] + (["held-out before", "after"] if before else [])
    images = f"{outcome.test[0].images} test images"
    if before:
        images += f"; {outcome.held_out[0][1].images} held-out ones, before and after re-calibration"
    return (
        f"\n{config.model} on {config.data.name}, {images}\n\n"
        f"{table(header, rows, left=('cost',))}\n\nFinal network: {outcome.folder / 'final'}"
    )
