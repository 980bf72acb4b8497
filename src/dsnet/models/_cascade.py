"""Cascades over separate networks: each at its own image size, routed as one supernet."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dsnet.errors import DsnetError, printable, shorten
from dsnet.models.composite import CompositeNetwork
from dsnet.models.convert.api import convert
from dsnet.models.members import Interpolation, Member
from dsnet.models.supernet import ModelSpec, Supernet

__all__ = ["cascade"]

MAX_NETWORKS = 16
MAX_SIDE = 2**14

Normalisation = tuple[Sequence[float], Sequence[float]]
"""Mean and standard deviation of each channel, of values in [0, 1]."""


def cascade(
    networks: Sequence[nn.Module],
    sizes: Sequence[int],
    *,
    normalisations: Sequence[Normalisation] | None = None,
    interpolation: Interpolation = "bicubic",
    name: str | None = None,
) -> CompositeNetwork:
    """Make one supernet of separate classifiers, so that a cascade can route images between them.

    The routes are those of all networks, cheapest first. The result has no gate. Record its outputs at all
    routes, calibrate a cascade on them and run it by `Routed`, as for any supernet:

        model = dsnet.cascade([small, large], sizes=(224, 260))
        outputs = dsnet.calibration.collect(model, batches, list(model.space))
        calibration = dsnet.calibration.calibrate(outputs, CostTable.of_model(model), gate=False)
        routed = dsnet.Routed(model, calibration.router("cascade"), "65%")

    Args:
        networks: At least two classifiers with the same classes, in eval mode, of one precision and on one
            device. Supernets keep all their routes, and the result takes over their weights. Other networks
            are copied by `dsnet.convert` as supernets of one route.
        sizes: Side of the images of each network. The result takes images of the largest of these sizes and
            resizes them for the other networks.
        normalisations: Mean and standard deviation, each a number for every channel, that each network was
            trained with (default: the same for all). The result takes images normalised for the last network.
        interpolation: How images are resized, with antialiasing: ``bicubic``, or ``bilinear``, which blurs
            more. Networks that were trained on sharper images are less accurate then.
        name: Name of the result (default: names and sizes of the networks).

    Returns:
        The network, in eval mode. Save its ``state_dict``; to load it, make the cascade again.

    Raises:
        DsnetError: The networks, sizes and normalisations do not fit together, or a network cannot be
            converted; the message names the network by its position.

    Examples:
        >>> import torch, dsnet
        >>> small = nn.Sequential(
        ...     nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(),
        ...     nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(),
        ...     nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
        ... )
        >>> large = dsnet.create_model("ds_mbnet_tiny", num_classes=10)
        >>> model = cascade([small.eval(), large], sizes=(12, 16))
        >>> [(route.number, route.image_size) for route in model.space]
        [(0, 12), (1, 16), (2, 16), (3, 16), (4, 16)]
        >>> model(torch.zeros(2, 3, 16, 16), 0).shape
        torch.Size([2, 10])
    """
    given = _check_networks(networks)
    sides = _check_sizes(sizes, len(given))
    supernets = [_supernet(i, *pair) for i, pair in enumerate(zip(given, sides, strict=True))]
    _check_alike(supernets)
    if interpolation not in get_args(Interpolation):
        raise DsnetError(
            f"unknown interpolation {shorten(interpolation)}; possible: {', '.join(get_args(Interpolation))}"
        )
    channels = supernets[-1].input_spec.channels
    scales = _scales(normalisations, len(given), channels)
    members = []
    for network, side, (scale, shift) in zip(supernets, sides, scales, strict=True):
        view = copy.copy(network)  # shares all weights
        view.input_spec = replace(network.input_spec, image_size=side)
        members.append(Member(view, scale, shift, interpolation))
    if name is None:
        name = "+".join(f"{n.name}_{side}" for n, side in zip(supernets, sides, strict=True))
    elif not isinstance(name, str) or not name:
        raise DsnetError(f"the name of a cascade is text, not {shorten(name)}")
    options = (("networks", tuple(n.name for n in supernets)), ("sizes", sides))
    return CompositeNetwork(supernets, members, spec=ModelSpec(name=name, options=options), gate=None)


def _label(position: int, network: nn.Module) -> str:
    """Name a network in messages."""
    name = network.name if isinstance(network, Supernet) else type(network).__name__
    return f"network {position} ({name})"


def _check_networks(networks: Any) -> list[nn.Module]:  # noqa: ANN401
    """Return the networks; raise unless they are several, each once, and in eval mode."""
    if not isinstance(networks, list | tuple | nn.ModuleList):
        raise DsnetError(
            f"a cascade takes a list of networks, cheapest first, not {shorten(type(networks).__name__)}"
        )
    if not 2 <= len(networks) <= MAX_NETWORKS:
        raise DsnetError(f"a cascade takes 2 to {MAX_NETWORKS} networks, not {len(networks)}")
    for position, network in enumerate(networks):
        if not isinstance(network, nn.Module):
            raise DsnetError(
                f"network {position} of a cascade is a {type(network).__name__}, not an nn.Module"
            )
        if isinstance(network, CompositeNetwork):
            raise DsnetError(
                f"{_label(position, network)} has several image sizes already: give a cascade the networks "
                "that it is made of"
            )
        if isinstance(network, Supernet) and any(network is other for other in networks[:position]):
            raise DsnetError(
                f"{_label(position, network)} is in this cascade already: for one supernet at several image "
                "sizes use create_model(…, image_sizes=…)"
            )
        training = [name or "itself" for name, module in network.named_modules() if module.training]
        if training:
            raise DsnetError(
                f"{_label(position, network)} is in training mode ({len(training)} modules, the first is "
                f"{training[0]}): call .eval()"
            )
    return list(networks)


def _check_sizes(sizes: Any, count: int) -> tuple[int, ...]:  # noqa: ANN401
    """Return the image sizes; raise unless there is one for each network."""
    example = tuple(224 + 32 * position for position in range(count))
    if not isinstance(sizes, list | tuple) or any(
        type(size) is not int or not 0 < size <= MAX_SIDE for size in sizes
    ):
        raise DsnetError(
            f"sizes are the sides of images in pixels, one for each network, for example {example}, not "
            f"{shorten(sizes)}"
        )
    if len(sizes) != count:
        raise DsnetError(
            f"expected {count} sizes, one for each network, got {len(sizes)}: {shorten(tuple(sizes))}"
        )
    return tuple(sizes)


def _supernet(position: int, network: nn.Module, side: int) -> Supernet:
    """Return a network as a supernet that takes images of this size."""
    label = _label(position, network)
    if isinstance(network, Supernet):
        try:
            network.input_spec.check(side, side)
        except DsnetError as error:
            raise DsnetError(f"{label} does not take images of {side} pixels: {error}") from error
        return network
    parameter = next(network.parameters(), None)
    if parameter is None:
        raise DsnetError(f"{label} cannot be converted for a cascade: it has no weights")
    try:
        return convert(network, _example(network, side, parameter), widths=(1.0,), sort=False)
    except DsnetError as error:
        raise DsnetError(
            f"{label} cannot be converted for a cascade at {side} × {side} pixels: "
            f"{printable(str(error), 600)}"
        ) from error


def _example(network: nn.Module, side: int, parameter: Tensor) -> Tensor:
    """Draw an image to trace a network with."""
    layers = (module for module in network.modules() if isinstance(module, nn.Conv2d))
    first = next(layers, None)
    channels = 3 if first is None else first.in_channels
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, channels, side, side, generator=generator).to(parameter)


def _check_alike(networks: Sequence[Supernet]) -> None:
    """Raise unless networks have the same classes, image channels, precision and device."""
    weights = [network.head.classifier.weight for network in networks]
    found: dict[str, list[Any]] = {
        "classes": [network.head.classifier.out_features for network in networks],
        "image channels": [network.input_spec.channels for network in networks],
        "precisions": [weight.dtype for weight in weights],
        "devices": [weight.device for weight in weights],
    }
    for what, values in found.items():
        if len(set(values)) > 1:
            each = ", ".join(
                f"{value} ({network.name})" for value, network in zip(values, networks, strict=True)
            )
            raise DsnetError(
                f"the networks of a cascade need the same {what}, but network 0 to {len(networks) - 1} have "
                f"{each}"
            )


def _scales(
    normalisations: Any,  # noqa: ANN401
    count: int,
    channels: int,
) -> list[tuple[Tensor | None, Tensor | None]]:
    """Return, for each network, the factor and summand that turn the last network's images into its own."""
    if normalisations is None:
        return [(None, None)] * count
    if not isinstance(normalisations, list | tuple) or len(normalisations) != count:
        raise DsnetError(
            f"normalisations are {count} pairs (mean, deviation), one for each network, not "
            f"{shorten(normalisations)}"
        )
    pairs = [_normalisation(pair, channels) for pair in normalisations]
    last_mean, last_std = pairs[-1]
    scales: list[tuple[Tensor | None, Tensor | None]] = []
    for mean, std in pairs:
        if torch.equal(mean, last_mean) and torch.equal(std, last_std):
            scales.append((None, None))
        else:
            scales.append(((last_std / std), (last_mean - mean) / std))
    return scales


def _normalisation(pair: Any, channels: int) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return mean and deviation [C, 1, 1], or raise an error that says what is possible."""

    def numbers(values: Any) -> bool:  # noqa: ANN401
        return (
            isinstance(values, list | tuple)
            and len(values) == channels
            and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
            and all(map(math.isfinite, values))
        )

    valid = isinstance(pair, list | tuple) and len(pair) == 2 and all(map(numbers, pair))
    if not valid or not all(deviation > 0 for deviation in pair[1]):
        example = f"(({', '.join(['0.5'] * channels)}), ({', '.join(['0.25'] * channels)}))"
        raise DsnetError(
            f"a normalisation is a finite mean and a deviation above 0 for each of {channels} channels, for "
            f"example {example}, not {shorten(pair)}"
        )
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in pair)
    return mean, std
