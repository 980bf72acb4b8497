"""What compiles the segments of a plan: torch, its compiler, Triton kernels, ONNX Runtime or OpenVINO."""
