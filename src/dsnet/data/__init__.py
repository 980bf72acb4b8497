"""Image datasets: by name, from folders of classes, from Parquet tables and the Hugging Face Hub."""

from dsnet.data.dataset import Crops, ImageDataset
from dsnet.data.in_memory import InMemoryDataset
from dsnet.data.lazy import LazyDataset
from dsnet.data.loading import load_dataset
from dsnet.data.registry import DatasetRequest, LabeledImages, list_datasets, register_dataset

__all__ = [
    "Crops",
    "DatasetRequest",
    "ImageDataset",
    "InMemoryDataset",
    "LabeledImages",
    "LazyDataset",
    "list_datasets",
    "load_dataset",
    "register_dataset",
]
