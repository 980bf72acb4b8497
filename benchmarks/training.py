"""Time a sandwich step of in-place bootstrapping beside its parts.

    python -m benchmarks.training [--device cpu] [--model NAME --batch N --precision bfloat16] [--json FILE]

The parts are timed in the same interleaved run as the step: its four networks as stand-alone networks,
forward and backward; the largest one forward, as the teacher; the optimizer with the moving average. On a
CUDA device steps and parts run eagerly and as CUDA graphs.

`images` is the time of preparing the batch: indexing a dataset on the device, crop, flip, normalisation.
`busy` is the share of the step in which the device computes; the results list the longest kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsnet
from benchmarks.script import make_parser, report
from benchmarks.slicing import captured
from benchmarks.timing import environment, interleaved
from dsnet.data.transforms.augment import Augment, normalise
from dsnet.training import Average, Scheme, Stage1
from dsnet.training.optim import make_optimizer, parameter_groups
from dsnet.training.stage1._graphed_step import GraphedStep
from dsnet.training.stage1.step import Passes

Calls = dict[str, Callable[[], object]]


class Case(NamedTuple):
    model: str
    batch: int
    precision: str


GPU = (
    Case("ds_mbnet", 256, "float32"),
    Case("ds_mbnet", 256, "bfloat16"),
    Case("ds_mbnet_cifar", 1024, "bfloat16"),
)
CPU = (Case("ds_mbnet_tiny", 64, "float32"),)


class Bench:
    """A network with a batch, and the parts of a training step of it."""

    def __init__(self, case: Case, device: torch.device, *, graphs: bool) -> None:
        self.graphs, self.device = graphs, device
        self.autocast = torch.bfloat16 if case.precision == "bfloat16" else None
        self.model = dsnet.create_model(
            case.model, device=device, generator=torch.Generator(device).manual_seed(0)
        )
        self.model.train().to(memory_format=torch.channels_last)
        size, classes = self.model.input_spec.image_size, self.model.head.classifier.out_features
        self.bytes = torch.randint(0, 256, (4 * case.batch, 3, size, size), device=device, dtype=torch.uint8)
        self.labels = torch.randint(classes, (case.batch,), device=device)
        self.generator = torch.Generator(device).manual_seed(0)
        self.x = self.images()
        self.average = Average(self.model)
        self.stage = Stage1(scheme=Scheme.parse("ib"), average=self.average, autocast=self.autocast)
        self.passes = (GraphedStep if graphs else Passes)(self.stage, self.model)
        self.optimizer = make_optimizer("sgd", parameter_groups([self.model], 1e-4), lr=1e-3)
        space = self.model.space
        middle = [space[round(share * (len(space) - 1))] for share in (1 / 3, 2 / 3)]
        self.routes = (space.largest, *middle, space.smallest)

    def images(self) -> Tensor:
        """Prepare a batch from bytes on the device."""
        at = torch.randint(len(self.bytes), (len(self.labels),), device=self.device, generator=self.generator)
        views = Augment(padding=4, flip=True)(self.bytes[at], self.generator)
        seen = normalise(views, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
        return seen.contiguous(memory_format=torch.channels_last)

    def update(self) -> None:
        """Update weights and moving average, and reset the gradients."""
        self.optimizer.step()
        self.average.update(self.model)
        self.optimizer.zero_grad(set_to_none=False)

    def step(self) -> None:
        """Make a training step on the batch."""
        self.passes.step(self.routes, [self.x], self.labels)
        self.update()

    def parts(self) -> Calls:
        """Return the calls of the parts of a step."""
        calls: Calls = {f"network {i}": self._network(route) for i, route in enumerate(self.routes)}
        teacher = self._plain(self.routes[0]).eval()

        def teach() -> None:
            with torch.no_grad(), self.stage.precision(self.x):
                teacher(self.x)

        calls["teacher"] = teach
        if self.graphs:
            calls = {name: captured(call) for name, call in calls.items()}
        return calls

    def _network(self, route: dsnet.Route) -> Callable[[], object]:
        net = self._plain(route).train()

        def run() -> None:
            with self.stage.precision(self.x):
                logits = net(self.x)
            F.cross_entropy(logits.float(), self.labels).backward()

        return run

    def _plain(self, route: dsnet.Route) -> nn.Sequential:
        return dsnet.extract(self.model, route, fold_bn=False).to(memory_format=torch.channels_last)


def measure(case: Case, device: torch.device, *, graphs: bool, repeats: int) -> dict[str, Any]:
    """Time a step and its parts."""
    bench = Bench(case, device, graphs=graphs)
    calls: Calls = {"step": bench.step, **bench.parts(), "update": bench.update, "images": bench.images}
    times = interleaved(calls, repeats=repeats, device=device)
    parts = sum(t.median for name, t in times.items() if name not in ("step", "images"))
    step = times["step"].median
    result = {
        **case._asdict(),
        "graphs": graphs,
        "step": round(step, 3),
        "quartiles": [round(times["step"].low, 3), round(times["step"].high, 3)],
        "parts": {name: round(t.median, 3) for name, t in times.items() if name != "step"},
        "sum": round(parts, 3),
        "ratio": round(step / parts, 4),
        "images_per_second": round(1e3 * case.batch / step),
        "images_share": round(times["images"].median / step, 4),
    }
    print(f"  {step:.2f} ms, parts {parts:.2f} ms, {result['images_per_second']:,} images/s", flush=True)
    return result


def profile(case: Case, device: torch.device) -> tuple[float, list[list[Any]]]:
    """Return milliseconds of computing a step, and the kernels: (name, milliseconds, calls)."""
    from torch.profiler import ProfilerActivity

    step = Bench(case, device, graphs=False).step
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(3):
            step()
        torch.cuda.synchronize(device)
    kernels = [(e.key, e.self_device_time_total / 3e3, e.count / 3) for e in seen.key_averages()]
    kernels = sorted((k for k in kernels if k[1] > 0), key=lambda kernel: -kernel[1])
    top = [[name[:110], round(ms, 3), round(count, 1)] for name, ms, count in kernels[:16]]
    return sum(ms for _, ms, _ in kernels), top


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="default: the cases of the table")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    cases = GPU if device.type == "cuda" else CPU
    if args.model:
        cases = (Case(args.model, args.batch, args.precision),)
    results = []
    for case in cases:
        for graphs in (True, False) if device.type == "cuda" else (False,):
            print(f"{' '.join(map(str, case))}, {'graphs' if graphs else 'eager'} …", flush=True)
            results.append(measure(case, device, graphs=graphs, repeats=args.repeats))
    if device.type == "cuda":  # last: a capture after a profile crashes the process
        for case in cases:
            busy, kernels = profile(case, device)
            for row in results:
                if (row["model"], row["batch"], row["precision"]) == case:
                    row.update(busy=round(busy / row["step"], 3), kernels=kernels)
    about = {"benchmark": "training", **environment(device), "repeats": args.repeats}
    report({**about, "results": results}, args.json)


if __name__ == "__main__":
    main()
