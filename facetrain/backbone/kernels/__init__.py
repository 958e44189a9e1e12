"""Triton kernels of the backbones."""
