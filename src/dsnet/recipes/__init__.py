"""Recipes: complete configurations by name, one per experiment.

A recipe is a function that returns a configuration; its docstring says what it does and what to expect.
``dsnet recipes`` lists them, ``dsnet train NAME`` and ``dsnet detect train NAME`` run one, and
``--set key=value`` changes it.
"""

from dsnet.recipes.registry import Recipe, find_recipe, get_recipe, list_recipes, register_recipe

from dsnet.recipes import imagenet, small, image_sizes, transfer, detection  # isort: skip  (they register themselves)

__all__ = [
    "Recipe",
    "detection",
    "find_recipe",
    "get_recipe",
    "image_sizes",
    "imagenet",
    "list_recipes",
    "register_recipe",
    "small",
    "transfer",
]
