"""``dsnet demo``: a gated batch on random weights, and a report to look at."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsnet.cli.options import positive
from dsnet.cost import madds
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.registry import model_entry
from dsnet.report.page import bar_chart, escape, image_tag, page
from dsnet.report.text import bar, human

__all__ = ["add_command"]

MODEL = "ds_mbnet_cifar"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="run a gated batch on random weights and write a report",
        description="Describes the models, then sends one batch of made-up images through an untrained\n"
        f"{MODEL} whose gate is drawn at random: every image runs at its own route, truly\n"
        "sliced. Shows the routes taken and what they cost, and writes one HTML file.\n"
        "Random gates show the mechanism, not accuracy.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("dsnet-demo"), help="folder (default: dsnet-demo)")
    parser.add_argument("--images", type=positive, default=48, help="how many images (default: 48)")
    parser.add_argument("--seed", type=positive, default=1, help="for weights and images (default: 1)")
    parser.set_defaults(run_command=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedBatch:
    """What the demo shows."""

    images: Tensor
    routes: tuple[int, ...]
    costs: tuple[int, ...]  # MAdds of every route of the space
    disagreement: float  # largest difference between the batch and its images run alone
    seconds: float

    @property
    def mean_cost(self) -> float:
        """Mean MAdds of an image."""
        return sum(self.costs[r] for r in self.routes) / len(self.routes)


def run(args: argparse.Namespace) -> int:
    """Runs the demo."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a small batch: more threads only wait for each other where cores are shared
    print("The supernets, from their cheapest to their dearest route:\n")
    ends = {name: _ends(name) for name in list_models("supernet")}
    for name, (smallest, largest) in ends.items():
        print(f"  {name:21}{human(smallest):>7} – {human(largest):>6}  {model_entry(name).summary}")

    batch = _gated_batch(args.images, torch.Generator().manual_seed(args.seed))
    taken = Counter(batch.routes)
    print(f"\n{args.images} images through {MODEL}, each at the route that its (random) gate picks:\n")
    for route, cost in enumerate(batch.costs):
        bars = f"{bar(taken[route], max(taken.values()))} {taken[route]}" if taken[route] else "·"
        print(f"  route {route:2}  {human(cost):>6}  {bars}")
    share = batch.mean_cost / batch.costs[-1]
    print(f"\nMean cost {human(batch.mean_cost)} multiply-adds an image, {share:.0%} of the largest route.")
    print(f"The batch agrees with its images run one by one to {batch.disagreement:.0e}.")
    print(f"The gated pass took {batch.seconds:.2f} s.")

    report = args.out / "report.html"
    report.write_text(_report(batch, ends), encoding="utf-8")
    print(f"\nReport: {report}")
    return 0


def _ends(name: str) -> tuple[int, int]:
    model = create_model(name, device="meta")
    return madds(model, model.space.smallest), madds(model, model.space.largest)


@torch.no_grad()
def _gated_batch(count: int, generator: torch.Generator) -> GatedBatch:
    model = create_model(MODEL, generator=generator)
    images = made_up_images(count, model.geometry.image_size, generator)
    _draw_gate(model, images, generator)
    start = time.perf_counter()
    logits = model(images)
    seconds = time.perf_counter() - start
    routes = model.route(images)[:, 0].tolist()
    alone = torch.cat([model(image[None], route) for image, route in zip(images, routes, strict=True)])
    return GatedBatch(
        images=images,
        routes=tuple(routes),
        costs=tuple(madds(model, route) for route in model.space),
        disagreement=((logits - alone).abs().max() / alone.abs().max()).item(),
        seconds=seconds,
    )


def _draw_gate(model: Supernet, images: Tensor, generator: torch.Generator) -> None:
    """Gives the gate random scores that favour no route over these images as a whole."""
    head = model.gate(0).routing
    assert head is not None
    assert head.last.bias is not None
    torch.nn.init.normal_(head.last.weight, generator=generator)
    scores = model.score(model.enter(images))
    head.last.bias.copy_(-scores.mean(0))


def made_up_images(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Gratings of random colour, direction and fineness under random amounts of noise."""
    axis = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    angle, fineness, noise = (torch.rand(count, 1, 1, generator=generator) for _ in range(3))
    wave = torch.sin(12 * fineness * (x * torch.cos(3.1416 * angle) + y * torch.sin(3.1416 * angle)))
    colour = torch.rand(count, 3, 1, 1, generator=generator)
    grain = torch.randn(count, 3, size, size, generator=generator)
    return (0.5 + 0.5 * wave[:, None] * colour + 0.3 * noise[:, None] * grain).clamp(0, 1)


def _report(batch: GatedBatch, ends: dict[str, tuple[int, int]]) -> str:
    taken, largest = Counter(batch.routes), batch.costs[-1]
    order = sorted(range(len(batch.routes)), key=lambda i: batch.routes[i])
    pictures = "".join(
        f"<figure>{image_tag(batch.images[i], f'image {i}')}<figcaption>route {batch.routes[i]}<br>"
        f"{human(batch.costs[batch.routes[i]])}</figcaption></figure>"
        for i in order
    )
    histogram = bar_chart(
        [f"route {r}" for r in range(len(batch.costs))],
        [taken[r] for r in range(len(batch.costs))],
        [f"{taken[r]} × {human(c)}" for r, c in enumerate(batch.costs)],
    )
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{human(a)}</td><td>{human(b)}</td><td>{b / a:.1f} ×</td></tr>"
        for name, (a, b) in ends.items()
    )
    return page(
        "One set of weights, a route for every image",
        f"<p>An untrained <strong>{MODEL}</strong> with a gate drawn at random took {len(batch.routes)} "
        "made-up images in one batch. Every image ran at its own route: mean cost "
        f"<strong>{human(batch.mean_cost)}</strong> multiply-adds, {batch.mean_cost / largest:.0%} of the "
        f"largest route's {human(largest)}. The batch agrees with its images run one by one to "
        f"{batch.disagreement:.0e}. A random gate shows the mechanism, not accuracy.</p>"
        f"<h2>Routes taken</h2>{histogram}"
        f'<h2>The images, by route</h2><div class="grid">{pictures}</div>'
        "<h2>The supernets</h2><p>Multiply-adds of the cheapest and the dearest route, at the network's own "
        'image size.</p><div class="wide"><table>'
        "<tr><th>model</th><th>cheapest</th><th>dearest</th><th>ratio</th></tr>"
        f"{rows}</table></div>",
    )
