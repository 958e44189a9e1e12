"""Checks of the machine, the dataset and the config before a run."""
