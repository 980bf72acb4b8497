"""``dsnet train``: a recipe, from nothing to a network with known accuracy."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from dsnet.cli.live import LiveWatch
from dsnet.data.survey import Survey, survey
from dsnet.detection.config import DetectConfig
from dsnet.detection.recipes import DETECTORS
from dsnet.errors import DsnetError
from dsnet.models import Supernet, create_model
from dsnet.recipes import get_recipe, list_recipes
from dsnet.recipes.own import recipe_for
from dsnet.report.routes import route_rows, route_table
from dsnet.report.text import bar, human, table
from dsnet.report.training import before_text, training_page
from dsnet.routing.monitor import GateReport
from dsnet.training.checkpoint import load_checkpoint
from dsnet.training.config import TrainConfig
from dsnet.training.estimate import estimate, image_size, step_cost
from dsnet.training.folder import read_config, read_plain
from dsnet.training.results import Outcome, read_outcome
from dsnet.training.run import pick_device, train
from dsnet.training.settings import check_kind, from_plain, keys_of, override, parse_assignments, to_plain
from dsnet.training.transfer import check_start

__all__ = ["add_command", "resolve_recipe", "tell", "write_page_again"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    names = "\n".join(f"  {name:31}{summary}" for name, summary in list_recipes().items())
    parser = commands.add_parser(
        "train",
        help="train a supernet by a recipe, or on pictures of your own (Stage I)",
        description="Trains a supernet, makes the batch-norm statistics of all its routes, and shows what\n"
        "every route reaches on the test split. The run's folder holds checkpoints (last, best, final),\n"
        "recipe.json, metrics.jsonl, results.json, report.html (what was reached, what to do next) and,\n"
        "where it is installed, TensorBoard's events. Ctrl-C and SIGTERM save before they stop; --resume\n"
        "goes on. Before it starts it says what the run will cost.\n\n"
        "With --data and no recipe, settings are made for that data: network, image size, batch, epochs.\n"
        "DIR has one folder of images a class, or train/ and test/ with such folders in them.\n\n"
        "Recipes:\n" + names,
        epilog="Examples:\n"
        "  dsnet train --data photos                      (photos/CLASS/*.jpg; nothing else is needed)\n"
        "  dsnet train --data photos --dry-run            (what would be trained, and how long it takes)\n"
        "  dsnet train digits_mbnet\n"
        "  dsnet train digits_mbnet --set scheme.name=h-ib+mvco --set epochs=30 --out runs/hib\n"
        "  dsnet train cifar10_mbnet --set data.root=/data --dry-run\n"
        "  dsnet train cifar10_mbnet --data /data/my-images      (the recipe's settings on other images)\n"
        "  dsnet train cifar10_mbnet --set scheme.name=label --set scheme.route=0   (stand-alone network)\n"
        "  dsnet train runs/hib/recipe.json --out runs/again --set seed=1\n"
        "  torchrun --nproc-per-node 8 -m dsnet train imagenet_ds_mbnet --set data.root=/data",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help="a recipe by name, or the recipe.json of a run; may be left out with --data",
    )
    parser.add_argument(
        "--data", metavar="NAME|DIR", help="a data set, or a folder of images (default: the recipe's)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting; --dry-run shows all of them; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the run (default: runs/RECIPE, runs/DATA, runs/RECIPE-DATA)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the folder's last checkpoint")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the settings, the routes, and what the run would cost; train nothing",
    )
    parser.add_argument("--json", action="store_true", help="the settings (--dry-run) or the results as JSON")
    parser.set_defaults(run_command=run)


def resolve_recipe(name: str, settings: list[str], data: str | None = None) -> TrainConfig:
    """The configuration of a recipe by name or file, on other data, changed by ``key=value`` settings."""
    if name.endswith(".json"):
        plain = read_plain(Path(name))
        told = f"{name} is a recipe for a detector: dsnet detect train {name}"
        check_kind(plain, TrainConfig, DetectConfig, told)
        config = from_plain(TrainConfig, plain)
    elif (Path(name) / "recipe.json").is_file():
        raise DsnetError(f"{name} is the folder of a run; its recipe is {Path(name) / 'recipe.json'}")
    elif Path(name).is_dir() and name not in list_recipes():
        raise DsnetError(
            f"{name} is a folder, not a recipe; `dsnet train --data {name}` trains on its images"
        )
    elif name in DETECTORS:
        raise DsnetError(f"{name} is a recipe for a detector: dsnet detect train {name}")
    else:
        config = get_recipe(name).config
    if data is not None:
        config = replace(config, data=replace(config.data, name=data))
    return override(config, parse_assignments(settings))


def run(args: argparse.Namespace) -> int:
    """Trains, or shows what would be trained."""
    _check(args)
    name = _name(args)
    folder: Path = args.out or Path("runs") / name
    config, found = _settings(args, folder)
    model: Supernet = create_model(config.model, device="meta", **config.options)
    if not isinstance(model, Supernet):
        raise DsnetError(f"{config.model} is a static network; `dsnet models` lists the supernets")
    if args.dry_run:
        print(json.dumps(to_plain(config), indent=2) if args.json else _plan(name, config, model, found))
        return 0
    first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts
    if first and not args.resume and not (folder / "last").is_file():
        found = found or survey(config.data.name, config.data.root)
        found.check()
        if config.start is not None:
            check_start(model, config.start, image_size(config, model, found))
        if not args.json:
            print(before_text(config, found, estimate(config, model, found)), file=sys.stderr, flush=True)
    outcome = train(config, folder, resume=args.resume, watch=LiveWatch(quiet=args.json))
    return tell(outcome, config, as_json=args.json)


def _check(args: argparse.Namespace) -> None:
    if args.recipe is None and args.data is None:
        raise DsnetError(
            "what is to be trained? Give a RECIPE (`dsnet recipes` lists them), or --data with a data set or "
            "a folder that has one folder of images a class"
        )
    if args.data is not None and "data.name" in parse_assignments(args.set):
        raise DsnetError(f"--data {args.data} and --set data.name both say which data; give one of them")


def _name(args: argparse.Namespace) -> str:
    """What the run is called where nobody says."""
    recipe = args.recipe or ""
    if recipe.endswith(".json"):
        path = Path(recipe)
        recipe = path.resolve().parent.name if path.name == "recipe.json" else path.stem
    data = "" if args.data is None else Path(args.data.removeprefix("hf:")).resolve().name
    return "-".join(filter(None, (recipe, data.replace(":", "-"))))


def _settings(args: argparse.Namespace, folder: Path) -> tuple[TrainConfig, Survey | None]:
    """The recipe's, or settings made from the data; a run that goes on has its own."""
    if args.recipe is not None:
        config = resolve_recipe(args.recipe, args.set, args.data)
    elif args.resume and (folder / "recipe.json").is_file():
        config = override(read_config(folder), parse_assignments(args.set))
    else:
        return _own_settings(args)
    if args.data is None:
        return config, None
    found = survey(config.data.name, config.data.root)
    found.check()
    return config, found


def _own_settings(args: argparse.Namespace) -> tuple[TrainConfig, Survey]:
    changes = parse_assignments(args.set)
    asked = override(TrainConfig(), {"data.name": args.data, **changes})
    found = survey(args.data, asked.data.root)
    found.check()
    config = recipe_for(
        asked.data,
        images=found.images,
        classes=len(found.classes),
        side=found.side,
        device=pick_device(asked.run.device).type,
    )
    return override(config, changes), found


def tell(outcome: Outcome, config: TrainConfig, *, as_json: bool) -> int:
    """Prints what a run came to and writes its page; the exit status."""
    if not outcome.first:
        return 0
    ending = outcome.ending
    if not ending.done:
        print(
            f"Stopped after step {ending.step} of {ending.steps}; saved in {outcome.folder}. "
            "Go on with the same command and --resume.",
            file=sys.stderr,
        )
    elif as_json:
        print((outcome.folder / "results.json").read_text(encoding="utf-8"), end="")
    else:
        print(_results(outcome, config))
    report = _write_page(outcome, config)
    print(f"Report: {report}", file=sys.stdout if ending.done and not as_json else sys.stderr)
    return 0 if ending.done else 128 + (ending.signal or signal.SIGINT)


def write_page_again(folder: Path) -> None:
    """Brings the page of a finished run up to date, where it has one: a gate may have been trained since."""
    outcome = read_outcome(folder)
    if outcome is not None and (folder / "report.html").is_file():
        _write_page(outcome, read_config(folder))


def _write_page(outcome: Outcome, config: TrainConfig) -> Path:
    folder = outcome.folder
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    gates: list[GateReport] = []
    if (folder / "gated").is_file():
        saved = load_checkpoint(folder, "gated")
        gates = [GateReport.from_dict(plain) for plain in saved.data.get("gate_reports", ())]
    report = folder / "report.html"
    text = training_page(outcome, config, [json.loads(line) for line in lines], gates=gates)
    report.write_text(text, encoding="utf-8")
    return report


def _plan(name: str, config: TrainConfig, model: Supernet, found: Survey | None) -> str:
    lines = [f"{key} = {_value(config, key)}" for key, _ in keys_of(TrainConfig)]
    try:
        found = found or survey(config.data.name, config.data.root)
        ahead = estimate(config, model, found)
        size, ending = ahead.size, before_text(config, found, ahead)
    except DsnetError as error:  # a recipe can be looked at before its data is there
        size = config.data.size or model.geometry.image_size
        ending = f"What the whole run costs is not known: {error}"
    cost = step_cost(config, model, size)
    batch = config.optim.batch
    return "\n".join(
        [
            f"{name}: {config.model}, scheme {config.scheme.name}\n",
            *lines,
            "",
            route_table(model, route_rows(model, image_size=size), most=32),
            "",
            f"A step runs {cost.networks}: {human(3 * cost.forward)} multiply-adds an image, forward and "
            "backward (counted as three forwards)"
            + (f", and {human(cost.teacher)} for the teacher's forward" if cost.teacher else "")
            + f"; {human(cost.madds * batch)} for the batch of {batch}.",
            "",
            ending,
        ]
    )


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
