"""Margins: the formulas that change a sample's target logit, one family in a file."""
