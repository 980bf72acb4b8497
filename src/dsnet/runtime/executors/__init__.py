"""Executors: run the segments of a plan for batches of mixed routes."""
