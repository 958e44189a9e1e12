"""Checkpoints: every rank its shard, complete or absent, loadable on any number of ranks."""
