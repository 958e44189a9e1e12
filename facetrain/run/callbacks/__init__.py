"""Callbacks of the training loop: reports, verification, checkpoints and early stopping."""
