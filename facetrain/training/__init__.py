"""One training step, and the state that a checkpoint holds."""
