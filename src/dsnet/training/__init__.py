"""Stage I: schemes, losses and steps that train a supernet's weights; re-calibration of its norms."""

from dsnet.training.average import Average
from dsnet.training.checkpoint import Checkpoint, load_checkpoint, load_model, save_checkpoint
from dsnet.training.config import TrainConfig
from dsnet.training.evaluate import RouteResult, evaluate
from dsnet.training.projector import Projector
from dsnet.training.recalibrate import recalibrate
from dsnet.training.run import Outcome, train
from dsnet.training.schemes import Scheme
from dsnet.training.step import NetworkLoss, Stage1, StepLosses

__all__ = [
    "Average",
    "Checkpoint",
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
    "recalibrate",
    "save_checkpoint",
    "train",
]
