"""Images to train and test with: sets by name, folders of classes, Parquet tables."""

from dsnet.data.images import ImageSet
from dsnet.data.lazy import LazySet
from dsnet.data.sets import SETS, load
from dsnet.data.source import Crops, Source

__all__ = ["SETS", "Crops", "ImageSet", "LazySet", "Source", "load"]
