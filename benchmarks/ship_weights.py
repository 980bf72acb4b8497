"""Write the weights of a run as weights that come with the package; see `dsnet.models.shipped`.

python -m benchmarks.ship_weights RUN NAME --data TEXT --made TEXT --results results.json --tested-on TEXT

``--results`` is what ``dsnet evaluate RUN --json`` printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from dsnet.core.checkpoint import load_checkpoint
from dsnet.core.files import sha256_of
from dsnet.models.shipped import FOLDER, load_shipped
from dsnet.recipes import find_recipe

LICENSE = Path(__file__).parent.parent / "LICENSE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("name", help="of a recipe, which the weights are named after")
    parser.add_argument("--data", required=True, help="the images that it was trained on")
    parser.add_argument("--made", required=True, help="commit, machine and duration of the training")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--tested-on", required=True, help="the images of the results")
    args = parser.parse_args()
    saved = load_checkpoint(args.run, "final")
    folder = FOLDER / args.name
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_file({key: value.contiguous() for key, value in saved.tensors["model"].items()}, file)
    file.chmod(0o644)
    shutil.copy(LICENSE, folder / "LICENSE")
    keys = ("format", "step", "network", "recipe", "input", "classes", "route")
    checkpoint = {**{key: saved.data[key] for key in keys}, "groups": ["model"]}
    checkpoint["recipe"]["data"]["root"] = None
    card = {
        "summary": find_recipe(args.name).summary.split(":")[0],
        "data": args.data,
        "tested_on": args.tested_on,
        "accuracy": [row["accuracy"] for row in json.loads(args.results.read_text())["routes"]],
        "license": "Apache-2.0",
        "recipe": args.name,
        "made": args.made,
        "sha256": sha256_of(file),
        "checkpoint": checkpoint,
    }
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    load_shipped(args.name)
    print(f"{file}: {file.stat().st_size:,} bytes, SHA-256 {card['sha256']}")


if __name__ == "__main__":
    main()
