"""Verification sets written from pair lists and from other sets."""

from facetrain.data.tools.pair_lists import bin_pairs, list_pairs
from facetrain.data.tools.pair_writer import write_pairs


def convert_pair_list(list_path, images, output, *, workers=None, skip_bad=False, **options):
    """Write a pair list as .bin; return the number of pairs and of genuine pairs."""
    pairs = list_pairs(list_path, images, **options)
    return write_pairs(pairs, output, workers=workers, skip_bad=skip_bad)[:2]


def convert_bin(path, output, *, skip_bad=False, **options):
    """Write a .bin set from another one; return the number of pairs and of genuine pairs."""
    return write_pairs(bin_pairs(path, **options), output, skip_bad=skip_bad)[:2]
