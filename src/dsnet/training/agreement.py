"""What must be the same in all processes of a run: settings, code, images and weights."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsnet.core.settings import to_plain
from dsnet.data.dataset import ImageDataset
from dsnet.errors import DsnetError
from dsnet.models.registry import model_entry

__all__ = ["PLACES", "code_digest", "settings_facts", "state_facts", "weights_digest"]

# Settings that say where and how, and may differ between machines; what is read there is compared.
PLACES = (
    "run.device",
    "run.timeout_minutes",
    "timeout_minutes",
    "data.root",
    "data.workers",
    "start",
    "latency",
    "scheme.teacher",
)


def settings_facts(config: object, model: str, device: torch.device, **more: object) -> dict[str, Any]:
    """Settings by key, then versions of the code and the kind of device."""
    facts = {key: value for key, value in _flat(to_plain(config)).items() if key not in PLACES}
    versions = {
        "dsnet version": importlib.import_module("dsnet").__version__,
        "dsnet source code": code_digest(),
        "torch version": torch.__version__,
        "model source code": _model_digest(model),
    }
    return {**facts, **versions, "kind of device": device.type, **more}


def _flat(plain: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        flat.update(_flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value})
    return flat


@functools.cache
def code_digest() -> str:
    """A digest of all source files of the package."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _model_digest(name: str) -> str:
    """A digest of the file that a model of the user comes from; the package's own are in `code_digest`."""
    try:
        build = model_entry(name).build
        path = inspect.getsourcefile(build)
    except (DsnetError, TypeError):
        return "unknown"
    if build.__module__.startswith("dsnet.") or path is None or not Path(path).is_file():
        return "of dsnet"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """A digest of all tensors of a module."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def state_facts(model: nn.Module, train: ImageDataset, step: int) -> dict[str, Any]:
    """Where training begins, with which weights and which images."""
    labels = train.labels.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {
        "step": step,
        "weights": weights_digest(model),
        "number of training images": len(train),
        "classes": list(train.classes)[:1000],
        "labels": hashlib.sha256(labels).hexdigest()[:16],
    }
