"""``dsnet convert``: convert a pretrained network into a supernet, and save it as a run."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from dsnet.cli.options import chosen_weights, model_options
from dsnet.cli.output import print_json
from dsnet.cli.progress import progress
from dsnet.data import load_dataset
from dsnet.data.transforms.augment import normalise
from dsnet.errors import DsnetError, printable
from dsnet.models import create_model
from dsnet.models.convert import ConvertedNetwork, load_pretrained
from dsnet.models.convert.sources import pretrained_channels
from dsnet.report.routes import route_rows, route_table
from dsnet.training import recalibrate, save_checkpoint
from dsnet.training.run_dir import locked

__all__ = ["run"]

CALIBRATION = 2048  # images that statistics are computed on
BATCH = 128


def run(args: argparse.Namespace) -> int:
    """Convert a network, show what is sliced, and save it if asked to."""
    options = model_options(args.set)
    for key in ("widths", "residual", "depths"):
        if isinstance(options.get(key), int | float):
            options[key] = (options[key],)
    weights = chosen_weights(args, args.network)
    model: Any
    if weights is None:
        model = create_model(args.network, **options)
    else:
        model = load_pretrained(args.network, weights, by_order=args.weights_by_order, **options)
    if not isinstance(model, ConvertedNetwork):
        raise DsnetError(f"{args.network} is a supernet already: `dsnet describe {args.network}` shows it")
    channels = pretrained_channels(args.network)
    data: dict[str, Any] = {}
    if args.data is not None:
        images = load_dataset(args.data, "train", size=model.input_spec.image_size)
        channels = channels or images.statistics()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:CALIBRATION]
        batches = list(order.chunk(max(1, len(order) // BATCH)))
        normalised = (normalise(x[0], *channels) for x, _ in images.batches(batches))
        whole = {name: value.clone() for name, value in model.prefix.state_dict().items()}
        smaller = [route for route in model.space if route != model.space.largest]
        recalibrate(model, progress(normalised, len(batches), "computing statistics, batch"), smaller)
        model.prefix.load_state_dict(whole)  # the largest route keeps its own statistics
    if channels is not None:
        mean, std = map(list, channels)
        data["input"] = {"mean": mean, "std": std, "size": model.input_spec.image_size, "crop_ratio": 1.0}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        with locked(args.out):
            path = save_checkpoint(args.out, "final", model, step=0, data=data)
    rows = route_rows(model, image_size=model.input_spec.image_size)
    if args.json:
        print_json({"conversion": asdict(model.conversion), "routes": rows})
        return 0
    print(model.conversion)
    print(f"\n{route_table(model, rows, max_rows=32)}")
    if args.out is not None:
        print(f"\nSaved in {printable(str(path))}. Only its largest route is as accurate as the network yet.")
    return 0
