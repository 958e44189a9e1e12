"""Kernels in Triton, imported only where they run."""
