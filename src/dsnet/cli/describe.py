"""``dsnet describe``: the routes of a network, with sizes and costs."""

from __future__ import annotations

import argparse

from dsnet.cli.options import model_options
from dsnet.cli.output import print_json
from dsnet.cost import cost
from dsnet.models import Supernet, create_model
from dsnet.report.routes import route_rows, route_table
from dsnet.report.text import human
from dsnet.training.stage2.config import LossWeights

__all__ = ["run"]

MAX_ROWS = 32


def run(args: argparse.Namespace) -> int:
    """Print the routes of a network."""
    model = create_model(args.name, device="meta", **model_options(args.set))
    size = args.image_size or model.input_spec.image_size
    height, width = size if isinstance(size, tuple) else (size, size)
    sides = f"{height} × {width}"
    facts = {"model": args.name, "image_size": [height, width], "convention": args.convention}
    if not isinstance(model, Supernet):
        counted = cost(model, image_size=size)
        facts |= {"madds": counted.madds(args.convention), "params": counted.params}
        text = (
            f"{human(facts['madds'])} MAdds, {human(counted.params)} parameters; a static network, no routes"
        )
        if args.json:
            print_json(facts)
        else:
            print(f"{args.name} at {sides}: {text}")
        return 0
    rows = route_rows(model, image_size=size, convention=args.convention)
    if args.json:
        narrowings = {name: list(numbers) for name, numbers in model.space.narrowings}
        print_json({**facts, "gates": model.space.gates, "narrowings": narrowings, "routes": rows})
        return 0
    gates = "one gate" if model.space.gates == 1 else f"{model.space.gates} gates"
    print(f"{args.name} at {sides}: {len(rows)} routes, {gates}; convention {args.convention!r}")
    if model.space.narrowings:
        print(
            "Narrowings: "
            + "; ".join(f"{n} = {_span(model, n, numbers)}" for n, numbers in model.space.narrowings)
        )
    print(route_table(model, rows, max_rows=len(rows) if args.all else MAX_ROWS))
    return 0


def _span(model: Supernet, name: str, numbers: tuple[int, ...]) -> str:
    if name not in model.gate_weights:
        return f"routes {numbers[0]} to {numbers[-1]}"
    return f"all routes, gates trained with {LossWeights(*model.gate_weights[name])}"
