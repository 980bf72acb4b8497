"""Prediction from image files, for classifiers and detectors."""
