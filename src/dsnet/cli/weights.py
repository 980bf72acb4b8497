"""``dsnet weights``: a list of the trained weights that come with the package."""

from __future__ import annotations

import argparse

from dsnet.cli.output import print_json
from dsnet.models.shipped import list_shipped, shipped_weights

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print what is known of all weights."""
    shipped = [shipped_weights(name) for name in list_shipped()]
    if args.json:
        print_json([weights.to_dict() for weights in shipped])
        return 0
    for weights in shipped:
        options = weights.checkpoint["network"]["options"]
        settings = ", ".join(f"{key}={value}" for key, value in options.items() if key != "num_classes")
        low, high = weights.accuracy[0], weights.accuracy[-1]
        print(f"{weights.name}\n  {weights.summary}")
        print(f"  network   {weights.network} ({settings})")
        print(f"  data      {weights.data}")
        print(f"  accuracy  {low:.1%} / {high:.1%} at the smallest / largest route, {weights.tested_on}")
        print(f"  size      {weights.bytes / 1e3:.0f} kB, {weights.license}")
        print(f"  sha256    {weights.sha256}")
        print(f"  recipe    dsnet train {weights.recipe}")
        print(f"  made      {weights.made}\n")
    return 0
