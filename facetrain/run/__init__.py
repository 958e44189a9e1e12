"""Composition of a training run."""
