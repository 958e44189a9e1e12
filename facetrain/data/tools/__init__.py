"""Tools for datasets: pack, inspect, check, transform, clean, and make verification pairs."""
