"""Memory and kernels of the device: page-locked host memory, counts of kernel launches, profiler ranges."""
