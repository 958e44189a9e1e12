"""The training state, one step, and the loop."""
