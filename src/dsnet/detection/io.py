"""Detectors in run folders: the network as in every checkpoint, and the detector's own weights beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsnet.core.checkpoint import Checkpoint, load_checkpoint
from dsnet.core.formats import DETECTOR
from dsnet.core.schema import check
from dsnet.core.settings import from_plain, to_plain
from dsnet.data.image_source import ImageSource, list_images, open_rgb
from dsnet.detection.data.dataset import stretch_to_square
from dsnet.detection.data.transforms import Preprocessing
from dsnet.detection.model.fssd import Detector, FssdTable
from dsnet.errors import DsnetError, printable
from dsnet.models.loading import build_network, check_finite, save_checkpoint

__all__ = ["SavedDetector", "detector_from_checkpoint", "load_detector", "save_detector"]

GROUP = "detector"  # of tensors and of plain data in a checkpoint


class SavedDetector(NamedTuple):
    """A detector in eval mode, its class names and the preprocessing of its images."""

    detector: Detector
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    checkpoint: Checkpoint

    def prepare(self, images: ImageSource | Sequence[ImageSource]) -> Tensor:
        """Stretch and normalise images as `dsnet detect predict` does.

        Args:
            images: One image or a sequence of them, of any sizes: paths, Pillow images, arrays [H, W, 3] or
                tensors [3, H, W] of bytes or of values from 0 to 1.

        Returns:
            A batch [B, 3, size, size] on the detector's device.
        """
        pixels = []
        for source in list_images(images):
            with open_rgb(source) as image:
                pixels.append(stretch_to_square(image, self.preprocessing.size))
        return self.preprocessing(torch.stack(pixels).to(self.detector.norm.weight.device))


def save_detector(
    folder: Path,
    name: str,
    detector: Detector,
    *,
    step: int,
    classes: tuple[str, ...],
    preprocessing: Preprocessing,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint, as `dsnet.models.loading.save_checkpoint` does for a network."""
    weights = {key: value for key, value in detector.state_dict().items() if not key.startswith("network.")}
    about = {"classes": list(classes), "table": to_plain(detector.table), "input": preprocessing._asdict()}
    return save_checkpoint(
        folder,
        name,
        detector.network,
        step=step,
        tensors={GROUP: weights, **(tensors or {})},
        data={GROUP: about, **(data or {})},
    )


def load_detector(run: Path | str, name: str | None = None) -> SavedDetector:
    """Load a detector.

    Args:
        run: The folder of a run of `dsnet detect train`, or of one of its checkpoints.
        name: The checkpoint; by default the most finished one.

    Raises:
        DsnetError: There is no checkpoint, it is damaged, or it has no detector.

    Examples:
        >>> saved = load_detector("runs/bccd_ds_mbnet")  # doctest: +SKIP
        >>> output = saved.detector(saved.prepare("photo.jpg"))  # doctest: +SKIP
    """
    return detector_from_checkpoint(load_checkpoint(Path(run), name), run)


def detector_from_checkpoint(saved: Checkpoint, run: Path | str) -> SavedDetector:
    """Build the detector of a checkpoint; ``run`` is its path in error messages."""
    about = saved.data.get(GROUP)
    if not isinstance(about, dict) or GROUP not in saved.tensors:
        raise DsnetError(f"{run} holds a network without a detector: `dsnet detect train` makes one")
    check(DETECTOR, about, f"{run}: checkpoint.json: {GROUP}")
    try:
        table, spec = from_plain(FssdTable, about["table"], f"{GROUP}.table."), about["input"]
        classes = tuple(about["classes"])
        _check_sizes(table, saved.tensors[GROUP])
        check_finite(saved.tensors[GROUP])
        network = build_network(saved)
        detector = Detector(network, len(classes), table)
        weights = {f"network.{key}": value for key, value in network.state_dict().items()}
        detector.load_state_dict({**weights, **saved.tensors[GROUP]})
        preprocessing = Preprocessing(spec["size"], tuple(spec["mean"]), tuple(spec["std"]))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        reason = printable(str(error), 1000)
        raise DsnetError(f"the detector of {run} cannot be built: {reason}") from error
    return SavedDetector(detector.eval(), classes, preprocessing, saved)


def _check_sizes(table: FssdTable, tensors: Mapping[str, Tensor]) -> None:
    """Raise before memory is allocated for a table with more channels than the checkpoint's weights have."""
    largest = max((size for value in tensors.values() for size in value.shape), default=0)
    if max(table.project, *table.pyramid) > largest:
        raise DsnetError(f"its table has more channels than its weights, whose largest size is {largest}")
