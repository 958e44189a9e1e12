"""Export of a trained network to other formats."""
