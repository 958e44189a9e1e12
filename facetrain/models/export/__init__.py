"""Export of a network to a file for another program."""
