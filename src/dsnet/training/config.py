"""The settings of a training run: frozen dataclasses that check themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsnet.core.ranges import check_range
from dsnet.data.dataset import check_ratio
from dsnet.data.transforms.augment import Augment
from dsnet.errors import DsnetError, shorten
from dsnet.training.stage1.scheme import Scheme

__all__ = ["DataConfig", "MixConfig", "OptimConfig", "RunConfig", "SchemeConfig", "TrainConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Images, and how they are read."""

    name: str = "digits"  # registered set, folder with train/CLASS/*.jpg, Parquet, hf:NAME
    root: str | None = None  # folder of named sets; none: the environment variable DSNET_DATA
    size: int | None = None  # side of the images; none: small sets keep theirs, files get the network's
    crop_ratio: float = 1.0  # files: the short side is resized to size / crop_ratio, then the centre kept
    mean: tuple[float, float, float] | None = (
        None  # of each channel, in 0…1; none: of the images, or the start
    )
    std: tuple[float, float, float] | None = None  # likewise
    hold_out: float = 0.1  # share of the training split that is kept for validation
    lazy: bool | None = None  # decode while training; none: where the set is too large for memory
    workers: int | None = None  # processes that decode; none: as many as the machine can spare
    calibration: int = 10_000  # training images that the norms' statistics are made from at the end
    calibrate_on: Literal["augmented", "plain"] = "augmented"  # as training saw them, or as they are

    def __post_init__(self) -> None:
        check_range(self, "size", "calibration", least=1)
        check_range(self, "workers", least=0)
        check_ratio("crop_ratio", self.crop_ratio)
        if (self.mean is None) != (self.std is None):
            raise DsnetError("mean and std belong together: set both or none of them")
        check_range(self, "hold_out", least=0, below=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig:
    """Mixing of images and labels: α of the Beta distributions; 0 is off."""

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        check_range(self, "mixup", "cutmix", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeConfig:
    """What each network of a step learns from."""

    name: str = "ib"  # parts joined by +, see dsnet.training.stage1.scheme
    random: int = 2  # random networks in a step, besides the largest and the smallest
    route: int | None = None  # train this route alone, as a stand-alone network of its size
    alpha: float = 0.997  # momentum of the moving average
    alpha_warmup: bool = True  # let the average follow quickly at first
    start: float = 0.0  # share of the run with labels alone, before soft targets begin
    smoothing: float = 0.0  # of labels
    temperature: float = 1.0  # of soft targets
    add: bool = False  # add the losses of the networks instead of averaging (affects the rate)
    stages: Literal["last", "all"] = "last"  # that h-ib supervises
    teacher: str | None = None  # for ed: folder of a run, or timm:NAME
    teacher_labels: Literal["hard", "soft"] = "hard"
    drop_path: float = 0.0  # stochastic depth: largest network (CNN), all networks (ViT)
    dropout: float = 0.0  # of the classifier's input, on the same networks
    keep_statistics: bool = False  # normalise by the statistics of the pretrained network, and keep them
    joint: Literal["gumbel", "reinforce"] | None = None  # train gate and weights together, by labels alone
    complexity: float = 0.5  # for joint: weight of the complexity penalty

    def __post_init__(self) -> None:
        scheme = self.parse()
        check_range(self, "random", "route", "complexity", least=0)
        check_range(self, "start", "smoothing", "drop_path", "dropout", "alpha", least=0, below=1)
        check_range(self, "temperature", above=0)
        if (scheme.external is not None) != (self.teacher is not None):
            needs = "needs a teacher: the folder of a run, or timm:NAME"
            needs = needs if scheme.external else "takes no teacher"
            raise DsnetError(f"scheme {shorten(self.name)} {needs}")
        if self.joint is not None and (self.name != "label" or self.route is not None):
            raise DsnetError("joint training needs scheme.name=label and no scheme.route")
        if self.route is not None and self.name != "label":
            raise DsnetError(f"a single route needs scheme.name=label, not {shorten(self.name)}")

    def parse(self) -> Scheme:
        """Return the scheme of the name."""
        return Scheme.parse(self.name, external=self.teacher_labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Optimizer and schedule: linear warm-up, then half a cosine down to 0, or a decay per epoch."""

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9  # for sgd, Nesterov's
    weight_decay: float = 1e-4  # of weights; gates, norms, biases, positions and tokens have none
    clip: float = 0.0  # largest norm of all gradients together; 0: no limit
    epochs: int = 10
    warmup: float = 0.0  # epochs
    decay: float | None = None  # factor of the learning rate after each epoch, instead of the cosine
    batch: int = 64  # images in a step, over all ranks

    def __post_init__(self) -> None:
        check_range(self, "epochs", "batch", least=1)
        check_range(self, "weight_decay", "clip", "warmup", least=0)
        check_range(self, "lr", above=0)
        check_range(self, "momentum", least=0, below=1)
        check_range(self, "decay", above=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How the run is carried out; of these, the seed and the precision affect the results."""

    seed: int = 0
    device: str = "auto"  # auto: a GPU if there is one
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: forward passes under autocast
    channels_last: bool = False
    compile: bool = False  # torch.compile, one program per route: takes minutes at the start
    graphs: bool | None = None  # CUDA graphs; none: on one GPU, with small images
    sync_norms: bool = True  # batch statistics over all ranks, not of each rank
    keep: Literal["weights", "average"] = "weights"  # weights of the final network
    log_every: int = 10  # steps
    validate_every: int = 1  # epochs
    save_minutes: float = 5.0  # between checkpoints
    save_steps: int = 0  # save also after this many steps; 0: by the clock alone
    timeout_minutes: float = 5.0  # time after which a process counts as lost

    def __post_init__(self) -> None:
        check_range(self, "log_every", "validate_every", least=1)
        check_range(self, "save_minutes", "save_steps", least=0)
        check_range(self, "seed", least=0, below=2**63)
        check_range(self, "timeout_minutes", above=0, below=1e6)
        if self.compile and self.graphs:
            raise DsnetError("compile and graphs cannot be combined; choose one")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training run of Stage I."""

    model: str = "ds_mbnet_tiny"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the model; num_classes is set by the data
    start: str | None = None  # folder of a run with the initial weights and the normalisation
    weights: str | None = None  # of a converted network: a file, or timm to download them; none: random
    weights_by_order: bool = False  # take the tensors of the file by order instead of by name
    fit_classifier: bool = False  # before the first step, fit a new classifier to the pretrained features
    data: DataConfig = field(default_factory=DataConfig)
    augment: Augment = field(default_factory=Augment)
    mix: MixConfig = field(default_factory=MixConfig)
    scheme: SchemeConfig = field(default_factory=SchemeConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for key in self.options:
            if key in ("device", "dtype", "generator", "name") or not isinstance(key, str):
                raise DsnetError(f"options.{key} is not an option of the model; see `dsnet models --json`")
        if self.weights is not None and self.start is not None:
            raise DsnetError("weights and start cannot be combined: both say what training starts from")
        if self.fit_classifier and self.weights is None and self.start is None:
            raise DsnetError("fit_classifier needs pretrained features: set weights or start")
        if self.start is not None and self.scheme.route is not None:
            raise DsnetError("start and scheme.route cannot be combined: a start is for all routes")

    @property
    def average(self) -> bool:
        """Whether the run keeps a moving average of the weights."""
        return self.scheme.parse().uses_average or self.run.keep == "average"
