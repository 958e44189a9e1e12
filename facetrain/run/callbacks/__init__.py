"""Callbacks of the training loop: reports, verification, checkpoints and the stop by a signal."""
