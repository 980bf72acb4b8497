"""Hashes of what this version computes on this machine, to compare with those of another version.

    python -m benchmarks.fingerprints --out before.json
    python -m benchmarks.fingerprints --compare before.json

For changes of the code that must not change results: logits, gradients and routes of every supernet with
random weights and statistics, and the tensors and figures of short runs on digits (train, gate, calibrate,
evaluate, recalibrate, transfer) by the command line. About three minutes on one core. Hashes agree only
between runs on one kind of machine, with one version of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import dsnet
from benchmarks.timing import environment, write_json

LARGE = 64  # pixels a side of the images of networks for 224 pixels
RUNS = {  # recipe or scheme → arguments of `dsnet train`
    "mbnet": ["digits_mbnet", "--set", "epochs=2"],
    "mbnet_hib": ["digits_mbnet", "--set", "epochs=1", "--set", "scheme.name=h-ib+mvco"],
    "mbnet_id_label": ["digits_mbnet", "--set", "epochs=1", "--set", "scheme.name=id+label"],
    "mbnet_joint": [
        *("digits_mbnet", "--set", "epochs=1", "--set", "scheme.name=label"),
        *("--set", "scheme.joint=gumbel"),
    ],
    "resnet": ["digits_resnet", "--set", "epochs=1"],
    "vit": ["digits_vit", "--set", "epochs=1"],
}
TIMES = ("images_per_s", "seconds", "date")  # keys that differ from run to run


def digest(*tensors: Tensor) -> str:
    """A hash of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
        found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found.hexdigest()[:16]


def networks() -> Iterator[tuple[str, str]]:
    """Logits, gradients and routes of every supernet."""
    for name in dsnet.list_models("supernet"):
        draws = torch.Generator().manual_seed(0)
        model = dsnet.create_model(name, generator=draws)
        with torch.no_grad():
            for key, value in model.state_dict(keep_vars=True).items():
                if value.is_floating_point():
                    positive = "var" in key or "norm" in key
                    drawn = torch.rand(value.shape, generator=draws, dtype=value.dtype)
                    value.copy_(drawn + 0.5 if positive else 0.2 * (drawn - 0.5))
        side = min(model.input_spec.image_size, LARGE)
        x = torch.randn(4, 3, side, side, generator=draws)
        space = model.space
        chosen = {0, len(space) // 2, len(space) - 1}
        with torch.no_grad():
            for position in sorted(chosen):
                yield f"{name} logits {position}", digest(model(x, space[position]))
            yield f"{name} routes", digest(model.route(x))
            yield f"{name} gated", digest(model(x))
        loss = model(x, space[len(space) // 2]).logsumexp(1).sum()
        loss.backward()
        gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        yield f"{name} gradients", digest(*(gradients[key] for key in sorted(gradients)))


def dsnet_command(*arguments: str) -> str:
    """What a command prints on stdout."""
    command = [sys.executable, "-m", "dsnet", *arguments, "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def checkpoint(run: Path, name: str) -> str:
    """A hash of all tensors of a checkpoint, by name."""
    folder = run / (run / name).read_text(encoding="utf-8").strip()
    named = {
        f"{path.stem}.{key}": value
        for path in sorted(folder.glob("*.safetensors"))
        for key, value in load_file(path).items()
    }
    return digest(*(named[key] for key in sorted(named)))


def figures(text: str) -> str:
    """A hash of JSON without what differs from run to run."""

    def cleaned(value: Any) -> Any:  # noqa: ANN401  (JSON)
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if key not in TIMES}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    plain = json.dumps(cleaned(json.loads(text)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def runs(folder: Path) -> Iterator[tuple[str, str]]:
    """Tensors and figures of short runs."""
    for name, arguments in RUNS.items():
        run = folder / name
        dsnet_command("train", *arguments, "--set", "device=cpu", "--out", str(run))
        for kind in ("last", "final"):
            yield f"train {name} {kind}", checkpoint(run, kind)
        yield f"evaluate {name}", figures(dsnet_command("evaluate", str(run), "--json"))
    for name, setting in (("mbnet", "goal=value"), ("resnet", "space=S")):
        run = str(folder / name)
        dsnet_command("gate", run, "--set", setting, "--set", "epochs=2", "--device", "cpu")
        yield f"gate {name}", checkpoint(folder / name, "gated")
        yield f"calibrate {name}", figures(dsnet_command("calibrate", run, "--json"))
        yield f"routed {name}", figures(dsnet_command("evaluate", run, "--routed", "--json"))
    dsnet_command("recalibrate", str(folder / "mbnet"), "--name", "final")
    yield "recalibrate mbnet", checkpoint(folder / "mbnet", "final")
    other = folder / "other"
    start = ("transfer", str(folder / "mbnet"), "--data", "digits_7_to_9", "--out", str(other))
    dsnet_command(*start, "--no-gate", "--set", "epochs=1")
    yield "transfer", checkpoint(other, "final")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--compare", type=Path, help="JSON file of another version; exit status 1: they differ"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(args.compare.read_text(encoding="utf-8"))["hashes"] if args.compare else None
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for what in (networks(), runs(Path(folder))):
            for name, value in what:
                found[name] = value
                told = "" if before is None else "same" if before.get(name) == value else "DIFFERS"
                print(f"{value}  {name}  {told}".rstrip(), flush=True)
    if args.out is not None:
        write_json(
            args.out, {"benchmark": "fingerprints", **environment(torch.device("cpu")), "hashes": found}
        )
    if before is not None:
        different = sorted(
            name for name in before.keys() | found.keys() if before.get(name) != found.get(name)
        )
        print(
            f"\n{len(found) - len(different)} of {len(found)} are the same"
            + "".join(f"\n{n}" for n in different)
        )
        sys.exit(bool(different))


if __name__ == "__main__":
    main()
