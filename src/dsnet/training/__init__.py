"""Training: Stage I, Stage II, transfer, re-calibration of norms, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsnet.core.lazy import lazy_imports

if TYPE_CHECKING:
    from dsnet.core.checkpoint import Checkpoint, load_checkpoint
    from dsnet.models.loading import load_model, save_checkpoint
    from dsnet.training.api import Outcome, train
    from dsnet.training.bn_calibration import recalibrate
    from dsnet.training.config import TrainConfig
    from dsnet.training.evaluation import RouteResult, evaluate
    from dsnet.training.stage1.ema import Average
    from dsnet.training.stage1.projector import Projector
    from dsnet.training.stage1.scheme import Scheme, register_scheme
    from dsnet.training.stage1.step import NetworkLoss, Stage1, StepLosses
    from dsnet.training.stage2.api import GateOutcome, train_gate
    from dsnet.training.stage2.config import GateConfig
    from dsnet.training.stage2.trained_run import open_trained
else:
    __getattr__, __dir__ = lazy_imports(__name__)

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
    "evaluate",
    "load_checkpoint",
    "load_model",
    "open_trained",
    "recalibrate",
    "register_scheme",
    "save_checkpoint",
    "train",
    "train_gate",
]
