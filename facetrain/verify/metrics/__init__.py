"""Metrics of scores, and their confidence intervals."""
