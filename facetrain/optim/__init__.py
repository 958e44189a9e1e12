"""Optimizer of the backbone, learning rate schedule and loss scale."""
