"""Partitioning: split a model into a prefix and one segment per choice."""
