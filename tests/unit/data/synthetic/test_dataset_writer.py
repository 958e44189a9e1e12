import multiprocessing
import subprocess
import sys
from dataclasses import replace

import pytest

from facetrain.data.dataset_card import read_cards
from facetrain.data.formats.bin import read_bin
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.synthetic.dataset_writer import write_synthetic
from facetrain.data.synthetic.options import SyntheticFaces
from facetrain.errors import DataError
from tests.support.processes import descendants, kill, wait_until_gone
from tests.support.waiting import wait_until

SMALL = SyntheticFaces(identities=3, images_per_identity=4, eval_identities=12, eval_pairs=40, image_size=48)


def write(folder, workers=1, **changes):
    return write_synthetic(folder, replace(SMALL, **changes), workers=workers)


@pytest.mark.slow
def test_the_bytes_depend_on_the_seed_and_not_on_the_number_of_workers(tmp_path):
    one = write(tmp_path / "one")
    two = write(tmp_path / "two", workers=2)
    write(tmp_path / "other", seed=1)
    assert (one.images, one.identities) == (two.images, two.identities) == (12, 3)
    (card,) = read_cards(tmp_path / "one")
    assert (card.kind, card.people, card.images) == ("synthetic", 3, 12)
    for name in ("train.rec", "train.idx", "property", "synth.bin"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "train.rec").read_bytes() != (tmp_path / "other" / "train.rec").read_bytes()


def test_the_verification_pairs_show_identities_that_the_training_set_does_not_have(tmp_path):
    write(tmp_path / "data")
    source = open_dataset(tmp_path / "data")
    assert (source.num_images, source.num_classes) == (12, 3)
    images, same = read_bin(tmp_path / "data" / "synth.bin")
    trained = {source.read(number) for number in range(12)}
    assert not trained & set(images)
    assert same.sum() == 20 and all(same[fold * 4 : fold * 4 + 4].sum() == 2 for fold in range(10))
    assert decode_rgb(images[0], location="x").shape == (48, 48, 3)


def test_no_pair_is_drawn_twice_and_more_pairs_than_exist_are_refused(tmp_path):
    write(tmp_path / "data", eval_identities=2, eval_pairs=160)
    images, same = read_bin(tmp_path / "data" / "synth.bin")
    pairs = {frozenset(images[2 * n : 2 * n + 2]) for n in range(160)}
    assert len(pairs) == 160 and all(len(pair) == 2 for pair in pairs) and same.sum() == 80
    with pytest.raises(DataError, match="180"):
        write(tmp_path / "other", eval_identities=2, eval_pairs=200)


def test_existing_folders_are_kept_and_a_failure_leaves_no_files(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="already exists"):
        write(tmp_path / "data")
    with pytest.raises(DataError, match="^--eval-pairs 30: .* multiple of 20"):
        write(tmp_path / "other", eval_pairs=30)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="Not a directory"):
        write(tmp_path / "file" / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file"]


@pytest.mark.slow
def test_no_worker_is_left_after_an_error(tmp_path):
    others = {*multiprocessing.active_children()}

    def fail(*_):
        raise DataError("the disk is full")

    # `failed` holds the frames, and with them the generator that has the workers.
    with pytest.raises(DataError) as failed:
        write_synthetic(tmp_path / "data", SMALL, workers=2, progress=fail)
    assert "the disk is full" in str(failed.value)
    assert not {*multiprocessing.active_children()} - others


_RENDER = """
from pathlib import Path
from facetrain.data.synthetic.dataset_writer import write_synthetic
from facetrain.data.synthetic.options import SyntheticFaces
write_synthetic(Path("data"), SyntheticFaces(identities=100_000, images_per_identity=4, image_size=48), workers=2)
"""


@pytest.mark.slow
def test_the_workers_end_with_a_killed_parent(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", _RENDER], cwd=tmp_path)
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*/train.rec")), parent)
    workers = descendants(parent.pid)
    kill([parent.pid])
    parent.wait()
    left = wait_until_gone(workers)
    kill(left)
    assert len(workers) >= 2 and not left
