"""Evaluation of detectors: mean average precision."""
