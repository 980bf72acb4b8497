"""Recipes by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from dsnet.errors import DsnetError, shorten
from dsnet.training.config import TrainConfig

__all__ = ["Recipe", "get_recipe", "list_recipes", "register_recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A configuration with what is known of it."""

    config: TrainConfig
    duration: str  # on which machine
    expect: str  # accuracy, and where the figure comes from


_RECIPES: dict[str, Callable[[], Recipe]] = {}


def register_recipe(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Registers a function under its own name."""
    name = make.__name__
    if name in _RECIPES:
        raise DsnetError(f"a recipe named {name!r} is registered already")
    if not make.__doc__:
        raise DsnetError(f"recipe {name!r} needs a docstring that says what it is")
    _RECIPES[name] = make
    return make


def list_recipes() -> dict[str, str]:
    """Names of all recipes, with the first line of what they say of themselves."""
    return {name: (make.__doc__ or "").strip().splitlines()[0] for name, make in _RECIPES.items()}


def get_recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name in _RECIPES:
        return _RECIPES[name]()
    close = difflib.get_close_matches(name, _RECIPES, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"possible: {', '.join(_RECIPES)}"
    raise DsnetError(f"there is no recipe {shorten(name)}; {hint}")
