"""``dsnet recipes``: a list of the recipes with their duration and expected accuracy."""

from __future__ import annotations

import argparse

from dsnet.cli.output import print_json
from dsnet.core.settings import to_plain
from dsnet.recipes import find_recipe, list_recipes

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print all recipes, or one."""
    recipes = {name: find_recipe(name) for name in ([args.name] if args.name else list_recipes(object))}
    if args.json:
        plain = {
            name: {
                "summary": recipe.summary,
                "duration": recipe.duration,
                "expect": recipe.expect,
                "settings": to_plain(recipe.config),
            }
            for name, recipe in recipes.items()
        }
        print_json(plain)
        return 0
    for name, recipe in recipes.items():
        print(f"{name}\n  {recipe.summary}\n  command   {recipe.command} {name}")
        print(f"  duration  {recipe.duration}\n  expect    {recipe.expect}\n")
    return 0
