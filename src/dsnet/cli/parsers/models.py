"""``dsnet models``: what there is."""

from __future__ import annotations

from dsnet.cli.parsers.common import Commands, add_parser

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "models",
        "dsnet.cli.models",
        computes=False,
        help="list the models",
        description="Lists the supernets and the static twins they are compared with.",
        epilog="Multiply-adds are counted as in the paper, at the model's own image size.\n\n"
        "Any of them by name:\n  model = dsnet.create_model('ds_mbnet', num_classes=1000)",
    )
    parser.add_argument("--kind", choices=("supernet", "twin"), help="only these")
    parser.add_argument("--json", action="store_true", help="as JSON, with every option a model takes")
