"""Detectors as plans of the runtime."""
