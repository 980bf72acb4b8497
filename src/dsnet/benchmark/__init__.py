"""The benchmark behind ``dsnet bench``: workloads, baselines and what they are compared by."""
