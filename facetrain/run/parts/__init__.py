"""Construction of the parts of a run from its config."""
