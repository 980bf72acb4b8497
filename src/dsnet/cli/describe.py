"""``dsnet describe``: a network's routes."""

from __future__ import annotations

import argparse
import json

from dsnet.cli.options import image_size, parse_settings
from dsnet.cost import cost
from dsnet.counts import CONVENTIONS
from dsnet.models import Supernet, create_model
from dsnet.report.routes import route_rows, route_table
from dsnet.report.text import human

__all__ = ["add_command"]

MOST_ROWS = 32


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "describe",
        help="show a network's routes, with sizes, multiply-adds and parameters",
        description="Shows the route table of a supernet, cheapest first: the sizes of its dynamic stages,\n"
        "multiply-adds for one image and parameters of the stand-alone network of that route.\n"
        "Counting is arithmetic: nothing runs and no weights are allocated.",
        epilog="Examples:\n"
        "  dsnet describe ds_mbnet\n"
        "  dsnet describe ds_vit_plus --image-size 384 --convention all\n"
        "  dsnet describe ds_resnet --all\n"
        "  dsnet describe ds_mbnet_cifar --set num_classes=100 --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="a model; `dsnet models` lists them")
    parser.add_argument(
        "--image-size", type=image_size, metavar="N", help="height and width (default: its own)"
    )
    parser.add_argument(
        "--convention",
        choices=CONVENTIONS,
        default="paper",
        help="paper: convolutions, linear layers, average pools; all: also routing heads and the "
        "attention products (default: paper)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a model option, as create_model takes it; may be repeated",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"every route, where there are more than {MOST_ROWS}"
    )
    parser.add_argument("--json", action="store_true", help="every route as JSON")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table."""
    model = create_model(args.name, device="meta", **parse_settings(args.set))
    size = args.image_size or model.geometry.image_size
    height, width = size if isinstance(size, tuple) else (size, size)
    sides = f"{height} × {width}"
    facts = {"model": args.name, "image_size": [height, width], "convention": args.convention}
    if not isinstance(model, Supernet):
        counted = cost(model, image_size=size)
        facts |= {"madds": counted.madds(args.convention), "params": counted.params}
        text = (
            f"{human(facts['madds'])} MAdds, {human(counted.params)} parameters; a static network, no routes"
        )
        print(json.dumps(facts, indent=2) if args.json else f"{args.name} at {sides}: {text}")
        return 0
    rows = route_rows(model, image_size=size, convention=args.convention)
    if args.json:
        narrowings = {name: list(numbers) for name, numbers in model.space.narrowings}
        print(
            json.dumps(
                {**facts, "gates": model.space.gates, "narrowings": narrowings, "routes": rows}, indent=2
            )
        )
        return 0
    gates = "one gate" if model.space.gates == 1 else f"{model.space.gates} gates"
    print(f"{args.name} at {sides}: {len(rows)} routes, {gates}; convention {args.convention!r}")
    if model.space.narrowings:
        print(
            "Narrowings: "
            + "; ".join(f"{n} = {_span(numbers, len(rows))}" for n, numbers in model.space.narrowings)
        )
    print(route_table(model, rows, most=len(rows) if args.all else MOST_ROWS))
    return 0


def _span(numbers: tuple[int, ...], routes: int) -> str:
    return (
        "all routes, its gates trained for it"
        if len(numbers) == routes
        else f"routes {numbers[0]} to {numbers[-1]}"
    )
