"""Forecast of the memory and the time that a run needs."""
