"""The formats of all JSON files of this package, which `dsnet.core.schema` checks.

Settings (recipes, and those inside checkpoints) are declared by their dataclasses instead, and checked by
`dsnet.core.settings.from_plain`.
"""

from __future__ import annotations

from dsnet.core.schema import (
    ANY,
    FLAG,
    Kind,
    if_object,
    items,
    maybe,
    number,
    one_of,
    record,
    row,
    table,
    text,
    whole,
)

__all__ = [
    "BACKENDS",
    "CHECKPOINT",
    "DETECTION_RESULTS",
    "DETECTOR",
    "GATE_REPORTS",
    "GROUP",
    "LATENCY",
    "METRICS",
    "MIX",
    "RECIPE",
    "RESULTS",
    "ROUTING",
    "SHIPPED",
]

GROUP = r"[A-Za-z][\w-]*"
LARGE = 2**16  # of sizes and counts that tensors are made from

_DIGITS = text(20, r"[0-9]+", "a whole number as text,")
_SIZE = whole(1, LARGE)
_INDEX = whole(0, LARGE)
_SHARE = number(0, 1)
_COST = number(0)
_COUNTS = table(whole(), _DIGITS)
_SIDE = whole(1, 2**14)


def _normalisation(minimum: int, maximum: int) -> dict[str, Kind]:
    return {
        "mean": items(number(-1e6, 1e6), minimum, maximum),
        "std": items(number(1e-6, 1e6), minimum, maximum),
    }


# --- checkpoint.json ---------------------------------------------------------------------------------
_OPTIONAL_SIZES = ("kernel?", "padding?", "hidden?", "heads?", "head_dim?")
_SLICE = record(
    {
        "width": _SIZE,
        "depth?": _SIZE,
        **dict.fromkeys(_OPTIONAL_SIZES, maybe(_INDEX)),
        "groups?": items(_SIZE, 1, LARGE),
    }
)
_ROUTE = record(
    {
        "space": text(),
        "number": _INDEX,
        "choices": items(_INDEX, 1, 64),
        "stages": items(_SLICE, 1, 256),
        "image_size?": maybe(_SIDE),
    }
)
_NUMBERS = items(_INDEX, 1, LARGE)
_SPACE = record({"name": text(), "routes": items(_ROUTE, 1, LARGE), "narrowings": table(_NUMBERS)})
_HEAD = record({"kind?": one_of("onehot", "scalar"), "separate?": FLAG, "width?": maybe(_SIZE)})
_NETWORK = record(
    {
        "name": text(200),
        "options": table(ANY, text(100, r"[A-Za-z_]\w*", "a name")),
        "space": _SPACE,
        "gates": items(_NUMBERS, 1, 64),
        "heads?": items(maybe(_HEAD), 0, 64),
    },
    more=True,
)
_INPUT = record({**_normalisation(1, 64), "size?": maybe(_SIDE), "crop_ratio?": number(1e-3, 1)}, more=True)
_DATA = record({"name?": maybe(text()), "root?": maybe(text()), "size?": maybe(_SIDE)}, more=True)
_RECIPE = record({"data?": if_object(_DATA), "scheme?": record(more=True)}, more=True)
CHECKPOINT = record(
    {
        "format": whole(1),
        "step": whole(),
        "groups": items(text(100, GROUP, "letters, digits, _ and -"), 1, 64),
        "network": _NETWORK,
        "recipe?": if_object(_RECIPE),
        "input?": maybe(_INPUT),
        "classes?": items(text()),
        "route?": maybe(_INDEX),
        "best?": maybe(record({"score": number(), "step": whole()})),
        "steps?": whole(),
        "gate?": if_object(record({"images?": text(), "seed?": whole()}, more=True)),
    },
    more=True,
)

# --- card.json of weights that come with the package -------------------------------------------------
SHIPPED = record(
    {
        **dict.fromkeys(("summary", "data", "tested_on", "license", "recipe", "made"), text()),
        "accuracy": items(_SHARE, 1, LARGE),
        "sha256": text(64, r"[0-9a-f]{64}", "64 hexadecimal digits"),
        "checkpoint": CHECKPOINT,
    }
)

# --- parts of a checkpoint that are read on their own ------------------------------------------------
DETECTOR = record(
    {
        "classes": items(text(), 1, LARGE),
        "table": record(more=True),
        "input": record({"size": _SIDE, **_normalisation(3, 3)}),
    },
    more=True,
)
_COSTS = record(
    {
        "unit": one_of("madds", "ms"),
        "prefix": _COST,
        "segments": items(items(items(_COST, 1), 1), 1, 64),
        "network?": text(),
        "members?": items(_INDEX),
        "prefixes?": items(_COST),
    }
)
_POINT = row(  # cost, accuracy, parameters, routes, images by route
    _COST, _SHARE, items(number(infinite=True)), items(_INDEX), items(row(_INDEX, whole()))
)
_ROUTER = record({"kind": text(), "costs": _COSTS, "curve": items(_POINT, 1)}, more=True)
ROUTING = record(
    {
        "format": whole(1),
        "images": whole(1),
        "digest": text(),
        "routers": table(_ROUTER, minimum=1),
        "singles": table(_SHARE, _DIGITS),
        "verdict?": maybe(record({"text": text(4000)}, more=True)),
    },
    more=True,
)
GATE_REPORTS = items(
    record(
        {
            "gate": _INDEX,
            "taken": table(whole(), _DIGITS, minimum=1),
            "entropy": number(0),
            "information": number(0),
            "static?": FLAG,
        }
    )
)

# --- files of their own ------------------------------------------------------------------------------
RECIPE = record(more=True)
_TIME = record({"p50": number(0), "p95": number(0)})
_BATCH = record(
    {
        "batch": whole(1, 2**31),
        "prefix": _TIME,
        "segments": items(items(items(_TIME, 1), 1), 1, 64),
        "prefixes?": items(_TIME),
    }
)
_LATENCY_TEXTS = ("device", "backend", "backend_version", "dtype", "torch_version", "date")
LATENCY = record(
    {
        "format": whole(1),
        "model": record({"name": text(200), "options": table(ANY)}),
        "image_size": items(_SIDE, 2, 2),
        "kind": one_of("cpu", "cuda"),
        "memory": one_of("shared", "packed"),
        **dict.fromkeys(_LATENCY_TEXTS, text(1000)),
        "threads": _SIZE,
        "entries": items(_BATCH, 1, 1000),
        "members?": items(_INDEX),
    }
)
MIX = table(number(0), _DIGITS, minimum=1)
BACKENDS = table(if_object(table(number(0))))

_RIGHT = {"correct": whole(), "images": whole(1), "accuracy?": _SHARE}
_ROUTE_RESULT = record(
    {
        "route": _INDEX,
        "madds": whole(1),
        "params": whole(),
        "statistics": one_of("fresh", "running", "calibrated"),
        "image_size?": maybe(_SIDE),
        **_RIGHT,
    }
)
_IMAGES = record(
    {
        "classes": items(text(), 1),
        "counts": items(whole(), 1),
        "held_out": whole(),
        "test": whole(),
        "size": _SIDE,
        "damaged?": whole(),
    }
)
_CLASSES = record(
    {
        "route": _INDEX,
        "images": items(whole(), 1),
        "correct": items(whole(), 1),
        "confused": items(items(whole(), 3, 3)),
    }
)
RESULTS = record(
    {
        "steps": whole(1),
        "held_out": items(row(maybe(_ROUTE_RESULT), _ROUTE_RESULT)),
        "test": items(_ROUTE_RESULT, 1),
        "images": _IMAGES,
        "gated?": maybe(record({"madds": number(0), "taken": _COUNTS, **_RIGHT})),
        "classes?": maybe(_CLASSES),
    },
    more=True,
)
_DETECTION_RESULT = record(
    {
        "route": maybe(_INDEX),
        "madds": number(0),
        "map": record(dict.fromkeys(("voc2007", "voc2010", "coco"), _SHARE), more=True),
        "classes": table(maybe(_SHARE)),
        "images": whole(1),
        "taken": _COUNTS,
    }
)
DETECTION_RESULTS = record({"classes": items(text(), 1), "results": items(_DETECTION_RESULT, 1)}, more=True)
METRICS = record({"kind": text(100), "step": whole()}, more=True)
