"""Model files: networks and weights of facetrain and of other programs, in and out."""
