"""Images to train and test with: sets by name, folders of classes, Parquet tables."""

from dsnet.data.dataset import Crops, Source
from dsnet.data.in_memory import ImageSet
from dsnet.data.lazy import LazySet
from dsnet.data.registry import SETS, load

__all__ = ["SETS", "Crops", "ImageSet", "LazySet", "Source", "load"]
