"""Configurations from a recipe's name or file, other data and ``key=value`` settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from dsnet.core.settings import check_kind, override, parse_assignments
from dsnet.detection.train.config import DetectionConfig
from dsnet.errors import DsnetError
from dsnet.recipes.registry import get_recipe, list_recipes
from dsnet.training.config import TrainConfig
from dsnet.training.run_dir import read_plain, settings_of

__all__ = ["resolve_recipe"]

Config = TypeVar("Config", TrainConfig, DetectionConfig)


@overload
def resolve_recipe(name: str, settings: Sequence[str] = (), data: str | None = None) -> TrainConfig: ...
@overload
def resolve_recipe(
    name: str, settings: Sequence[str], data: str | None, config_type: type[Config]
) -> Config: ...
def resolve_recipe(
    name: str,
    settings: Sequence[str] = (),
    data: str | None = None,
    config_type: type[Any] = TrainConfig,
) -> Any:
    """Return a recipe's configuration with changes.

    Args:
        name: Name of a recipe, or the path of a run's ``recipe.json``.
        settings: Changes as ``key=value``.
        data: Data set or folder to use instead of the recipe's.
        config_type: `TrainConfig` for a classifier, `DetectionConfig` for a detector.

    Raises:
        DsnetError: There is no such recipe or setting, or the recipe is of the other type.

    Examples:
        >>> resolve_recipe("digits_mbnet", ["optim.epochs=2"]).optim.epochs
        2
    """
    detector = config_type is DetectionConfig
    path = Path(name)
    if name.endswith(".json"):
        plain = read_plain(path)
        other, kind = (TrainConfig, "classifier") if detector else (DetectionConfig, "detector")
        command = "dsnet train" if detector else "dsnet detect train"
        check_kind(plain, config_type, other, f"{name} is a recipe for a {kind}: {command} {name}")
        config = settings_of(config_type, plain, name)
    elif (path / "recipe.json").is_file():
        raise DsnetError(f"{name} is the folder of a run; its recipe is {path / 'recipe.json'}")
    elif path.is_dir() and name not in list_recipes(object):
        command = "dsnet detect train RECIPE" if detector else "dsnet train"
        raise DsnetError(f"{name} is a folder, not a recipe; `{command} --data {name}` trains on its images")
    else:
        config = get_recipe(name, config_type).config
    changes = parse_assignments(settings)
    if data is not None:
        changes = {"data.root" if detector else "data.name": data, **changes}
    return override(config, changes)
