"""Memory, threads and kernels of the device: page-locked host memory, current device, launches, profiler ranges."""
