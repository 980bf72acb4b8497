"""The settings of a detector's training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsnet.core.ranges import check_range
from dsnet.detection.model.fssd import FssdTable
from dsnet.errors import DsnetError
from dsnet.training.stage2.losses import Strategy

__all__ = [
    "DetectionConfig",
    "DetectionDataConfig",
    "DetectionOptimConfig",
    "DetectionRunConfig",
    "DetectorGateConfig",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionDataConfig:
    """Images and boxes."""

    root: str = ""  # a folder in VOC's layout, or one with several of them
    train: str = "trainval"  # splits, separated by commas; VOC2007/trainval for a folder inside root
    test: str = "test"
    classes: tuple[str, ...] | None = None  # default: those of the training images, sorted
    size: int = 320  # side of the network's images
    stored: int | None = None  # side of the images in memory, which crops are cut from; default: 1.5 · size
    augment: bool = True  # SSD's augmentation: colours, zooming out, crops, flips
    calibration: int = 2000  # training images for the exact batch-norm statistics

    def __post_init__(self) -> None:
        check_range(self, "stored", "calibration", least=1)
        if self.size < 32 or self.size % 32:
            raise DsnetError(f"size must be a multiple of 32, not {self.size}")

    @property
    def stored_size(self) -> int:
        """Return the side of the images in memory."""
        return self.stored or self.size * 3 // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionOptimConfig:
    """SGD with momentum, and a cosine or stepwise schedule."""

    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip: float = 10.0  # largest norm of all gradients together; 0: no limit
    epochs: int = 100
    warmup: float = 1.0  # epochs
    milestones: tuple[int, ...] = ()  # epochs after which the rate drops to a tenth, instead of the cosine
    batch: int = 32
    random: int = 2  # random routes in a step, besides the largest and the smallest

    def __post_init__(self) -> None:
        check_range(self, "epochs", "batch", least=1)
        check_range(self, "weight_decay", "clip", "warmup", "random", least=0)
        check_range(self, "lr", above=0, below=float("inf"))
        check_range(self, "momentum", least=0, below=1)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise DsnetError(f"milestones must rise, not {self.milestones}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorGateConfig:
    """Stage II of a detector. The defaults are the paper's."""

    space: str | None = None  # candidate routes: S, M, L, or numbers such as 0,3,7; default: all
    target: float = 1.0  # λ1, weight of the mixed predictions' multibox loss
    complexity: float = 0.5  # λ2, weight of the cost penalty
    sgs: float = 1.0  # λ3, weight of sandwich gate sparsification
    ratio: float = 1.1  # an image is easy if the smallest route's loss is at most this times the largest's
    strategy: Strategy = "try_best"  # give_up: images that the largest route does not solve go to the first
    solved: float = 0.5  # for give_up: least share of an image's matched priors with the right class
    lr: float = 0.05
    decay: float = 0.9  # of the learning rate in each epoch
    epochs: int = 10
    batch: int = 32

    def __post_init__(self) -> None:
        check_range(self, "target", "complexity", "sgs", "epochs", least=0)
        check_range(self, "batch", "ratio", least=1)
        check_range(self, "solved", least=0, most=1)
        check_range(self, "lr", above=0, below=float("inf"))
        check_range(self, "decay", above=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionRunConfig:
    """Seed, device, precision, logging and checkpoints."""

    seed: int = 0
    device: str = "auto"  # auto: a GPU if there is one
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: forward passes under autocast
    channels_last: bool = False
    graphs: bool = True  # run a GPU's passes as CUDA graphs
    log_every: int = 10  # steps
    save_minutes: float = 5.0  # between checkpoints

    def __post_init__(self) -> None:
        check_range(self, "seed", "save_minutes", least=0)
        check_range(self, "log_every", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionConfig:
    """A detector's training, from a supernet to a trained gate."""

    model: str = "ds_mbnet"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model
    start: str | None = None  # a run of `dsnet train` whose weights and normalisation to start from
    data: DetectionDataConfig = field(default_factory=DetectionDataConfig)
    optim: DetectionOptimConfig = field(default_factory=DetectionOptimConfig)
    gate: DetectorGateConfig = field(default_factory=DetectorGateConfig)
    table: FssdTable = field(default_factory=FssdTable)
    run: DetectionRunConfig = field(default_factory=DetectionRunConfig)
