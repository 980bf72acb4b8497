"""Readers of data sets: folders, Parquet, the Hugging Face hub, CIFAR and IDX files."""
