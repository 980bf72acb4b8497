"""Readers of datasets: class folders, Parquet, the Hugging Face Hub, CIFAR and IDX files."""
