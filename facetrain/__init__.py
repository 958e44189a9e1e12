"""facetrain: an end-to-end face-recognition trainer."""

__version__ = "0.1.0"
