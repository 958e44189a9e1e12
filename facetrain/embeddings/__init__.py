"""Embeddings: computed from images, kept in files, searched."""
