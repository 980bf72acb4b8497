"""``dsnet convert``: convert a pretrained network into a supernet, and save it as a run."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dsnet.cli.options import chosen_weights, model_options
from dsnet.cli.output import print_json
from dsnet.cli.progress import progress
from dsnet.data import load_dataset
from dsnet.data.dataset import ImageDataset
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError, printable
from dsnet.models import Supernet, create_model
from dsnet.models.composite import CompositeNetwork
from dsnet.models.convert import ConvertedNetwork, load_pretrained
from dsnet.models.convert.report import Conversion
from dsnet.models.convert.sources import pretrained_channels
from dsnet.report.routes import route_rows, route_table
from dsnet.training import recalibrate, save_checkpoint
from dsnet.training.run_dir import locked
from dsnet.training.stage1.teacher import Channels

__all__ = ["run"]

CALIBRATION = 2048  # images that statistics are computed on
BATCH = 128


def run(args: argparse.Namespace) -> int:
    """Convert a network, show what is sliced, and save it if asked to."""
    options = model_options(args.set)
    for key in ("widths", "residual", "depths", "image_sizes"):
        if isinstance(options.get(key), int | float):
            options[key] = (options[key],)
    meta: Any = create_model(args.network, device="meta", **options)
    if _conversion(meta) is None:
        raise DsnetError(f"{args.network} is a supernet already: `dsnet describe {args.network}` shows it")
    size = meta.input_spec.image_size
    images = None if args.data is None else load_dataset(args.data, "train", size=size)
    channels = pretrained_channels(args.network) or (None if images is None else images.statistics())
    model = _converted(args, options, None if images is None else _batches(images, channels))
    conversion = _conversion(model)
    assert conversion is not None
    if images is not None:
        _calibrate(model, _batches(images, channels))
    if args.out is not None:
        data = {} if channels is None else {"input": _input(channels, size)}
        args.out.mkdir(parents=True, exist_ok=True)
        with locked(args.out):
            path = save_checkpoint(args.out, "final", model, step=0, data=data)
    rows = route_rows(model, image_size=size)
    if args.json:
        print_json({"conversion": asdict(conversion), "routes": rows})
        return 0
    print(conversion)
    print(f"\n{route_table(model, rows, max_rows=32)}")
    if args.out is not None:
        print(f"\nSaved in {printable(str(path))}. Only its largest route is as accurate as the network yet.")
    return 0


def _converted(
    args: argparse.Namespace, options: dict[str, Any], batches: Iterable[Tensor] | None
) -> Supernet:
    """Build the supernet; sort channels by the activations of ``batches`` if the weights are not random."""
    weights = chosen_weights(args, args.network)
    if weights is None:
        model: Supernet = create_model(args.network, **options)
        return model
    by_order = args.weights_by_order
    return load_pretrained(args.network, weights, by_order=by_order, batches=batches, **options)


def _batches(images: ImageDataset, channels: Channels | None) -> Iterator[Tensor]:
    """Yield batches of a sample of the images, normalised."""
    assert channels is not None
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:CALIBRATION]
    parts = list(order.chunk(max(1, len(order) // BATCH)))
    for batch, _ in progress(images.batches(parts), len(parts), "batch"):
        yield normalise(batch[0], *channels)


def _conversion(model: Any) -> Conversion | None:  # noqa: ANN401  (or a reference network)
    """Return what the conversion did; None for a network that was not converted."""
    network = model.networks[0] if isinstance(model, CompositeNetwork) else model
    return network.conversion if isinstance(network, ConvertedNetwork) else None


def _calibrate(model: Supernet, batches: Iterable[Tensor]) -> None:
    """Compute the statistics of all routes but the largest, which keeps those of the network."""
    recalibrate(model, batches, keep_calibrated=True)


def _input(channels: Channels, size: int) -> dict[str, Any]:
    mean, std = map(list, channels)
    return {"mean": mean, "std": std, "size": size, "crop_ratio": 1.0}
