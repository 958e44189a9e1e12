"""Model files, weights of other programs, export."""
