"""Forecast of the memory that a run needs."""
