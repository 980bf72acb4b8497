"""Augmentation of batches on their device, drawn for each image."""
