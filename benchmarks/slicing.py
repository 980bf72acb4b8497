"""Time slicing beside stand-alone small networks, masking and indexing (the paper's Table 2).

    python -m benchmarks.slicing [--device cpu] [--batch 1 16] [--graphs] [--json FILE]

In eager mode a GPU waits for the host at small batches, whatever the method. `--graphs` captures every method
in a CUDA graph first, so that the times are those of the kernels.

Columns, in milliseconds, interleaved in one run:
full      the supernet at its largest route
masking   the supernet at full width, with the channels outside the route set to zero
indexing  the route's filters, gathered by channel index at every call
slicing   the supernet at its smallest route, with shared weights sliced at every call
ideal     a stand-alone network of that route, layer for layer the same
packed    the same with batch norms folded, as `dsnet.extract` returns it
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dsnet
from benchmarks.script import make_parser, report
from benchmarks.tables import METHODS
from benchmarks.timing import environment, interleaved
from dsnet.benchmark._baselines import indexing, masking
from dsnet.core.cuda_graphs.capture import capture

CASES = {
    "ResNet-50 at 0.25": "ds_resnet",
    "DS-MBNet smallest": "ds_mbnet",
    "DS-ViT++ smallest": "ds_vit_plus",
}


def methods(model: dsnet.Supernet, x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the methods by name, after checking that they compute the same."""
    route = model.space.smallest
    size = x.shape[-1]
    masked, indexed = masking(model, [route]), indexing(model)
    everyone = torch.zeros(len(x), dtype=torch.long, device=x.device)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "full": lambda images: model(images, model.space.largest),
        "masking": lambda images: masked(images, everyone),
        "indexing": lambda images: indexed(images, route),
        "slicing": lambda images: model(images, route),
        "ideal": dsnet.extract(model, route, fold_bn=False, image_size=size),
        "packed": dsnet.extract(model, route, image_size=size),
    }
    for name in ("ideal", "packed"):
        calls[name].to(memory_format=torch.channels_last)
    reference = calls["ideal"](x).float()
    for name in ("indexing", "slicing", "packed"):
        error = (calls[name](x).float() - reference).norm() / reference.norm()
        assert error < 0.03, f"{name} does not compute the same: relative error {error:.1e}"
    return calls


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Capture a call as a CUDA graph, and return what replays it."""
    graph = capture(call, torch.cuda.Stream(), warm_up=2)
    return lambda: (graph.replay(), call)  # `call` keeps the tensors that the graph reads


def measure(
    model: dsnet.Supernet, batch: int, device: torch.device, dtype: torch.dtype, repeats: int, graphs: bool
) -> dict[str, Any]:
    size = model.input_spec.image_size
    x = torch.randn(batch, 3, size, size, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    calls = {name: functools.partial(method, x) for name, method in methods(model, x).items()}
    if graphs:
        calls = {name: captured(call) for name, call in calls.items()}
    times = interleaved({name: calls[name] for name in METHODS}, repeats=repeats, device=device)
    return {
        name: {"ms": round(t.median, 4), "quartiles": [round(t.low, 4), round(t.high, 4)]}
        for name, t in times.items()
    }


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", help="default: 1 16 on a CPU, 1 64 256 on a GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--graphs", action="store_true", help="time CUDA graphs instead of eager calls")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if args.graphs and device.type != "cuda":
        parser.error("--graphs needs a CUDA device")
    batches = args.batch or ([1, 16] if device.type == "cpu" else [1, 64, 256])
    results = []
    for network, name in CASES.items():
        model = dsnet.create_model(
            name, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0)
        )
        model.to(memory_format=torch.channels_last)
        for batch in batches:
            print(f"{network}, batch {batch} …", flush=True)
            times = measure(model, batch, device, dtype, args.repeats, args.graphs)
            results.append({"network": network, "model": name, "batch": batch, "times": times})
    about = {**environment(device), "dtype": args.dtype, "repeats": args.repeats, "graphs": args.graphs}
    report({"benchmark": "slicing", **about, "results": results}, args.json)


if __name__ == "__main__":
    main()
