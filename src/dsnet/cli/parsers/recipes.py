"""``dsnet recipes``: what can be trained, how long it takes and what to expect."""

from __future__ import annotations

from dsnet.cli.parsers.common import Commands, add_parser

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    """Adds the command to the command line."""
    parser = add_parser(
        commands,
        "recipes",
        "dsnet.cli.recipes",
        computes=False,
        help="list the training recipes: command, duration, accuracy to expect",
        description="Lists the recipes, or tells all about one.",
        epilog="Examples:\n  dsnet recipes\n  dsnet recipes cifar10_mbnet --json",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this one")
    parser.add_argument("--json", action="store_true", help="with all settings, as JSON")
