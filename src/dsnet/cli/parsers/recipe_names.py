"""Names and summaries of recipes, read from their source: the recipes themselves import torch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import dsnet

__all__ = ["detector_summaries", "recipe_summaries"]

PACKAGE = Path(dsnet.__file__).parent
MODULES = ("imagenet", "small", "transfer")  # in the order in which they register recipes


def recipe_summaries() -> dict[str, str]:
    """What `dsnet.recipes.list_recipes` gives, without importing the recipes where nobody has yet."""
    paths = [PACKAGE / "recipes" / f"{module}.py" for module in MODULES]
    if "dsnet.recipes" in sys.modules or not all(path.is_file() for path in paths):
        from dsnet.recipes import list_recipes

        return list_recipes()
    return {name: summary for path in paths for name, summary in _registered(path)}


def _registered(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(by, ast.Name) and by.id == "register_recipe" for by in node.decorator_list
        ):
            yield node.name, (ast.get_docstring(node) or "").splitlines()[0]


def detector_summaries() -> dict[str, str]:
    """What every recipe of `dsnet.recipes.detection.DETECTORS` is about, likewise."""
    path = PACKAGE / "recipes" / "detection.py"
    if "dsnet.recipes.detection" in sys.modules or not path.is_file():
        from dsnet.recipes.detection import DETECTORS

        return {name: recipe.about for name, recipe in DETECTORS.items()}
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Dict):
            continue
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Call):
                about = next((k.value for k in value.keywords if k.arg == "about"), None)
                if isinstance(about, ast.Constant):
                    found[str(key.value)] = str(about.value)
    return found
