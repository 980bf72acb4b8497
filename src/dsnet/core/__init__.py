"""Infrastructure that knows no model: devices, files, checkpoints on disk, processes, timing."""
