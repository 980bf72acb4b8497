"""``dsnet models``: a list of the registered models."""

from __future__ import annotations

import argparse
from typing import Any

from dsnet.cli.output import print_json
from dsnet.cost import madds
from dsnet.models import Supernet, create_model, list_models
from dsnet.models.registry import model_entry
from dsnet.report.text import human, table

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print all models with their image size, routes, gates and multiply-adds."""
    rows = [_facts(name) for name in list_models(args.kind)]
    if args.json:
        print_json(rows)
        return 0
    body = [
        [
            row["name"],
            str(row["image_size"]),
            str(row["routes"] or "–"),
            str(row["gates"] or "–"),
            " – ".join(human(m) for m in dict.fromkeys(row["madds"])),
            row["summary"],
        ]
        for row in rows
    ]
    header = ["model", "image", "routes", "gates", "MAdds", "what it is"]
    print(table(header, body, left=("model", "what it is")))
    return 0


def _facts(name: str) -> dict[str, Any]:
    entry = model_entry(name)
    model = create_model(name, device="meta")
    dynamic = isinstance(model, Supernet)
    ends = [model.space.smallest, model.space.largest] if dynamic else [None]
    return {
        "name": name,
        "kind": entry.kind,
        "summary": entry.summary,
        "image_size": model.input_spec.image_size,
        "routes": len(model.space) if dynamic else None,
        "gates": model.space.gates if dynamic else None,
        "madds": [madds(model, route) for route in ends],
        "options": list(entry.option_names()),
    }
