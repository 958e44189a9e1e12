"""Whole training steps, measured beside what the machine can do at most."""
