"""Verification sets written from pair lists and from sets of other forms."""

from facetrain.data.tools.pair_lists import archive_pairs, list_pairs
from facetrain.data.tools.pair_writer import write_pairs


def convert_pair_list(list_path, images, output, *, workers=None, skip_bad=False, **options):
    """Write a pair list as .bin; return the number of pairs and of genuine pairs."""
    pairs = list_pairs(list_path, images, **options)
    return write_pairs(pairs, output, workers=workers, skip_bad=skip_bad)[:2]


def convert_pair_archive(path, output, *, skip_bad=False, **options):
    """Write a set of another form as .bin; return the number of pairs and of genuine pairs."""
    return write_pairs(archive_pairs(path, **options), output, skip_bad=skip_bad)[:2]
