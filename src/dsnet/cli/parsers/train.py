"""``dsnet train``: a recipe, from nothing to a network with known accuracy."""

from __future__ import annotations

from pathlib import Path

from dsnet.cli.parsers.common import Commands, add_parser
from dsnet.cli.parsers.recipe_names import classifier_recipes

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    names = "\n".join(f"  {name:31}{summary}" for name, summary in classifier_recipes().items())
    parser = add_parser(
        commands,
        "train",
        "dsnet.cli.train",
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
