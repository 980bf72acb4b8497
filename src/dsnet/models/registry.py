"""Models by name: `create_model`, `list_models`, and the decorators that register models.

>>> model = create_model("ds_mbnet_tiny", num_classes=10)
>>> model.space
RouteSpace('ds_mbnet_tiny', 4 routes, 1 gate)
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn

from dsnet.errors import DsnetError, printable, shorten
from dsnet.models.composite import take_image_sizes, with_image_sizes
from dsnet.models.static_network import ReferenceNetwork
from dsnet.models.supernet import ModelSpec, Supernet
from dsnet.slicing import Factory

__all__ = [
    "ModelEntry",
    "create_model",
    "initialise",
    "list_models",
    "model_entry",
    "register_entry",
    "register_supernet",
    "register_reference",
    "unregister",
]

O = TypeVar("O")  # noqa: E741  (an options class)
Kind = Literal["supernet", "twin"]
ReferenceName = Literal["mobilenet_v1", "resnet50", "deit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A registered model: its name, kind, summary, class of options and the function that builds it."""

    name: str
    kind: Kind
    summary: str
    options: type[Any]
    build: Callable[[Any, Factory], nn.Module]

    def option_names(self) -> tuple[str, ...]:
        """Return the options that `create_model` takes besides device, dtype and generator."""
        sizes = ["image_sizes"] if self.kind == "supernet" else []
        return tuple(sorted([*(f.name for f in fields(self.options)), *sizes]))


_REGISTRY: dict[str, ModelEntry] = {}


def _register(
    kind: Kind, summary: str, options: type[O]
) -> Callable[[Callable[[O, Factory], nn.Module]], Callable[[O, Factory], nn.Module]]:
    def add(build: Callable[[O, Factory], nn.Module]) -> Callable[[O, Factory], nn.Module]:
        if isinstance(build, type) or not is_dataclass(options):
            raise DsnetError(
                "register a function (options, factory) → network, with its options as a dataclass"
            )
        name = build.__name__
        register_entry(ModelEntry(name=name, kind=kind, summary=summary, options=options, build=build))
        return build

    return add


def register_entry(entry: ModelEntry) -> None:
    """Register a model; raise if its name is taken."""
    if entry.name in _REGISTRY:
        raise DsnetError(f"a model named {entry.name!r} is registered already")
    _REGISTRY[entry.name] = entry


def register_supernet(
    summary: str, options: type[O]
) -> Callable[[Callable[[O, Factory], nn.Module]], Callable[[O, Factory], nn.Module]]:
    """Register a function (options, factory) → `Supernet` under the function's name.

    Args:
        summary: One line for `dsnet models`.
        options: Dataclass of the model's options, for example `ConvOptions`.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        DsnetError: The name is taken, or ``options`` is not a dataclass.
    """
    return _register("supernet", summary, options)


def register_reference(
    summary: str, options: type[O]
) -> Callable[[Callable[[O, Factory], nn.Module]], Callable[[O, Factory], nn.Module]]:
    """Register a function (options, factory) → `ReferenceNetwork` under the function's name.

    Args:
        summary: One line for `dsnet models`.
        options: Dataclass of the model's options.

    Returns:
        A decorator that returns the function unchanged.
    """
    return _register("twin", summary, options)


def unregister(name: str) -> None:
    """Remove a model from the registry, for tests and examples."""
    _REGISTRY.pop(model_entry(name).name)


TIMM = "timm:"


def _timm_entry(name: str) -> ModelEntry:
    """Return the entry of a network of timm, which is converted when it is built."""
    from dsnet.models.convert import sources  # it needs this package

    def build(options: sources.ConvertOptions, factory: Factory) -> nn.Module:
        return sources.build_converted(name, options, factory)

    summary = "a network of timm, converted into a supernet"
    return ModelEntry(
        name=name, kind="supernet", summary=summary, options=sources.ConvertOptions, build=build
    )


def list_models(kind: Kind | None = None) -> list[str]:
    """Return the names of the registered models in alphabetical order, supernets first.

    Args:
        kind: ``supernet``, or ``twin`` for reference networks (default: both).

    Examples:
        >>> list_models("twin")
        ['deit', 'mobilenet_v1', 'resnet50']
    """
    if kind not in (None, "supernet", "twin"):
        raise DsnetError(f"unknown kind of model {shorten(kind)}; possible: supernet, twin")
    entries = sorted(_REGISTRY.values(), key=lambda entry: (entry.kind, entry.name))
    return [entry.name for entry in entries if kind in (None, entry.kind)]


def model_entry(name: str) -> ModelEntry:
    """Return the entry of a registered model or of a network of timm, or raise an error that lists models."""
    if isinstance(name, str) and name in _REGISTRY:
        return _REGISTRY[name]
    if isinstance(name, str) and name.startswith(TIMM):
        return _timm_entry(name)
    close = difflib.get_close_matches(str(name), _REGISTRY, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise DsnetError(f"there is no model {shorten(name)}; {hint}possible: {', '.join(list_models())}")


@overload
def create_model(  # type: ignore[overload-overlap]
    name: ReferenceName,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **options: object,
) -> ReferenceNetwork: ...
@overload
def create_model(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **options: object,
) -> Supernet: ...
def create_model(
    name: str,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **options: object,
) -> nn.Module:
    """Build a model by name, in eval mode and untrained.

    Args:
        name: A name of `list_models`, or ``timm:NAME`` for a network of timm.
        device: Device of the parameters.
        dtype: Precision of the parameters.
        generator: Source of the initial weights (default: torch's global one).
        **options: Options of the model, which ``dsnet models --json`` lists. All models take ``num_classes``,
            all supernets ``image_sizes``: sides in pixels, rising, see `with_image_sizes`.

    Returns:
        A `Supernet` or a `ReferenceNetwork`.

    Raises:
        DsnetError: There is no such model or option.

    Examples:
        >>> create_model("mobilenet_v1", num_classes=10, device="meta").head[-1].out_features
        10
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DsnetError(f"dtype must be a floating torch.dtype, for example torch.float32, not {dtype!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise DsnetError(f"generator must be a torch.Generator, not {generator!r}")
    entry = model_entry(name)
    image_sizes = None
    if entry.kind == "supernet":
        image_sizes = take_image_sizes(options, has_image_size="image_size" in entry.option_names())
    unknown = sorted(set(options) - set(entry.option_names()))
    if unknown:
        raise DsnetError(
            f"{name} has no option {printable(', '.join(unknown), 200)}; possible: "
            f"{', '.join(entry.option_names())}"
        )
    model = entry.build(entry.options(**options), Factory(device=device, dtype=dtype)).eval()
    if isinstance(model, Supernet):
        plain = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}  # as from JSON
        model.spec = ModelSpec(name=name, options=tuple(sorted(plain.items())))
        if image_sizes is not None:
            model = with_image_sizes(model, image_sizes)
    if generator is not None:
        initialise(model, generator)
    return model


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw all weights anew, and reset all norm statistics.

    Args:
        model: A model of `create_model`.
        generator: Source of the weights (default: torch's global one).
    """
    if isinstance(model, ReferenceNetwork):
        model.reset_parameters(generator)
        return
    # Children first: a module may adjust what its children drew.
    for module in reversed(list(model.modules())):
        reset = getattr(module, "reset_parameters", None)
        if reset is not None and not type(module).__module__.startswith("torch."):  # parts left as they are
            reset(generator)
