"""Trained networks on images: load any run, classify files, find boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsnet.core.lazy import lazy_imports

if TYPE_CHECKING:
    from dsnet.inference.load_run import Classifier, load
else:
    __getattr__, __dir__ = lazy_imports(__name__)

__all__ = ["Classifier", "load"]
