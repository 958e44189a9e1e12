"""Verification sets written from pair lists and from other sets."""

from facetrain.data.tools.pair_sources import bin_pairs, list_pairs
from facetrain.data.tools.pair_writer import write_pairs


def convert_pair_list(list_path, images, output, *, workers=None, **options):
    """Write a pair list as .bin; return the number of pairs and of genuine pairs."""
    return write_pairs(list_pairs(list_path, images, **options), output, workers=workers)


def convert_bin(path, output, **options):
    """Write a .bin set from another one; return the number of pairs and of genuine pairs."""
    return write_pairs(bin_pairs(path, **options), output)
