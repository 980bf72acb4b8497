"""Mixed batches in one go: kernels in which every image has the widths of its own route."""
