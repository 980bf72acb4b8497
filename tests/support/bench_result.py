"""A benchmark result with made-up times."""

from __future__ import annotations

from dsnet.benchmark._conditions import Conditions
from dsnet.benchmark.results import Baseline, BatchResult, BenchResult, Spread
from dsnet.benchmark.workloads import Cascade, Mix

MIXED = Mix(shares={0: 0.5, 1: 0.25, 3: 0.25}, cascade=Cascade((0, 1, 3), (1.0, 0.5, 0.25)), source="a test")
TIMES = {  # of "full"
    "full": 1.0,
    "largest": 3.0,
    "masking": 2.0,
    "indexing": 1.5,
    "slicing": 1.2,
    "gated": 0.5,
    "stream": 0.45,
    "cascade": 0.8,
    "twin": 0.9,
}


def bench_result() -> BenchResult:
    """Return a result at batch sizes 1 and 16, whose quartiles are 10 % from the medians."""
    return BenchResult(
        network="ds_mbnet",
        device="A <fast> one",
        backend="openvino",
        memory="packed",
        precision="float32",
        conditions=Conditions(2, 4, 2450.0, None, (1.5, 1.0, 0.5)),
        torch="2.13",
        image_size=(224, 224),
        mix=MIXED,
        theory=4.0,
        resident=1000,
        programs=30,
        repeats=20,
        results=tuple(
            BatchResult(
                batch=batch,
                rounds=20,
                times={
                    name: Spread(*(10.0 * batch * share * factor for factor in (1.0, 0.9, 1.1)))
                    for name, share in TIMES.items()
                },
                ideal=4.0 * batch,
                ideal_cascade=6.0 * batch,
            )
            for batch in (1, 16)
        ),
        madds={route: 1000 * (1 + route) for route in range(20)},
        largest=3,
        gate_largest=3,
        baselines=(Baseline("twin", "mobilenet_v1", "onnxruntime", 100_000),),
        missing=(),
    )
