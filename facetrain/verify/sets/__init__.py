"""Evaluation sets and score tables, read from files."""
