"""Recipes: complete configurations by name, one per experiment.

A recipe is a function that returns a `Recipe`; its docstring says what it is. ``dsnet recipes`` lists them,
``dsnet train NAME`` runs one, ``--set key=value`` changes it.
"""

from dsnet.recipes.registry import Recipe, get_recipe, list_recipes, register_recipe

from dsnet.recipes import imagenet, small, transfer  # isort: skip  (they register themselves)

__all__ = ["Recipe", "get_recipe", "imagenet", "list_recipes", "register_recipe", "small", "transfer"]
