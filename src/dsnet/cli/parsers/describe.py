"""``dsnet describe``: a network's routes."""

from __future__ import annotations

from dsnet.cli.parsers.common import Commands, add_parser, image_size
from dsnet.counts import CONVENTIONS

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "describe",
        "dsnet.cli.describe",
        computes=False,
        help="show a network's routes, with sizes, multiply-adds and parameters",
        description="Shows the route table of a supernet, cheapest first: the sizes of its dynamic stages,\n"
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
        "--image-size", type=image_size, metavar="N", help="height and width (default: its own)"
    )
    parser.add_argument(
        "--convention",
        choices=CONVENTIONS,
        default="paper",
        help="paper: convolutions, linear layers, average pools; all: also routing heads and the "
        "attention products (default: paper)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a model option, as create_model takes it; may be repeated",
    )
    parser.add_argument("--all", action="store_true", help="every route, where there are more than 32")
    parser.add_argument("--json", action="store_true", help="every route as JSON")
