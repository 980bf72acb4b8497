"""Compare sources of batch-norm statistics by the accuracy of the finished network.

    python -m benchmarks.calibration [--seeds 0 1 2] [--json FILE]

Test accuracy on digits in percent at the smallest and the largest route, for the same trained weights:
statistics of augmented or of plain images, after training with padded crops; and, with two gates, statistics
for every routing history or for the last choice alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import make_parser, report
from benchmarks.timing import environment
from dsnet.recipes.resolve import resolve_recipe
from dsnet.training import train

CASES = {
    "DS-ViT++, augmented images": ("digits_vit", ["padding=1", "calibrate_on=augmented"]),
    "DS-ViT++, plain images": ("digits_vit", ["padding=1", "calibrate_on=plain"]),
    "DS-MBNet, augmented images": ("digits_mbnet", ["padding=1", "calibrate_on=augmented"]),
    "DS-MBNet, plain images": ("digits_mbnet", ["padding=1", "calibrate_on=plain"]),
    "DS-ResNet, every history": ("digits_resnet", ["options.bn_key=prefix"]),
    "DS-ResNet, the last choice alone": ("digits_resnet", ["options.bn_key=stage"]),
}


def measure(recipe: str, settings: list[str], seed: int) -> list[float]:
    config = resolve_recipe(recipe, [*settings, "epochs=10", f"seed={seed}", "device=cpu"])
    with tempfile.TemporaryDirectory() as folder:
        outcome = train(config, Path(folder) / "run")
    return [round(100 * outcome.test[end].accuracy, 2) for end in (0, -1)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name, (recipe, settings) in CASES.items():
        reached = [measure(recipe, settings, seed) for seed in args.seeds]
        print(name, reached, flush=True)
        smallest, largest = (list(column) for column in zip(*reached, strict=True))
        results.append(
            {"case": name, "recipe": recipe, "set": settings, "smallest": smallest, "largest": largest}
        )
    about = {"benchmark": "calibration", **environment(torch.device("cpu")), "seeds": args.seeds}
    report({**about, "results": results}, args.json)


if __name__ == "__main__":
    main()
