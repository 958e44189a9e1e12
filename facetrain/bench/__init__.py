"""Benchmarks: ratios between variants that take turns on the same machine in one run."""
