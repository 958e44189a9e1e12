"""Sharded checkpoints of a run: every rank writes its part, and any number of ranks can load them."""
