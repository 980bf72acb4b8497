"""Convert a trained network into a supernet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from dsnet.errors import DsnetError, shorten
from dsnet.models.convert._analysis import analyse
from dsnet.models.convert._converter import Converter
from dsnet.models.convert._tracing import TracedGraph, trace
from dsnet.models.convert.network import ConvertedNetwork
from dsnet.models.convert.options import ConvertOptions
from dsnet.models.supernet import ModelSpec

__all__ = ["convert", "convert_options"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def convert(
    network: nn.Module,
    example: Tensor,
    *,
    batches: Iterable[Tensor] | None = None,
    sort: bool = True,
    **options: Any,  # noqa: ANN401  (of ConvertOptions, which checks them)
) -> ConvertedNetwork:
    """Convert a network into a supernet.

    Channels that must be sliced together are found and sorted, so that a slice keeps the most important ones.
    The largest route computes what the network computes; smaller routes need training, or at least new
    batch-norm statistics (`dsnet.recalibrate`).

    Args:
        network: The network in eval mode, images [B, C, H, W] → logits [B, classes]. It is not changed; its
            last layer must be a linear layer.
        example: Images [B, C, H, W] of the size that the network is used with.
        batches: Images by which channels are sorted too: a channel is then as important as the weights that
            read it times its mean activation. Normalised as the network expects.
        sort: Sort channels by importance.
        **options: Routes and gate, see `ConvertOptions`.

    Returns:
        The supernet, in eval mode. Its ``conversion`` prints what is sliced, and what is not and why.

    Raises:
        DsnetError: The network cannot be traced or cut into blocks, or the options do not fit it.

    Examples:
        >>> from torch import nn
        >>> network = nn.Sequential(
        ...     nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        ...     nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(),
        ...     nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        ... ).eval()
        >>> model = convert(network, torch.zeros(1, 3, 32, 32), widths=(0.5, 1.0))
        >>> model.space
        RouteSpace('sequential', 2 routes, 1 gate)
    """
    chosen = convert_options(options)
    _check(network, example)
    if chosen.image_size is not None and example.shape[-1] != chosen.image_size:
        raise DsnetError(
            f"image_size={chosen.image_size}, but the example has {example.shape[-2]} × {example.shape[-1]} "
            "pixels"
        )
    flags = {name: module.training for name, module in network.named_modules()}
    traced = trace(network, _two_images(example))
    _check_batch(traced, example)
    if batches is not None and not sort:
        raise DsnetError("batches are images to sort channels by: they have no effect with sort=False")
    analysis = analyse(traced)
    with torch.inference_mode(False):  # the result can be trained
        model = Converter(analysis, network, chosen).build(example, batches, sort=sort)
    assert flags == {name: module.training for name, module in network.named_modules()}
    kept = {key: value for key, value in options.items() if key != "name" and value is not None}
    kept["image_size"] = example.shape[-1]
    model.spec = ModelSpec(name=model.name, options=tuple(sorted(kept.items())))
    _verify(model, network, example)
    return model


def convert_options(options: Mapping[str, Any]) -> ConvertOptions:
    """Return options by name; raise an error that lists them if one does not exist."""
    possible = set(ConvertOptions.__dataclass_fields__)
    unknown = sorted(set(options) - possible)
    if unknown:
        raise DsnetError(
            f"convert has no option {', '.join(unknown)}; possible: {', '.join(sorted(possible))}"
        )
    return ConvertOptions(**options)


def _check(network: nn.Module, example: Tensor) -> None:
    """Raise if a network or an example cannot be converted."""
    if not isinstance(network, nn.Module):
        raise DsnetError(f"convert takes a network (nn.Module), not {shorten(type(network).__name__)}")
    training = [name or "itself" for name, module in network.named_modules() if module.training]
    if training:
        raise DsnetError(
            f"the network is in training mode ({len(training)} modules, the first is {training[0]}): call "
            ".eval()"
        )
    if (
        not isinstance(example, Tensor)
        or example.ndim != 4
        or not example.is_floating_point()
        or not len(example)
    ):
        given = f"shape {list(example.shape)}" if isinstance(example, Tensor) else type(example).__name__
        raise DsnetError(
            f"the example must be images [batch, channels, height, width] of floats, not {given}"
        )
    parameter = next(network.parameters(), None)
    if parameter is None:
        raise DsnetError("the network has no weights")
    if (parameter.dtype, parameter.device) != (example.dtype, example.device):
        raise DsnetError(
            f"the example is {example.dtype} on {example.device}, the network {parameter.dtype} on "
            f"{parameter.device}; convert one of them"
        )


@torch.no_grad()
def _check_batch(traced: TracedGraph, example: Tensor) -> None:
    """Raise if the graph does not run on one image, though it was traced with two."""
    try:
        fx.GraphModule(traced.root, traced.graph).forward(example[:1])
    except Exception as error:
        raise DsnetError(
            "the network takes only batches of the size that it was traced with: its code turns the batch "
            f"size into a number, for example by len(x) instead of x.shape[0] ({shorten(str(error), 200)})"
        ) from error


def _two_images(example: Tensor) -> Tensor:
    """Return two images: with one, a batch could be mistaken for a dimension of size 1."""
    return torch.cat([example, example])[:2]


@torch.no_grad()
def _verify(model: ConvertedNetwork, network: nn.Module, example: Tensor) -> None:
    """Compare the largest route with the network; a difference is an error of the conversion."""
    if example.is_meta:
        return
    expected, actual = network(example), model(example, model.space.largest)
    error = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
    tolerance = TOLERANCE.get(example.dtype, 1e-2)
    if not error <= tolerance:
        raise DsnetError(
            f"the converted network differs from the original by {error:.1e} (relative; at most "
            f"{tolerance:.0e} is expected): it does something that the conversion misunderstood. Please "
            "report it with the network"
        )
    model.conversion = replace(model.conversion, error=error)
