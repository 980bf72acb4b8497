"""Networks to convert: those of timm by name, with weights of timm or of a file."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsnet.core.seeding import global_seed
from dsnet.errors import DsnetError, install_hint, printable, shorten
from dsnet.models.composite import take_image_sizes, with_image_sizes
from dsnet.models.convert.api import convert, convert_options
from dsnet.models.convert.network import ConvertedNetwork
from dsnet.models.convert.options import ConvertOptions
from dsnet.models.registry import TIMM, ModelEntry, register_entry
from dsnet.models.supernet import ModelSpec, Supernet
from dsnet.slicing import Factory

__all__ = [
    "ConvertOptions",
    "build_converted",
    "import_timm",
    "load_pretrained",
    "load_weights",
    "pretrained_channels",
    "register_network",
    "timm_network",
]

DOWNLOADED = "timm"  # as weights: those that timm downloads


def import_timm() -> Any:  # noqa: ANN401  (a module without types)
    """Import timm, also where torchvision lacks its compiled operators.

    timm imports torchvision for its data pipeline. A torchvision that was built for another torch fails to
    import, since its operators are missing. timm's networks do not use them, so they are declared.

    Raises:
        DsnetError: timm or torchvision is not installed.
    """
    try:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            _declare_operators()
        return importlib.import_module("timm")
    except ImportError as error:
        raise DsnetError(
            f"{TIMM}NAME needs the packages timm and torchvision: {install_hint('timm')} ({error})"
        ) from None


_LIBRARIES: list[torch.library.Library] = []  # their operators exist as long as they do


def _declare_operators() -> None:
    library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # imported in part


def timm_network(
    name: str,
    *,
    num_classes: int | None = None,
    in_channels: int = 3,
    image_size: int | None = None,
    pretrained: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Create a network of timm, in eval mode.

    Args:
        name: Name in timm, without ``timm:``.
        num_classes: Number of classes (default: that of the network).
        in_channels: Channels of the images.
        image_size: Side of the images, for networks that are built for one size.
        pretrained: Download the weights.
        seed: Of initial weights.

    Raises:
        DsnetError: timm has no such network, or the weights cannot be downloaded.
    """
    timm = import_timm()
    if not re.fullmatch(r"[A-Za-z0-9_.]+", name) or not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=5)
        hint = f"; similar: {', '.join(close)}" if close else ""
        raise DsnetError(f"timm has no network {shorten(name)}{hint}")
    options: dict[str, Any] = {"pretrained": pretrained, "in_chans": in_channels}
    if num_classes is not None:
        options["num_classes"] = num_classes
    with global_seed(seed):
        try:
            try:
                network = timm.create_model(
                    name, **options, **({"img_size": image_size} if image_size else {})
                )
            except TypeError:  # a network for all sizes
                network = timm.create_model(name, **options)
        except Exception as error:  # timm, the hub and the network below it each raise their own
            raise DsnetError(f"timm cannot create {name}: {printable(str(error), 300)}") from error
    result: nn.Module = network.eval()
    return result


def pretrained_channels(model: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the mean and standard deviation that a network was trained with, if timm knows them.

    Args:
        model: ``timm:NAME``, or a network registered by `register_network`, of which nothing is known.
    """
    if not model.startswith(TIMM):
        return None
    known = import_timm().get_pretrained_cfg(model.removeprefix(TIMM))
    return None if known is None else (tuple(known.mean), tuple(known.std))


def register_network(function: NetworkFactory) -> NetworkFactory:
    """Register a function that builds a network of your own, under the function's name.

    `create_model`, ``dsnet train --model NAME`` and the loading of checkpoints then build and convert it. A
    checkpoint holds the name alone: import the module that registers it before loading (``--import MODULE``).

    Args:
        function: Function of ``num_classes`` that returns a network with random weights. Its last layer is
            a linear layer.

    Raises:
        DsnetError: The name is taken.

    Examples:
        >>> from torch import nn
        >>> @register_network
        ... def two_convolutions(num_classes: int = 10) -> nn.Module:
        ...     convolutions = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()]
        ...     return nn.Sequential(
        ...         *convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes)
        ...     )
        >>> from dsnet.models.registry import create_model, unregister
        >>> create_model("two_convolutions", widths=(0.5, 1.0), image_size=32).space
        RouteSpace('two_convolutions', 2 routes, 1 gate)
        >>> unregister("two_convolutions")
    """
    name = function.__name__

    def build(options: ConvertOptions, factory: Factory) -> nn.Module:
        return build_converted(name, options, factory)

    summary = (function.__doc__ or "a network of your own, converted into a supernet").strip().splitlines()[0]
    entry = ModelEntry(name=name, kind="supernet", summary=summary, options=ConvertOptions, build=build)
    register_entry(entry)
    _FACTORIES[name] = function
    return function


NetworkFactory = Callable[..., nn.Module]
_FACTORIES: dict[str, NetworkFactory] = {}


def _source_network(name: str, options: ConvertOptions, *, pretrained: bool, seed: int) -> nn.Module:
    """Build the network to convert, in eval mode."""
    if name.startswith(TIMM):
        return timm_network(
            name.removeprefix(TIMM),
            num_classes=options.num_classes,
            in_channels=options.in_channels,
            image_size=options.image_size,
            pretrained=pretrained,
            seed=seed,
        )
    if name not in _FACTORIES or pretrained:
        raise DsnetError(
            f"{name} has no pretrained weights; they are for {TIMM}NAME, and files of weights also for "
            f"networks registered by register_network ({', '.join(_FACTORIES) or 'none are'})"
        )
    classes = {} if options.num_classes is None else {"num_classes": options.num_classes}
    with global_seed(seed):
        network = _FACTORIES[name](**classes)
    return network.eval()


def build_converted(
    name: str,
    options: ConvertOptions,
    factory: Factory,
    *,
    weights: str | Path | None = None,
    by_order: bool = False,
    seed: int = 0,
    batches: Iterable[Tensor] | None = None,
) -> ConvertedNetwork:
    """Create a network and convert it.

    Args:
        name: ``timm:NAME``, or the name of a network registered by `register_network`.
        options: Options of the conversion.
        factory: Device and precision of the result.
        weights: File with weights, ``timm`` to download them, None for random ones.
        by_order: Take the weights of a file by their order instead of by their names.
        seed: Of initial weights.
        batches: Images to sort channels by, see `convert`.

    Raises:
        DsnetError: The network does not exist or cannot be converted, or the weights do not fit.
    """
    meta = torch.device(factory.get("device") or "cpu").type == "meta"
    downloaded = str(weights) == DOWNLOADED and not meta
    complete = True
    with torch.device("meta" if meta else "cpu"):
        try:
            network = _source_network(name, options, pretrained=downloaded, seed=seed)
        except DsnetError as error:
            hint = "; give a file of weights instead (--weights FILE)" if downloaded else ""
            raise DsnetError(f"{error}{hint}") from error
        if weights is not None and str(weights) != DOWNLOADED and not meta:
            complete = load_weights(network, weights, by_order=by_order)
        elif downloaded:  # timm makes a new classifier for another number of classes
            known = getattr(network, "pretrained_cfg", None) or {}
            complete = options.num_classes in (None, known.get("num_classes"))
        side = options.image_size or _native_size(network)
        generator = None if meta else torch.Generator().manual_seed(0)
        example = torch.randn(1, options.in_channels, side, side, generator=generator)
    settings = {key: getattr(options, key) for key in ConvertOptions.__dataclass_fields__}
    model = convert(network, example, batches=batches, **{**settings, "name": name, "image_size": side})
    model.new_classifier = not complete
    return model.to(device=factory.get("device"), dtype=factory.get("dtype"))


def load_pretrained(
    model: str,
    weights: str | Path,
    *,
    by_order: bool = False,
    seed: int = 0,
    batches: Iterable[Tensor] | None = None,
    **options: Any,  # noqa: ANN401  (of ConvertOptions, which checks them)
) -> Supernet:
    """Convert a network with pretrained weights.

    Args:
        model: ``timm:NAME``, or the name of a network registered by `register_network`.
        weights: A file of weights, or ``timm`` to download them.
        by_order: Take the tensors of the file by order instead of by name.
        seed: Of the weights that the file does not have: a classifier for other classes.
        batches: Images to sort channels by, see `convert`.
        **options: Options of the conversion, such as ``num_classes`` and ``widths``, and ``image_sizes``.

    Returns:
        A `ConvertedNetwork`; with ``image_sizes`` a `CompositeNetwork` of it.

    Raises:
        DsnetError: The network cannot be created or converted, or the weights do not fit.

    Examples:
        >>> model = load_pretrained("timm:resnet18", "resnet18.safetensors", num_classes=20)  # doctest: +SKIP
    """
    sizes = take_image_sizes(options, has_image_size=True)
    built = build_converted(
        model,
        convert_options(options),
        Factory(),
        weights=weights,
        by_order=by_order,
        seed=seed,
        batches=batches,
    )
    built.spec = ModelSpec(name=model, options=tuple(sorted(options.items())))
    return built if sizes is None else with_image_sizes(built, sizes)


def _native_size(network: nn.Module) -> int:
    known = getattr(network, "pretrained_cfg", None) or {}
    return int(known.get("input_size", (3, 224, 224))[-1])


# --- weights of a file ----------------------------------------------------------------------------------
def load_weights(network: nn.Module, path: str | Path, *, by_order: bool = False) -> bool:
    """Load the weights of a file into a network.

    A classifier for another number of classes is left as it is.

    Args:
        network: The network.
        path: A safetensors file, or a state dict saved by ``torch.save``; nothing else is unpickled.
        by_order: Ignore names: the tensors of both must have the same shapes in the same order.

    Returns:
        Whether all weights are those of the file, also the classifier's.

    Raises:
        DsnetError: The file cannot be read, or its weights do not fit the network.
    """
    given = _read_state(Path(path))
    own = {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
    if by_order:
        given = _renamed(given, own, path)
    classifier = _classifier(network)
    skipped = {
        name
        for name in classifier
        if name in given
        and name in own
        and given[name].shape != own[name].shape
        and given[name].shape[1:] == own[name].shape[1:]  # it reads the same features
    }
    _check_names(given, own, skipped, path)
    broken = [name for name in own if name not in skipped and not given[name].isfinite().all()]
    if broken:
        raise DsnetError(f"{path} has weights that are not finite: {shorten(', '.join(broken[:3]))}")
    network.load_state_dict({name: given[name] for name in own if name not in skipped}, strict=False)
    return not skipped


def _read_state(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DsnetError(f"there is no file {path} with weights")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each reader raises its own
        raise DsnetError(
            f"{path} cannot be read as weights ({type(error).__name__}: {printable(str(error), 200)}); "
            "possible: a safetensors file, or a state dict of tensors saved by torch.save"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise DsnetError(f"{path} holds no state dict: a mapping from names to tensors")
    return {
        str(name).removeprefix("module."): tensor
        for name, tensor in state.items()
        if tensor.is_floating_point()
    }


def _renamed(given: Mapping[str, Tensor], own: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a file under the names of the network, by order."""
    if len(given) != len(own):
        raise DsnetError(
            f"{path} has {len(given)} tensors, the network {len(own)}: they do not agree in order"
        )
    pairs = list(zip(own.items(), given.items(), strict=True))
    for number, ((name, tensor), (other, theirs)) in enumerate(pairs):
        last = number >= len(pairs) - 2  # the classifier may have other classes
        if tensor.shape != theirs.shape and not (last and tensor.shape[1:] == theirs.shape[1:]):
            raise DsnetError(
                f"{path} does not agree with the network in order: tensor {number} is {other} "
                f"{list(theirs.shape)}, expected the shape of {name} {list(tensor.shape)}"
            )
    return {name: theirs for (name, _), (_, theirs) in pairs}


def _classifier(network: nn.Module) -> list[str]:
    """Return the names of the weights of the last linear layer."""
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return [f"{layers[-1]}.weight", f"{layers[-1]}.bias"] if layers else []


def _check_names(
    given: Mapping[str, Tensor], own: Mapping[str, Tensor], skipped: set[str], path: str | Path
) -> None:
    missing, unknown = [n for n in own if n not in given], [n for n in given if n not in own]
    if missing or unknown:
        shapes = [t.shape for t in given.values()] == [t.shape for t in own.values()]
        hint = "; shapes agree in order: --weights-by-order loads them" if shapes else ""
        raise DsnetError(
            f"{path} does not fit the network: it lacks {len(missing)} tensors "
            f"({shorten(', '.join(missing[:3]))}) and has {len(unknown)} unknown ones "
            f"({shorten(', '.join(unknown[:3]))}){hint}"
        )
    for name, tensor in own.items():
        if given[name].shape != tensor.shape and name not in skipped:
            raise DsnetError(
                f"{path} does not fit the network: {name} has shape {list(given[name].shape)}, expected "
                f"{list(tensor.shape)}"
            )
