"""Names and summaries of recipes, read from their source: importing the recipes imports torch."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import dsnet

__all__ = ["CLASSIFIERS", "DETECTORS", "recipe_summaries"]

CLASSIFIERS = ("imagenet", "small", "image_sizes", "transfer")  # modules of `dsnet.recipes`
DETECTORS = ("detection",)


def recipe_summaries(modules: Iterable[str]) -> dict[str, str]:
    """Map the recipes that modules of `dsnet.recipes` register to the first lines of their docstrings.

    Empty in an installation without sources, where `dsnet recipes` still lists them.
    """
    paths = [Path(dsnet.__file__).parent / "recipes" / f"{module}.py" for module in modules]
    return {
        node.name: (ast.get_docstring(node) or "").splitlines()[0]
        for path in paths
        if path.is_file()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(name, ast.Name) and name.id == "register_recipe" for name in node.decorator_list)
    }
