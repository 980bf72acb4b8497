"""Names and summaries of recipes, read from their source: importing the recipes imports torch."""

from __future__ import annotations

import ast
from pathlib import Path

import dsnet

__all__ = ["classifier_recipes", "detector_recipes"]

RECIPES = Path(dsnet.__file__).parent / "recipes"


def classifier_recipes() -> dict[str, str]:
    """Map the names of the recipes of `dsnet train` to their summaries."""
    return _registered("imagenet", "small", "transfer")


def detector_recipes() -> dict[str, str]:
    """Map the names of the recipes of `dsnet detect train` to their summaries."""
    return _registered("detection")


def _registered(*modules: str) -> dict[str, str]:
    """The functions decorated with `register_recipe`, and the first lines of their docstrings.

    An installation without sources gets no names here; `dsnet recipes` lists them all the same.
    """
    paths = [RECIPES / f"{module}.py" for module in modules]
    return {
        node.name: (ast.get_docstring(node) or "").splitlines()[0]
        for path in paths
        if path.is_file()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(by, ast.Name) and by.id == "register_recipe" for by in node.decorator_list)
    }
