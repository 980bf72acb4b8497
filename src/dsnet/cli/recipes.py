"""``dsnet recipes``: what can be trained, how long it takes and what to expect."""

from __future__ import annotations

import argparse
import difflib
import json

from dsnet.core.settings import to_plain
from dsnet.errors import DsnetError, shorten
from dsnet.recipes import get_recipe, list_recipes
from dsnet.recipes.detection import DETECTORS

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Prints the recipes."""
    names = {**list_recipes(), **{name: recipe.about for name, recipe in DETECTORS.items()}}
    if args.name is not None:
        if args.name not in names:
            close = difflib.get_close_matches(args.name, names, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else f"possible: {', '.join(names)}"
            raise DsnetError(f"there is no recipe {shorten(args.name)}; {hint}")
        names = {args.name: names[args.name]}
    recipes = {name: DETECTORS.get(name) or get_recipe(name) for name in names}
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
        command = f"dsnet detect train {name}" if name in DETECTORS else f"dsnet train {name}"
        print(f"{name}\n  {names[name]}\n  command   {command}")
        print(f"  duration  {recipe.duration}\n  expect    {recipe.expect}\n")
    return 0
