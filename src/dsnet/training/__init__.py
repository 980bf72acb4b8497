"""Training: Stage I, Stage II, transfer, re-calibration of norms, evaluation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsnet.core.checkpoint import Checkpoint, load_checkpoint
    from dsnet.models.loading import load_model, save_checkpoint
    from dsnet.training.api import Outcome, train
    from dsnet.training.bn_calibration import recalibrate
    from dsnet.training.config import TrainConfig
    from dsnet.training.evaluate import RouteResult
    from dsnet.training.stage1.ema import Average
    from dsnet.training.stage1.projector import Projector
    from dsnet.training.stage1.scheme import Scheme, register_scheme
    from dsnet.training.stage1.step import NetworkLoss, Stage1, StepLosses
    from dsnet.training.stage2.api import GateOutcome, open_trained, train_gate
    from dsnet.training.stage2.config import GateConfig

__all__ = [
    "Average",
    "Checkpoint",
    "GateConfig",
    "GateOutcome",
    "NetworkLoss",
    "Outcome",
    "Projector",
    "RouteResult",
    "Scheme",
    "Stage1",
    "StepLosses",
    "TrainConfig",
    "load_checkpoint",
    "load_model",
    "open_trained",
    "recalibrate",
    "register_scheme",
    "save_checkpoint",
    "train",
    "train_gate",
]

# Imported on first use, so that command-line help needs no torch.
_LAZY = {
    "Checkpoint": "dsnet.core.checkpoint",
    "load_checkpoint": "dsnet.core.checkpoint",
    "load_model": "dsnet.models.loading",
    "save_checkpoint": "dsnet.models.loading",
    "Outcome": "dsnet.training.api",
    "train": "dsnet.training.api",
    "recalibrate": "dsnet.training.bn_calibration",
    "TrainConfig": "dsnet.training.config",
    "RouteResult": "dsnet.training.evaluate",
    "Average": "dsnet.training.stage1.ema",
    "Projector": "dsnet.training.stage1.projector",
    "Scheme": "dsnet.training.stage1.scheme",
    "register_scheme": "dsnet.training.stage1.scheme",
    "NetworkLoss": "dsnet.training.stage1.step",
    "Stage1": "dsnet.training.stage1.step",
    "StepLosses": "dsnet.training.stage1.step",
    "GateOutcome": "dsnet.training.stage2.api",
    "open_trained": "dsnet.training.stage2.api",
    "train_gate": "dsnet.training.stage2.api",
    "GateConfig": "dsnet.training.stage2.config",
}


if not TYPE_CHECKING:  # type checkers read the imports above instead

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
