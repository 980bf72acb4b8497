"""Facts that must be the same in all processes of a run: settings, code, images and weights."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsnet.data.dataset import ImageDataset
from dsnet.errors import DsnetError
from dsnet.models.registry import model_entry
from dsnet.training.run_dir import flat_settings

__all__ = ["LOCAL_SETTINGS", "code_digest", "settings_facts", "state_facts", "weights_digest"]

# Paths and devices, which may differ between machines; what is read there is compared.
LOCAL_SETTINGS = (
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
    """Return the settings by key, the versions of the code and the type of the device."""
    facts = {key: value for key, value in flat_settings(config).items() if key not in LOCAL_SETTINGS}
    versions = {
        "dsnet version": importlib.import_module("dsnet").__version__,
        "dsnet source code": code_digest(),
        "torch version": torch.__version__,
        "model source code": _model_digest(model),
    }
    return {**facts, **versions, "kind of device": device.type, **more}


@functools.cache
def code_digest() -> str:
    """Return a digest of all source files of the package."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _model_digest(name: str) -> str:
    """Return a digest of the file that defines a user's model; `code_digest` covers those of the package."""
    try:
        build = model_entry(name).build
        path = inspect.getsourcefile(build)
    except (DsnetError, TypeError):
        return "unknown"
    if build.__module__.startswith("dsnet.") or path is None or not Path(path).is_file():
        return "of dsnet"
    return _digest(Path(path).read_bytes())


def weights_digest(model: nn.Module) -> str:
    """Return a digest of all tensors of a module."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def state_facts(model: nn.Module, train: ImageDataset, step: int) -> dict[str, Any]:
    """Return the step, the weights and the images that training starts with."""
    return {
        "step": step,
        "weights": weights_digest(model),
        "number of training images": len(train),
        "classes": list(train.classes)[:1000],
        "labels": _digest(train.labels.cpu().contiguous().view(torch.uint8).numpy().tobytes()),
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
