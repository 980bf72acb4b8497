"""Recipes by name."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import DsnetError, shorten
from dsnet.training.config import TrainConfig

__all__ = ["Recipe", "find_recipe", "get_recipe", "list_recipes", "register_recipe"]

Config = TypeVar("Config", TrainConfig, DetectionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Generic[Config]):
    """The settings of an experiment, how long it takes and what to expect.

    ``config`` is a `TrainConfig` for a classifier and a `DetectionConfig` for a detector.
    """

    config: Config
    summary: str
    duration: str  # and on which machine
    expect: str  # accuracy, and where the figure comes from

    @property
    def command(self) -> str:
        """The command that trains this kind of recipe."""
        return "dsnet detect train" if isinstance(self.config, DetectionConfig) else "dsnet train"


RecipeFunction = Callable[[], Config]

_RECIPES: dict[str, RecipeFunction[Any]] = {}


def register_recipe(function: RecipeFunction[Config]) -> RecipeFunction[Config]:
    """Register a function that returns a configuration as a recipe of the function's name.

    The first line of its docstring is the summary. Paragraphs ``Duration:`` and ``Expect:`` say how long the
    recipe takes and what it reaches; their further lines are indented.

    Raises:
        DsnetError: The name is registered already, or there is no docstring.

    Examples:
        >>> @register_recipe
        ... def my_digits() -> TrainConfig:
        ...     '''Digits with another seed.
        ...
        ...     Duration: 21 s on two CPU cores
        ...     '''
        ...     return get_recipe("digits_mbnet").config
        >>> get_recipe("my_digits").summary, get_recipe("my_digits").duration
        ('Digits with another seed.', '21 s on two CPU cores')
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
    """Return the recipes of one type of configuration: name → summary."""
    recipes = {name: find_recipe(name) for name in _RECIPES}
    return {name: r.summary for name, r in recipes.items() if isinstance(r.config, config_type)}


def find_recipe(name: str) -> Recipe[Any]:
    """Return the recipe of that name, of any type.

    Raises:
        DsnetError: There is none; the message lists similar names, or all of them.
    """
    if name not in _RECIPES:
        close = difflib.get_close_matches(name, _RECIPES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"possible: {', '.join(_RECIPES)}"
        raise DsnetError(f"there is no recipe {shorten(name)}; {hint}")
    text = inspect.getdoc(_RECIPES[name]) or ""
    paragraphs = re.findall(r"^(\w+): (.*(?:\n .*)*)", text, re.MULTILINE)
    said = {key: " ".join(value.split()) for key, value in paragraphs}
    return Recipe(
        config=_RECIPES[name](),
        summary=text.splitlines()[0],
        duration=said.get("Duration", "not run"),
        expect=said.get("Expect", "not measured"),
    )


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
        raise DsnetError(f"{name} is a recipe for {kind}: {recipe.command} {name}")
    return recipe
