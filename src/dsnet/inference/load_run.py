"""Load any run: a classifier with its routers, or a detector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dsnet.calibration.calibration import Calibration
from dsnet.core.checkpoint import Checkpoint, load_checkpoint
from dsnet.core.device import pick_device
from dsnet.data.decode import center_crop
from dsnet.data.image_source import ImageSource, list_images, open_rgb
from dsnet.data.transforms.augment import normalise
from dsnet.detection.io import SavedDetector, detector_from_checkpoint
from dsnet.errors import DsnetError
from dsnet.models import Supernet
from dsnet.models.loading import build_network
from dsnet.routing.router import Routed, parse_budget

__all__ = ["Classifier", "ClassifierInput", "classifier_from_checkpoint", "load"]


class ClassifierInput(NamedTuple):
    """How a classifier's images are prepared: a centre crop, normalised by the channels' statistics."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_ratio: float  # of size to the shorter side that images are resized to before they are cropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """A trained classifier in eval mode, as `dsnet.load` returns it.

    Attributes:
        model: The network. ``model(x, route)`` runs one route, ``model(x)`` lets its gates decide.
        classes: Names of the classes, in the order of the logits.
        size: Height and width of the images that it was tested with.
        checkpoint: The checkpoint: all its tensors and plain data.
        source: The run, as messages name it.
    """

    model: Supernet
    classes: tuple[str, ...]
    size: int
    checkpoint: Checkpoint
    source: str

    @property
    def preprocessing(self) -> ClassifierInput:
        """How the images of the test split were prepared.

        Raises:
            DsnetError: The checkpoint does not say how images are normalised.
        """
        saved = self.checkpoint.data.get("input")
        if saved is None:
            raise DsnetError(
                f"{self.source} does not say how its images were normalised; `dsnet recalibrate` notes it, "
                'or save it with save_checkpoint(..., data={"input": {"mean": [...], "std": [...]}})'
            )
        crop_ratio = saved.get("crop_ratio", 1.0)  # 1 in runs of early versions
        return ClassifierInput(self.size, tuple(saved["mean"]), tuple(saved["std"]), crop_ratio)

    def prepare(self, images: ImageSource | Sequence[ImageSource]) -> Tensor:
        """Crop and normalise images as the test split was.

        Args:
            images: One image or a sequence of them, of any sizes: paths, Pillow images, arrays [H, W, 3] or
                tensors [3, H, W] of bytes or of values from 0 to 1.

        Returns:
            A batch [B, 3, size, size] on the network's device.

        Raises:
            DsnetError: An image cannot be read, or the checkpoint does not say how images are normalised.
        """
        spec, pixels = self.preprocessing, []
        for source in list_images(images):
            with open_rgb(source) as image:
                pixels.append(center_crop(image, spec.size, spec.crop_ratio))
        device = self.model.head.classifier.weight.device
        return normalise(torch.stack(pixels).to(device), spec.mean, spec.std)

    @property
    def calibration(self) -> Calibration:
        """The routers that `dsnet calibrate` saved.

        Raises:
            DsnetError: The run is not calibrated.
        """
        return Calibration.of(self.checkpoint, self.source)

    def routed(self, budget: float | str | None = None, *, router: str = "auto") -> Routed:
        """Return the network with a router that keeps a budget; call it like the network.

        Args:
            budget: Mean cost of an image: ``"300M"``, ``"45%"`` of the largest route, or a number in the unit
                of the calibration. Without one, the gates decide by themselves (``router="gate"``).
            router: The name of a calibrated router; ``auto`` is the most accurate one at the budget.

        Raises:
            DsnetError: The run is not calibrated, or its routers cannot keep the budget.
        """
        calibration = self.calibration
        number = None if budget is None else parse_budget(budget, calibration.costs)
        return Routed(self.model, calibration.router(router, number), number)


def load(
    run: str | Path, name: str | None = None, *, device: torch.device | str = "cpu"
) -> Classifier | SavedDetector:
    """Load the network of a run, with the names of its classes and the preparation of its images.

    Args:
        run: Folder of a run of `dsnet train`, `dsnet transfer` or `dsnet detect train`, or of one checkpoint.
        name: The checkpoint (default: gated, else final, else last).
        device: The device of the network; ``"auto"`` is a GPU if there is one.

    Returns:
        A `Classifier`, or for a detector's run a `dsnet.detection.SavedDetector`. Both have ``classes``,
        ``checkpoint``, ``preprocessing`` and ``prepare``.

    Raises:
        DsnetError: There is no such checkpoint, or it is damaged.

    Examples:
        >>> run = dsnet.load("runs/digits_mbnet")  # doctest: +SKIP
        >>> logits = run.routed("45%")(run.prepare(["a.png", "b.png"]))  # doctest: +SKIP
    """
    saved = load_checkpoint(run, name)
    if saved.is_detector:
        detector = detector_from_checkpoint(saved, run)
        detector.detector.to(pick_device(str(device)))
        return detector
    return classifier_from_checkpoint(saved, str(run) if name is None else f"{run} --name {name}", device)


def classifier_from_checkpoint(
    saved: Checkpoint, source: str, device: torch.device | str = "cpu"
) -> Classifier:
    """Build the classifier of a checkpoint; ``source`` is the run's name in error messages."""
    model = build_network(saved).to(pick_device(str(device)))
    outputs = model.head.classifier.out_features
    return Classifier(
        model=model,
        classes=tuple(saved.data.get("classes") or map(str, range(outputs))),
        size=int((saved.data.get("input") or {}).get("size") or model.input_spec.image_size),
        checkpoint=saved,
        source=source,
    )
