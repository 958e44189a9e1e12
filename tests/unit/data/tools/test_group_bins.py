from facetrain.data.formats.bin import write_bin
from facetrain.data.tools.group_bins import find_group_bins, group_bin_pairs
from facetrain.data.tools.pair_writer import write_pairs
from facetrain.verify.sets.pair_set import load_pair_set
from facetrain.verify.sets.slice_table import read_slice_table
from tests.support.datasets import encoded_image
from tests.support.pairs import convert_bin

GROUPS = ("African", "Asian", "Caucasian", "Indian")


def test_the_bins_of_the_groups_of_rfw_become_one_set(tmp_path):
    for number, group in enumerate(GROUPS):
        images = [encoded_image(100 * number + image) for image in range(40)]
        write_bin(tmp_path / f"{group}_test.bin", images, [True, False] * 10)
    assert write_pairs(group_bin_pairs(tmp_path), tmp_path / "rfw.bin")[:2] == (80, 40)
    loaded = load_pair_set("rfw", tmp_path)
    group_P = read_slice_table(loaded.groups, loaded.same).columns["group"]
    assert group_P.tolist() == [group for _ in range(10) for group in GROUPS for _ in range(2)]
    assert loaded.same.tolist() == [True, False] * 40
    first_fold = [100 * number + image for number in range(4) for image in range(4)]
    assert loaded.images[:16] == [encoded_image(image) for image in first_fold]
    # A new set of this name drops the old groups.
    assert convert_bin(tmp_path / "Asian_test.bin", tmp_path / "rfw.bin") == (20, 10)
    assert load_pair_set("rfw", tmp_path).groups is None
    (tmp_path / "Asian_test.bin").unlink()
    assert not find_group_bins(tmp_path)
