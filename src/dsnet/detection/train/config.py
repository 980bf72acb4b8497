"""Everything that decides how a detector is trained, as frozen values that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsnet.detection.model.fssd import FssdTable
from dsnet.errors import DsnetError
from dsnet.training.config import at_least
from dsnet.training.stage2.losses import Strategy

__all__ = ["BoxData", "BoxOptim", "BoxRun", "DetectConfig", "DetectorGate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxData:
    """Which images and boxes."""

    root: str = ""  # a folder in VOC's layout, or one that has several of them
    train: str = "trainval"  # splits, separated by commas; VOC2007/trainval: of a folder inside
    test: str = "test"
    classes: tuple[str, ...] | None = None  # none: those of the training images, sorted
    size: int = 320  # side of the images that the network sees
    stored: int | None = (
        None  # side of the images in memory, that crops are cut from; none: half as much more
    )
    augment: bool = True  # SSD's: colours, zooming out, crops, flips
    calibration: int = 2000  # training images that the norms' statistics are made from at the end

    def __post_init__(self) -> None:
        at_least(self, 1, "stored", "calibration")
        if self.size < 32 or self.size % 32:
            raise DsnetError(f"size must be a multiple of 32, not {self.size}")

    @property
    def side(self) -> int:
        """Of the images in memory."""
        return self.stored or self.size * 3 // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxOptim:
    """SGD with momentum; half a cosine down to 0, or steps down."""

    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float = 10.0  # largest norm of all gradients together; 0: no limit
    epochs: int = 100
    warmup: float = 1.0  # epochs
    milestones: tuple[int, ...] = ()  # epochs after which the rate is a tenth, instead of the cosine
    batch: int = 32
    random: int = 2  # random routes a step, beside the largest and the smallest

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs", "batch")
        at_least(self, 0, "weight_decay", "clip", "warmup", "random")
        if not 0 < self.lr < float("inf") or not 0 <= self.momentum < 1:
            raise DsnetError(f"lr must be above 0, momentum in [0, 1), not {self.lr}, {self.momentum}")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise DsnetError(f"milestones must rise, not {self.milestones}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorGate:
    """Stage II of a detector; the defaults are the paper's."""

    space: str | None = None  # routes to decide between: S, M, L, or numbers as 0,3,7; none: all
    target: float = 1.0  # λ1, weight of the mixed answers' multibox loss
    complexity: float = 0.5  # λ2, weight of the complexity penalty
    sgs: float = 1.0  # λ3, weight of sandwich gate sparsification
    ratio: float = 1.1  # an image is easy if the smallest route's loss is at most so many times the largest's
    strategy: Strategy = "try_best"  # give_up: images that the largest route does not solve go to the first
    solved: float = 0.5  # for give_up: least share of an image's matched priors with the right class
    lr: float = 0.05
    decay: float = 0.9  # of the learning rate, an epoch
    epochs: int = 10
    batch: int = 32

    def __post_init__(self) -> None:
        at_least(self, 0, "target", "complexity", "sgs", "epochs")
        at_least(self, 1, "batch", "ratio")
        if not 0 <= self.solved <= 1:
            raise DsnetError(f"solved must be a share from 0 to 1, not {self.solved}")
        if not 0 < self.lr < float("inf") or not 0 < self.decay <= 1:
            raise DsnetError(f"lr must be above 0, decay in (0, 1], not {self.lr}, {self.decay}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRun:
    """How the run is carried out."""

    seed: int = 0
    device: str = "auto"  # auto: a GPU where there is one
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: forward passes under autocast
    channels_last: bool = False
    graphs: bool = True  # on a GPU: passes are CUDA graphs
    log_every: int = 10  # steps
    save_minutes: float = 5.0  # between checkpoints

    def __post_init__(self) -> None:
        at_least(self, 0, "seed", "save_minutes")
        at_least(self, 1, "log_every")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectConfig:
    """A detector, from a supernet to one whose gate routes."""

    model: str = "ds_mbnet"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    start: str | None = None  # the folder of a run of `dsnet train`: weights and normalisation to begin with
    data: BoxData = field(default_factory=BoxData)
    optim: BoxOptim = field(default_factory=BoxOptim)
    gate: DetectorGate = field(default_factory=DetectorGate)
    table: FssdTable = field(default_factory=FssdTable)
    run: BoxRun = field(default_factory=BoxRun)
