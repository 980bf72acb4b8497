"""A benchmark result that nobody measured."""

from __future__ import annotations

from dsnet.benchmark.api import BatchResult, BenchResult, Spread
from dsnet.benchmark.conditions import Conditions
from dsnet.benchmark.workloads import Cascade, Mix

MIXED = Mix(shares={0: 0.5, 1: 0.25, 3: 0.25}, cascade=Cascade((0, 1, 3), (1.0, 0.5, 0.25)), source="a test")


def made_up() -> BenchResult:
    def times(full: float) -> dict[str, Spread]:
        share = {
            "full": 1.0,
            "largest": 3.0,
            "masking": 2.0,
            "indexing": 1.5,
            "slicing": 1.2,
            "gated": 0.5,
            "stream": 0.45,
            "cascade": 0.8,
        }
        found = {way: Spread(full * s, 0.9 * full * s, 1.1 * full * s) for way, s in share.items()}
        return {**found, "twin": Spread(0.9 * full, 0.8 * full, full)}

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
        twin="mobilenet_v1",
        twin_backend="onnxruntime",
        resident=1000,
        programs=30,
        repeats=20,
        results=tuple(
            BatchResult(batch=batch, times=times(10.0 * batch), ideal=4.0 * batch, ideal_cascade=6.0 * batch)
            for batch in (1, 16)
        ),
    )
