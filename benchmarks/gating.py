"""Time a step of Stage II beside the passes that it needs.

    python -m benchmarks.gating [--models ds_mbnet_cifar …] [--batch 128] [--repeats 15] [--json FILE]

A gate with n choices needs every image at each of them. `passes` is the forward time of this: the prefix
and n last segments with one gate; the prefix and, stage by stage, n candidates with several. With one gate,
passes and step are CUDA graphs on a GPU. Several gates need more (`needed`): the smallest and the largest
route behind the first stage, which say how hard an image is, and the backward pass from the logits to the
first gate through one candidate of every stage. The backward pass is timed at a route in the middle, as
forward and backward less forward. Times are milliseconds, medians of interleaved rounds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsnet
from benchmarks.script import make_parser, report
from benchmarks.slicing import captured
from benchmarks.timing import environment, interleaved
from dsnet.data.transforms.augment import Augment
from dsnet.models import GateState
from dsnet.routing import CostTable
from dsnet.training import GateConfig
from dsnet.training.config import MixConfig
from dsnet.training.stage1.views import Views
from dsnet.training.stage2.task import GateObjective


@torch.no_grad()
def passes(model: dsnet.Supernet, x: Tensor) -> None:
    """Run what a step needs forward, and nothing else: every stage's choices behind one routing history."""
    state = model.run_prefix(x)
    history: tuple[int, ...] = ()
    for gate in range(len(model.gates)):
        for choice in model.gate(gate).choices:
            if gate + 1 < len(model.gates):
                following = model.run_segment(state, (*history, choice))
            else:
                model.run_last_segment(state, (*history, choice))
        history = (*history, model.gate(gate).choices[-1])
        if gate + 1 < len(model.gates):
            state = following


def further(model: dsnet.Supernet, x: Tensor) -> dict[str, Callable[[], object]]:
    """Return the calls that several gates need besides these passes; none for one gate."""
    if len(model.gates) == 1:
        return {}
    ends = model.space.smallest, model.space.largest
    middle = model.space.of_choices([row[len(row) // 2] for row in model.space.choices])
    with torch.no_grad():
        first = {r: model.run_segment(model.run_prefix(x), r.choices[:1]) for r in (*ends, middle)}

    def finish(route: dsnet.Route, start: GateState) -> Tensor:
        return model.run_from_states({route.choices[:1]: start}, route.choices)

    def there() -> None:
        with torch.no_grad():
            finish(middle, first[middle])

    def there_and_back() -> None:
        features = first[middle].x.detach().requires_grad_()
        finish(middle, first[middle]._replace(x=features)).sum().backward()

    @torch.no_grad()
    def judge() -> None:
        for route in ends:
            finish(route, first[route])

    return {"ends": judge, "there": there, "there and back": there_and_back}


def measure(name: str, batch: int, repeats: int, device: torch.device) -> dict[str, Any]:
    model = dsnet.create_model(name, generator=torch.Generator().manual_seed(0)).to(device)
    space = model.space.narrow("S") if dict(model.space.narrowings).get("S") else model.space
    model.reset_routing(space, generator=torch.Generator(device).manual_seed(0))
    model.to(device)
    size = model.input_spec.image_size
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1, batch, 3, size, size), dtype=torch.uint8, generator=draw).to(device)
    labels = torch.randint(0, 10, (batch,), generator=draw).to(device)
    channels = ((0.5,) * 3, (0.25,) * 3)
    views = Views(Augment(), MixConfig(), channels, seed=0, rank=0, device=device)
    task = GateObjective(GateConfig(), model, views, costs=CostTable.of_model(model))
    (x,), _ = views(images, labels, count=1, step=0, classes=10)
    steps = itertools.count()
    forward = functools.partial(passes, model, x)
    graphs = device.type == "cuda" and len(model.gates) == 1
    calls: dict[str, Callable[[], object]] = {
        "passes": captured(forward) if graphs else forward,
        "step": lambda: task.step(images, labels, next(steps)),
    }
    calls |= further(model, x)
    times = {n: t.median for n, t in interleaved(calls, repeats=repeats, device=device).items()}
    needed = times["passes"]
    if len(model.gates) > 1:
        needed += times["ends"] + times["there and back"] - times["there"]
    choices = [len(options) for options in task.options]
    return {
        "model": name,
        "choices": choices,
        "batch": batch,
        "graphs": graphs,
        **{call: round(ms, 3) for call, ms in times.items()},
        "needed": round(needed, 3),
        "ratio": round(times["step"] / needed, 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--models", nargs="*", default=["ds_mbnet_cifar", "ds_vit_plus_cifar", "ds_resnet_cifar"]
    )
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    results = []
    for name in args.models:
        results.append(measure(name, args.batch, args.repeats, device))
        print(results[-1], flush=True)
    report({"benchmark": "gating", **environment(device), "results": results}, args.json)


if __name__ == "__main__":
    main()
