"""Detectors in a run's folder: the network as every checkpoint has it, and the detector's own beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dsnet.core.checkpoint import Checkpoint, load_checkpoint
from dsnet.core.formats import DETECTOR
from dsnet.core.schema import check
from dsnet.core.settings import from_plain, to_plain
from dsnet.detection.data.prepare import Prepared, prepare_images
from dsnet.detection.model.fssd import Detector, FssdTable
from dsnet.errors import DsnetError, printable
from dsnet.models.loading import build_network, save_checkpoint

__all__ = ["Prepared", "SavedDetector", "detector_of", "load_detector", "save_detector"]

GROUP = "detector"


class SavedDetector(NamedTuple):
    """A detector in eval mode, what it finds, and how its images are made ready."""

    detector: Detector
    classes: tuple[str, ...]
    prepared: Prepared
    checkpoint: Checkpoint

    def prepare(self, images: Any) -> Tensor:  # noqa: ANN401  (what users have)
        """Images as the detector takes them: [B, 3, size, size] on its device.

        One image, or a list of them, of any sizes: paths, images of Pillow, arrays [H, W, 3] or tensors
        [3, H, W] of bytes or of values in 0…1. They are stretched and normalised as `dsnet detect predict`
        does it.
        """
        return prepare_images(images, self.prepared, self.detector.norm.weight.device)


def save_detector(
    folder: Path,
    name: str,
    detector: Detector,
    *,
    step: int,
    classes: tuple[str, ...],
    prepared: Prepared,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """As `dsnet.models.loading.save_checkpoint`."""
    own = {key: value for key, value in detector.state_dict().items() if not key.startswith("network.")}
    about = {"classes": list(classes), "table": to_plain(detector.table), "input": prepared._asdict()}
    return save_checkpoint(
        folder,
        name,
        detector.network,
        step=step,
        tensors={GROUP: own, **(tensors or {})},
        data={GROUP: about, **(data or {})},
    )


def load_detector(run: Path | str, name: str | None = None) -> SavedDetector:
    """From a run's folder, or that of a checkpoint."""
    return detector_of(load_checkpoint(Path(run), name), run)


def _check_sizes(table: FssdTable, tensors: Mapping[str, Tensor]) -> None:
    """Raises where a table has more channels than the detector's weights, before memory is taken for them."""
    most = max((size for value in tensors.values() for size in value.shape), default=0)
    if max(table.project, *table.pyramid) > most:
        raise DsnetError(f"its table has more channels than its weights, whose largest size is {most}")


def detector_of(saved: Checkpoint, run: Path | str) -> SavedDetector:
    """The detector of a checkpoint."""
    about = saved.data.get(GROUP)
    if not isinstance(about, dict) or GROUP not in saved.tensors:
        raise DsnetError(f"{run} holds a network without a detector: `dsnet detect train` makes one")
    check(DETECTOR, about, f"{run}: checkpoint.json: {GROUP}")
    try:
        table, prepared = from_plain(FssdTable, about["table"], f"{GROUP}.table."), about["input"]
        classes = tuple(about["classes"])
        _check_sizes(table, saved.tensors[GROUP])
        network = build_network(saved)
        detector = Detector(network, len(classes), table)
        own = {f"network.{key}": value for key, value in network.state_dict().items()}
        detector.load_state_dict({**own, **saved.tensors[GROUP]})
        ready = Prepared(prepared["size"], tuple(prepared["mean"]), tuple(prepared["std"]))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        reason = printable(str(error), 1000)
        raise DsnetError(f"the detector of {run} cannot be built: {reason}") from error
    return SavedDetector(detector.eval(), classes, ready, saved)
