"""Recipes by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import DsnetError, shorten
from dsnet.training.config import TrainConfig

__all__ = ["Recipe", "find_recipe", "get_recipe", "list_recipes", "register_recipe", "train_command"]

Config = TypeVar("Config", TrainConfig, DetectionConfig)


@dataclass(frozen=True, slots=True)
class Recipe(Generic[Config]):
    """The settings of an experiment, how long it takes and what to expect.

    ``config`` is a `TrainConfig` for a classifier and a `DetectionConfig` for a detector.
    """

    config: Config
    expect: str = field(kw_only=True)  # accuracy, and where the figure comes from
    duration: str = field(default="not run", kw_only=True)  # and on which machine


RecipeFunction = Callable[[], Recipe[Config]]

_RECIPES: dict[str, RecipeFunction[Any]] = {}
_COMMANDS = {TrainConfig: "dsnet train", DetectionConfig: "dsnet detect train"}


def register_recipe(function: RecipeFunction[Config]) -> RecipeFunction[Config]:
    """Register a recipe under the name of the function; its docstring becomes its description.

    Raises:
        DsnetError: The name is registered already, or there is no docstring.

    Examples:
        >>> @register_recipe
        ... def my_digits() -> Recipe[TrainConfig]:
        ...     '''Digits with another seed.'''
        ...     config = get_recipe("digits_mbnet").config
        ...     return Recipe(config, expect="not measured", duration="21 s on two CPU cores")
        >>> list_recipes()["my_digits"]
        'Digits with another seed.'
        >>> del _RECIPES["my_digits"]
    """
    name = function.__name__
    if name in _RECIPES:
        raise DsnetError(f"a recipe named {name!r} is registered already")
    if not function.__doc__:
        raise DsnetError(f"recipe {name!r} needs a docstring that describes it")
    _RECIPES[name] = function
    return function


def list_recipes(config_type: type[Any] = TrainConfig) -> dict[str, str]:
    """Return the recipes of one type of configuration: name → first line of the docstring."""
    return {
        name: (function.__doc__ or "").strip().splitlines()[0]
        for name, function in _RECIPES.items()
        if isinstance(function().config, config_type)
    }


def find_recipe(name: str) -> Recipe[Any]:
    """Return the recipe of that name, of any type.

    Raises:
        DsnetError: There is none; the message lists similar names, or all of them.
    """
    if name in _RECIPES:
        return _RECIPES[name]()
    close = difflib.get_close_matches(name, _RECIPES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"possible: {', '.join(_RECIPES)}"
    raise DsnetError(f"there is no recipe {shorten(name)}; {hint}")


@overload
def get_recipe(name: str) -> Recipe[TrainConfig]: ...
@overload
def get_recipe(name: str, config_type: type[Config]) -> Recipe[Config]: ...
def get_recipe(name: str, config_type: type[Any] = TrainConfig) -> Recipe[Any]:
    """Return the recipe of that name.

    Args:
        name: One of `list_recipes`.
        config_type: `TrainConfig` for a classifier, `DetectionConfig` for a detector.

    Raises:
        DsnetError: There is no such recipe, or it has another type of configuration.
    """
    recipe = find_recipe(name)
    if not isinstance(recipe.config, config_type):
        kind = "a detector" if isinstance(recipe.config, DetectionConfig) else "a classifier"
        raise DsnetError(f"{name} is a recipe for {kind}: {train_command(recipe)} {name}")
    return recipe


def train_command(recipe: Recipe[Any]) -> str:
    """Return the command that trains this kind of recipe."""
    return _COMMANDS[type(recipe.config)]
