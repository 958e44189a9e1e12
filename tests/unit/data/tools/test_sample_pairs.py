import itertools
import os
from contextlib import suppress
from functools import partial, partialmethod
from pathlib import Path

import numpy as np
import pytest

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.bin import read_bin
from facetrain.data.mixture import MixtureDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.pair_writer import PairsToWrite, pairs_of_dataset, write_pairs
from facetrain.data.tools.sample_pairs import sample_pairs
from facetrain.errors import DataError, ImageError
from tests.support.datasets import encoded_image, write_records
from tests.support.memory import traced_peak


def test_sampled_pairs_are_different_half_genuine_and_folds_share_no_identity(tmp_path):
    data = write_records(tmp_path / "data", [person for person in range(40) for _ in range(1 + person % 4)])
    write_pairs(sample_pairs(data, 40, seed=1), tmp_path / "a.bin")
    source = open_dataset(data)
    identity_of = {source.read(number): int(source.labels[number]) for number in range(source.num_images)}
    images, same = read_bin(tmp_path / "a.bin")
    assert same.tolist() == [True, True, False, False] * 10
    pairs = list(zip(images[::2], images[1::2], strict=True))
    assert [identity_of[one] == identity_of[other] for one, other in pairs] == same.tolist()
    assert len({frozenset(pair) for pair in pairs}) == 40
    folds = [{identity_of[image] for image in images[start : start + 8]} for start in range(0, 80, 8)]
    assert sum(map(len, folds)) == len(set.union(*folds))
    for name, seed in (("b", 1), ("c", 2)):
        write_pairs(sample_pairs(data, 40, seed=seed), tmp_path / f"{name}.bin")
    a, b, c = ((tmp_path / f"{name}.bin").read_bytes() for name in "abc")
    assert a == b != c


class LandmarkedDataset(FaceDataset):
    num_images, num_classes = 1 << 16, 1
    labels = np.zeros(num_images, np.int32)
    landmarks = np.arange(num_images * 10, dtype=np.float32).reshape(-1, 5, 2)


def test_only_the_landmarks_of_the_images_of_pairs_are_read():
    dataset = LandmarkedDataset()
    mixture = MixtureDataset([dataset, dataset], [1.0, 1.0])
    with traced_peak() as peak:
        pairs = pairs_of_dataset(mixture, [True], [(7, dataset.num_images + 2)])
    assert np.array_equal(pairs.landmarks_N52, dataset.landmarks[[7, 2]])
    assert peak.bytes < dataset.landmarks.nbytes / 20


@pytest.mark.parametrize(
    ("identities", "pairs", "message"),
    [
        (20, 30, "^--count 30: .* multiple of 20"),
        (20, 0, "multiple of 20"),
        (19, 20, "19 identities"),
        (20, 200, r"ask for at most 40 \(--count\)"),
    ],
)
def test_more_pairs_than_a_dataset_has_are_refused(tmp_path, identities, pairs, message):
    data = write_records(tmp_path / "data", [person for person in range(identities) for _ in range(2)])
    with pytest.raises(DataError, match=message):
        sample_pairs(data, pairs)


def test_an_image_is_no_pair_with_its_copy(tmp_path):
    for number in range(80):
        path = tmp_path / "data" / f"{number // 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded_image(number // 2))
    write_pairs(sample_pairs(tmp_path / "data", 160), tmp_path / "a.bin")
    images, _ = read_bin(tmp_path / "a.bin")
    assert all(one != other for one, other in zip(images[::2], images[1::2], strict=True))


def test_sampled_pairs_have_no_image_that_evaluation_cannot_read(tmp_path):
    images = [encoded_image(number, 16) for number in range(63)]
    images[0] = b"damaged"
    for number, image in enumerate(images):
        path = tmp_path / "data" / f"{number // 3:02}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    with pytest.raises(ImageError, match=r"00/0\.png: .*7 bytes"):
        write_pairs(sample_pairs(tmp_path / "data", 80), tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_the_files_of_a_replaced_set_do_not_remain_beside_the_new_one(tmp_path):
    data = write_records(tmp_path / "data", [person for person in range(20) for _ in range(2)])
    for name in ("groups.csv", "subjects.csv", "landmarks.npy"):
        (tmp_path / f"a.{name}").write_text("of another set")
    write_pairs(sample_pairs(data, 20), tmp_path / "a.bin")
    assert sorted(path.name for path in tmp_path.glob("a.*")) == ["a.bin", "a.subjects.csv"]


class Killed(BaseException):
    pass


def test_a_command_that_is_killed_leaves_no_set_with_the_tables_of_another_or_without_its_own(
    tmp_path, monkeypatch
):
    images = [encoded_image(number) for number in range(8)]

    def written(folder, first):
        """Write a set with all its tables; return its files."""
        folder.mkdir(exist_ok=True)
        chosen = images[first : first + 4]
        pairs = PairsToWrite(
            [True, False],
            chosen.__getitem__,
            subjects=["a", "a", "b", f"{first}"],
            groups=f"group\n{first}\n{first}\n",
            landmarks_N52=np.full((4, 5, 2), first / 8, np.float32),
        )
        write_pairs(pairs, folder / "a.bin", workers=1)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    old, new = (written(tmp_path / str(first), first) for first in (0, 4))
    assert len(old) == len(new) == 4 and old.keys() == new.keys()
    replace, unlink = os.replace, Path.unlink
    for moment in itertools.count():
        changes = itertools.count()

        def at_moment(change, *arguments, changes=changes, moment=moment, **options):
            if next(changes) >= moment:
                raise Killed
            change(*arguments, **options)

        folder = tmp_path / f"killed {moment}"
        written(folder, 0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", partial(at_moment, replace))
            patch.setattr(Path, "unlink", partialmethod(partial(at_moment, unlink)))
            with suppress(Killed):
                written(folder, 4)
        found = {path.name: path.read_bytes() for path in folder.glob("a.*")}
        assert "a.bin" not in found or found in (old, new), f"killed before change {moment}"
        if found == new:
            break
    assert moment > 4
