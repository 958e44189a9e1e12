"""Verification sets written in one call."""

from facetrain.data.formats.bin import read_bin
from facetrain.data.tools.pair_sources import bin_pairs, list_pairs
from facetrain.data.tools.pair_writer import write_pairs


def convert_pair_list(list_path, images, output, *, workers=None, **options):
    """Write a pair list as .bin; return the number of pairs and of genuine pairs."""
    write_pairs(list_pairs(list_path, images, **options), output, workers=workers)
    return count_pairs(output)


def convert_bin(path, output, **options):
    """Write a .bin set from another one; return the number of pairs and of genuine pairs."""
    write_pairs(bin_pairs(path, **options), output)
    return count_pairs(output)


def count_pairs(path):
    """Return the number of pairs and of genuine pairs of a .bin."""
    _, same = read_bin(path)
    return len(same), int(same.sum())
