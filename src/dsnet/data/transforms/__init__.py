"""Transforms on the device, each image by its own draw."""
