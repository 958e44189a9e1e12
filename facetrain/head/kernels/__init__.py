"""Triton kernels of the head, imported only where they run."""
