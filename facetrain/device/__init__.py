"""Parts that depend on the device: its abilities, page-locked memory, current device, launches, profiler ranges."""
