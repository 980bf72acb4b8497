"""Images to train and test with: sets by name, folders of classes, Parquet tables."""

from dsnet.data.images import ImageSet
from dsnet.data.sets import SETS, data_root, load

__all__ = ["SETS", "ImageSet", "data_root", "load"]
