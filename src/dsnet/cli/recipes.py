"""``dsnet recipes``: what can be trained, how long it takes and what to expect."""

from __future__ import annotations

import argparse
import json

from dsnet.recipes import get_recipe, list_recipes
from dsnet.training.settings import to_plain

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "recipes",
        help="list the training recipes: command, duration, accuracy to expect",
        description="Lists the recipes, or tells all about one.",
        epilog="Examples:\n  dsnet recipes\n  dsnet recipes cifar10_mbnet --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="only this one")
    parser.add_argument("--json", action="store_true", help="with all settings, as JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the recipes."""
    names = list_recipes() if args.name is None else {args.name: list_recipes().get(args.name, "")}
    recipes = {name: get_recipe(name) for name in names}
    if args.json:
        plain = {
            name: {
                "summary": names[name],
                "duration": recipe.duration,
                "expect": recipe.expect,
                "settings": to_plain(recipe.config),
            }
            for name, recipe in recipes.items()
        }
        print(json.dumps(plain, indent=2))
        return 0
    for name, recipe in recipes.items():
        print(f"{name}\n  {names[name]}\n  command   dsnet train {name}")
        print(f"  duration  {recipe.duration}\n  expect    {recipe.expect}\n")
    return 0
