"""The head's sweep as Triton kernels."""
