"""Triton kernels, each with a function of torch operations that runs where Triton cannot."""
