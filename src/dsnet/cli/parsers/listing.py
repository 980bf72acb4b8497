"""``dsnet models``, ``describe`` and ``recipes``: what there is. They compute nothing."""

from __future__ import annotations

from dsnet.cli.parsers.common import Commands, add_parser, image_size
from dsnet.counts import CONVENTIONS

__all__ = ["add_describe", "add_models", "add_recipes"]


def add_models(commands: Commands) -> None:
    """Add ``dsnet models``."""
    parser = add_parser(
        commands,
        "models",
        "dsnet.cli.models",
        computes=False,
        help="list the models",
        description="Lists the supernets, and the static networks to compare them with.",
        epilog="Multiply-adds are counted as in the paper, at the model's default image size.\n\n"
        "Any of them by name:\n  model = dsnet.create_model('ds_mbnet', num_classes=1000)",
    )
    parser.add_argument("--kind", choices=("supernet", "twin"), help="only these (default: all)")
    parser.add_json("print JSON, with the options of every model")


def add_describe(commands: Commands) -> None:
    """Add ``dsnet describe``."""
    parser = add_parser(
        commands,
        "describe",
        "dsnet.cli.describe",
        computes=False,
        help="show a network's routes, with sizes, multiply-adds and parameters",
        description="Shows the routes of a supernet, cheapest first: the sizes of its dynamic stages,\n"
        "multiply-adds for one image and parameters of the stand-alone network of that route.\n"
        "Counting is arithmetic: nothing runs and no weights are allocated.",
        epilog="Examples:\n"
        "  dsnet describe ds_mbnet\n"
        "  dsnet describe ds_vit_plus --image-size 384 --convention all\n"
        "  dsnet describe ds_resnet --all\n"
        "  dsnet describe ds_mbnet_cifar --set num_classes=100 --json",
    )
    parser.add_argument("name", metavar="NAME", help="a model; `dsnet models` lists them")
    parser.add_argument(
        "--image-size", type=image_size, metavar="N", help="height and width (default: the model's)"
    )
    parser.add_argument(
        "--convention",
        choices=CONVENTIONS,
        default="paper",
        help="paper: convolutions, linear layers, average pools; all: also routing heads and the "
        "attention products (default: paper)",
    )
    parser.add_settings("an option of the model, as create_model takes it")
    parser.add_flag("--all", "every route (default: a sample where there are more than 32)")
    parser.add_json("print every route as JSON")


def add_recipes(commands: Commands) -> None:
    """Add ``dsnet recipes``."""
    parser = add_parser(
        commands,
        "recipes",
        "dsnet.cli.recipes",
        computes=False,
        help="list the training recipes: command, duration, accuracy to expect",
        description="Lists the recipes of `dsnet train` and `dsnet detect train`, or describes one.",
        epilog="Examples:\n  dsnet recipes\n  dsnet recipes cifar10_mbnet --json",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this one (default: all)")
    parser.add_json("print JSON, with all settings")
