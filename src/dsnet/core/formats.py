"""What every JSON file of this package holds, as `dsnet.core.schema` checks it.

Settings (recipes, and those inside checkpoints) are declared by their dataclasses instead, and checked by
`dsnet.core.settings.from_plain`.
"""

from __future__ import annotations

from dsnet.core.schema import (
    Fields,
    Flag,
    IfObject,
    Items,
    Maybe,
    Number,
    OneOf,
    Plain,
    Row,
    Table,
    Text,
    Whole,
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
]

GROUP = r"[A-Za-z][\w-]*"
LARGE = 2**16  # of sizes and counts that tensors are made from

_NUMBERS = Text(20, r"[0-9]+", "a whole number as text,")
_SHARE = Number(0, 1)
_COUNTS = Table(Whole(), key=_NUMBERS)
_SIDE = Whole(1, 2**14)

# --- checkpoint.json ---------------------------------------------------------------------------------
_SIZE = Maybe(Whole(0, LARGE))
_SLICE = Fields(
    {"width": Whole(1, LARGE)},
    {"depth": Whole(1, LARGE), **dict.fromkeys(("kernel", "padding", "hidden", "heads", "head_dim"), _SIZE)},
)
_ROUTE = Fields(
    {
        "space": Text(),
        "number": Whole(0, LARGE),
        "choices": Items(Whole(0, LARGE), 1, 64),
        "stages": Items(_SLICE, 1, 256),
    }
)
_SPACE = Fields(
    {
        "name": Text(),
        "routes": Items(_ROUTE, 1, LARGE),
        "narrowings": Table(Items(Whole(0, LARGE), 1, LARGE)),
    }
)
_HEAD = Fields(
    optional={"kind": OneOf("onehot", "scalar"), "separate": Flag(), "width": Maybe(Whole(1, LARGE))}
)
_NETWORK = Fields(
    {
        "name": Text(200),
        "options": Table(Plain(), key=Text(100, r"[A-Za-z_]\w*", "a name")),
        "space": _SPACE,
        "gates": Items(Items(Whole(0, LARGE), 1, LARGE), 1, 64),
    },
    {"heads": Items(Maybe(_HEAD), 0, 64)},
    more=True,
)
_INPUT = Fields(
    {"mean": Items(Number(-1e6, 1e6), 1, 64), "std": Items(Number(1e-6, 1e6), 1, 64)},
    {"size": Maybe(_SIDE), "crop_ratio": Number(1e-3, 1)},
    more=True,
)
_RECIPE = Fields(
    optional={
        "data": IfObject(
            Fields(
                optional={"name": Maybe(Text()), "root": Maybe(Text()), "size": Maybe(_SIDE)},
                more=True,
            )
        ),
        "scheme": Fields(more=True),
    },
    more=True,
)
CHECKPOINT = Fields(
    {
        "format": Whole(1),
        "step": Whole(0),
        "groups": Items(Text(100, GROUP, "letters, digits, _ and -"), 1, 64),
        "network": _NETWORK,
    },
    {
        "recipe": IfObject(_RECIPE),
        "input": Maybe(_INPUT),
        "classes": Items(Text(), 0),
        "route": Maybe(Whole(0, LARGE)),
        "best": Maybe(Fields({"score": Number(), "step": Whole(0)})),
        "steps": Whole(0),
        "gate": IfObject(Fields(optional={"images": Text(), "seed": Whole()}, more=True)),
    },
    more=True,
)

# --- parts of a checkpoint that are read on their own ------------------------------------------------
DETECTOR = Fields(
    {
        "classes": Items(Text(), 1, LARGE),
        "table": Fields(more=True),
        "input": Fields(
            {
                "size": _SIDE,
                "mean": Items(Number(-1e6, 1e6), 3, 3),
                "std": Items(Number(1e-6, 1e6), 3, 3),
            }
        ),
    },
    more=True,
)
_COST = Number(0)
_COSTS = Fields(
    {
        "unit": OneOf("madds", "ms"),
        "prefix": _COST,
        "segments": Items(Items(Items(_COST, 1), 1), 1, 64),
    },
    {"network": Text()},
)
_POINT = Row(  # cost, accuracy, numbers, routes, taken
    Number(0),
    _SHARE,
    Items(Number(infinite=True)),
    Items(Whole(0, LARGE)),
    Items(Row(Whole(0, LARGE), Whole())),
)
ROUTING = Fields(
    {
        "format": Whole(1),
        "images": Whole(1),
        "digest": Text(),
        "routers": Table(
            Fields({"kind": Text(), "costs": _COSTS, "curve": Items(_POINT, 1)}, more=True), least=1
        ),
        "singles": Table(_SHARE, key=_NUMBERS),
    },
    {"verdict": Maybe(Fields({"text": Text(4000)}, more=True))},
    more=True,
)
GATE_REPORTS = Items(
    Fields(
        {
            "gate": Whole(0, LARGE),
            "taken": Table(Whole(), key=_NUMBERS, least=1),
            "entropy": Number(0),
            "information": Number(0),
        },
        {"static": Flag()},
    )
)

# --- files of their own ------------------------------------------------------------------------------
RECIPE = Fields(more=True)
_MILLISECONDS = Number(0)
_TIME = Fields({"p50": _MILLISECONDS, "p95": _MILLISECONDS})
_LATENCY_TEXTS = ("device", "backend", "backend_version", "dtype", "torch_version", "date")
LATENCY = Fields(
    {
        "format": Whole(1),
        "model": Fields({"name": Text(200), "options": Table(Plain())}),
        "image_size": Items(_SIDE, 2, 2),
        "kind": OneOf("cpu", "cuda"),
        "memory": OneOf("shared", "packed"),
        **dict.fromkeys(_LATENCY_TEXTS, Text(1000)),
        "threads": Whole(1, LARGE),
        "entries": Items(
            Fields(
                {
                    "batch": Whole(1, 2**31),
                    "prefix": _TIME,
                    "segments": Items(Items(Items(_TIME, 1), 1), 1, 64),
                }
            ),
            1,
            1000,
        ),
    }
)
MIX = Table(Number(0), key=_NUMBERS, least=1)
BACKENDS = Table(IfObject(Table(Number(0))))

_ROUTE_RESULT = Fields(
    {
        **{"route": Whole(0, LARGE), "correct": Whole(), "images": Whole(1), "madds": Whole(1)},
        **{"params": Whole(), "statistics": OneOf("fresh", "running", "calibrated")},
    },
    {"accuracy": _SHARE},
)
RESULTS = Fields(
    {
        "steps": Whole(1),
        "held_out": Items(Row(Maybe(_ROUTE_RESULT), _ROUTE_RESULT)),
        "test": Items(_ROUTE_RESULT, 1),
        "images": Fields(
            {
                "classes": Items(Text(), 1),
                "counts": Items(Whole(), 1),
                "held_out": Whole(),
                "test": Whole(),
                "size": _SIDE,
            },
            {"damaged": Whole()},
        ),
    },
    {
        "gated": Maybe(
            Fields(
                {"correct": Whole(), "images": Whole(1), "madds": Number(0), "taken": _COUNTS},
                {"accuracy": _SHARE},
            )
        ),
        "classes": Maybe(
            Fields(
                {
                    "route": Whole(0, LARGE),
                    "images": Items(Whole(), 1),
                    "correct": Items(Whole(), 1),
                    "confused": Items(Items(Whole(), 3, 3)),
                }
            )
        ),
    },
    more=True,
)
DETECTION_RESULTS = Fields(
    {
        "classes": Items(Text(), 1),
        "results": Items(
            Fields(
                {
                    "route": Maybe(Whole(0, LARGE)),
                    "madds": Number(0),
                    "map": Fields(dict.fromkeys(("voc2007", "voc2010", "coco"), _SHARE), more=True),
                    "classes": Table(Maybe(_SHARE)),
                    "images": Whole(1),
                    "taken": _COUNTS,
                }
            ),
            1,
        ),
    },
    more=True,
)
METRICS = Fields({"kind": Text(100), "step": Whole()}, more=True)
