"""Backbones: networks from face images to embeddings, independent of ranks, devices and precision."""
