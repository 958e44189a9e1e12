"""Whether this machine, this dataset and this run description are fit to train."""
