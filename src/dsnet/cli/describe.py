"""``dsnet describe``: the routes of a network, with sizes and costs."""

from __future__ import annotations

import argparse

from dsnet.cli.options import model_options
from dsnet.cli.output import print_json
from dsnet.cost import cost
from dsnet.models import Supernet, create_model
from dsnet.models.composite import CompositeNetwork
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
    gates = model.space.gates
    if isinstance(model, CompositeNetwork):
        facts["image_sizes"] = list(model.image_sizes)
        sides = f"{', '.join(map(str, model.image_sizes))} pixels"
        gates = 1 if model.has_gate else 0
    if args.json:
        narrowings = {name: list(numbers) for name, numbers in model.space.narrowings}
        print_json({**facts, "gates": gates, "narrowings": narrowings, "routes": rows})
        return 0
    deciding = {0: "no gate between them (a cascade routes)", 1: "one gate"}.get(gates, f"{gates} gates")
    print(f"{args.name} at {sides}: {len(rows)} routes, {deciding}; convention {args.convention!r}")
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
