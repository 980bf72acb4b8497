"""Passes that rewrite a segment for a device."""
