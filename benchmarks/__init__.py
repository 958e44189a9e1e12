"""Benchmarks of facetrain's parts, for its developers: `python -m benchmarks.NAME --help`.

They need a checkout of the repository and are not part of the package. `make bench` runs all in a short form.
"""
