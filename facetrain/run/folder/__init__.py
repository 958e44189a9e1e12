"""Run folder: its files, its lock, and the comparison of a config with its checkpoints."""
