"""Who this process is among its ranks, how the ranks talk, and how they are started."""
