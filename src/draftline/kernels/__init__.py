"""Triton kernels of the CUDA training step. Nothing here is imported on a machine that trains on a CPU."""
