"""Time a cascade beside the single route of its accuracy.

    python -m benchmarks.equal_accuracy [--budget 0.3] [--batch 64 256] [--device cuda] [--backend triton]
                                        [--precision bfloat16] [--json FILE]

Accuracies and the cascade's mean cost were measured on CIFAR-10's test images (DS-MBNet, three seeds,
`routing-cifar10-h200.json`). Times are measured here, on the same architecture with untrained weights:

- a cascade of the smallest and the largest route; the share of images that go on gives that mean cost
- a single route as a stand-alone network: the cheapest whose mean accuracy is at least the cascade's
- all images at the largest route
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import make_parser
from benchmarks.timing import environment, write_json
from dsnet.benchmark.api import bench
from dsnet.benchmark.workloads import Cascade, Mix
from dsnet.cli.progress import progress
from dsnet.core.device import pick_device
from dsnet.models import create_model
from dsnet.report.text import table
from dsnet.routing.cost_table import CostTable

MEASURED = Path(__file__).parent / "results" / "routing-cifar10-h200.json"
NETWORK = "ds_mbnet_cifar"


def measured(budget: float, chosen: int | None) -> dict[str, Any]:
    """Return a cascade at a budget and the single route of its accuracy, or a chosen one: means of seeds."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["results"]
    cascades = [row for row in rows if row["router"] == "cascade"]
    points = [min(row["budgets"], key=lambda point: abs(point["share"] - budget)) for row in cascades]
    accuracy = statistics.mean(point["accuracy"] for point in points)
    by_seed = [[accuracy for _, accuracy in row["static"]] for row in cascades]
    singles = [statistics.mean(values) for values in zip(*by_seed, strict=True)]
    as_accurate = [number for number, single in enumerate(singles) if single >= accuracy]
    route = as_accurate[0] if as_accurate else len(singles) - 1
    route = route if chosen is None else chosen
    return {
        "seeds": len(cascades),
        "cascade": round(accuracy, 2),
        "cost": statistics.mean(point["cost"] for point in points),
        "route": route,
        "route_accuracy": round(singles[route], 2),
        "route_cost": cascades[0]["static"][route][0],
        "largest_accuracy": round(singles[-1], 2),
    }


def cascade_share(cost: float) -> float:
    """Return the share of images that go on from the smallest route to the largest at this mean cost."""
    model = create_model(NETWORK, device="meta")
    costs = CostTable.of_model(model)
    smallest, largest = (costs.of(route.choices) for route in (model.space.smallest, model.space.largest))
    return (cost * largest - smallest) / (largest - costs.prefix)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--budget", type=float, default=0.3, help="share of the largest route's cost")
    parser.add_argument("--route", type=int, help="single route (default: the cheapest that is as accurate)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--precision")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    device = pick_device(args.device)
    point = measured(args.budget, args.route)
    share = cascade_share(point["cost"])
    model = create_model(NETWORK, generator=torch.Generator().manual_seed(0)).to(device).eval()
    last = model.space.largest.number
    mix = Mix(
        shares={0: 0.5, point["route"]: 0.5},
        cascade=Cascade((0, last), (1.0, share)),
        source=f"{share:.1%} of a cascade's images go on",
    )
    result = bench(
        model,
        batches=args.batch,
        mix=mix,
        backend=args.backend,
        precision=args.precision,
        repeats=args.repeats,
        progress=progress,
    )
    rows = []
    for one in result.results:
        routed, single = one.times["cascade"], one.times[f"alone {point['route']}"]
        rows.append(
            {
                "batch": one.batch,
                "cascade": asdict(routed),
                "single": asdict(single),
                "largest": asdict(one.times["full"]),
                "gain": single.median / routed.median,
            }
        )
    header = ["batch", "cascade, ms", f"route {point['route']}, ms", "largest, ms", "cascade is faster by"]
    body = [
        [
            str(row["batch"]),
            *(f"{row[key]['median']:.2f}" for key in ("cascade", "single", "largest")),
            f"{row['gain']:.2f} ×",
        ]
        for row in rows
    ]
    print(
        f"CIFAR-10, {point['seeds']} seeds: cascade {point['cascade']} % at {point['cost']:.2f} of the "
        f"largest route's MAdds, route {point['route']} {point['route_accuracy']} % at "
        f"{point['route_cost']:.2f}, largest {point['largest_accuracy']} %; {share:.1%} of the images go on\n"
    )
    print(table(header, body))
    if args.json:
        about = {"benchmark": "equal-accuracy", **environment(device), "network": NETWORK}
        settings = {"backend": result.backend, "precision": result.precision, "share": share}
        write_json(args.json, {**about, **settings, "measured": point, "results": rows})


if __name__ == "__main__":
    main()
