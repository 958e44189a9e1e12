import time

import cv2
import numpy as np
import pytest

from facetrain.data.decode import decode_rgb
from facetrain.data.formats.bin import read_bin
from facetrain.data.open_dataset import open_dataset
from facetrain.data.synthetic import write_dataset
from facetrain.data.synthetic.capture_conditions import draw_conditions
from facetrain.data.synthetic.draw import draw_face
from facetrain.data.synthetic.identity import draw_identity
from facetrain.data.synthetic.image_cache import ImageCache
from facetrain.data.synthetic.lazy_dataset import LazyDataset, writing_beside
from facetrain.data.synthetic.write import draw_pairs
from facetrain.errors import DataError
from facetrain.verify.fold_accuracy import fold_accuracy

SMALL = {"identities": 3, "images_per_identity": 4, "eval_identities": 12, "eval_pairs": 40, "image_size": 48}


def test_the_same_seed_draws_the_same_bytes_whatever_the_number_of_workers(tmp_path):
    one = write_dataset(tmp_path / "one", workers=1, **SMALL)
    two = write_dataset(tmp_path / "two", workers=2, **SMALL)
    write_dataset(tmp_path / "other", workers=1, seed=1, **SMALL)
    assert (one.images, one.pairs) == (two.images, two.pairs) == (12, 40)
    for name in ("train.rec", "train.idx", "property", "synth.bin"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "train.rec").read_bytes() != (tmp_path / "other" / "train.rec").read_bytes()


def test_what_is_written_is_a_dataset_whose_pairs_show_other_people(tmp_path):
    write_dataset(tmp_path / "data", workers=1, **SMALL)
    source = open_dataset(tmp_path / "data")
    assert (source.num_images, source.num_classes) == (12, 3)
    images, same = read_bin(tmp_path / "data" / "synth.bin")
    trained = {source.read(number) for number in range(12)}
    assert not trained & set(images)
    assert same.sum() == 20 and all(same[fold * 4 : fold * 4 + 4].sum() == 2 for fold in range(10))
    assert decode_rgb(images[0], location="x").shape == (48, 48, 3)


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="is there already"):
        write_dataset(tmp_path / "data", workers=1, **SMALL)
    with pytest.raises(DataError, match="multiple of 20"):
        write_dataset(tmp_path / "other", workers=1, **(SMALL | {"eval_pairs": 30}))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="Not a directory"):
        write_dataset(tmp_path / "file" / "data", workers=1, **SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "file"]


def on_demand(folder, **changes):
    sizes = {name: (SMALL | changes)[name] for name in ("identities", "images_per_identity", "image_size")}
    return LazyDataset(folder, seed=0, **sizes)


def test_images_drawn_on_demand_are_those_of_the_files_and_come_from_them_once_they_stand(tmp_path):
    folder = tmp_path / "data"
    source = on_demand(folder)
    drawn = [source.read(number) for number in range(source.num_images)]
    with writing_beside(source, folder, seed=0, **SMALL) as wait:
        wait()
    written = open_dataset(folder)
    assert drawn == [written.read(number) for number in range(12)] == [source.read(n) for n in range(12)]
    assert (source.num_classes, source.labels.tolist()) == (3, written.labels.tolist())
    assert source.location(5).endswith("data: image 1 of drawn person 1")
    (folder / "train.rec").write_bytes(b"")
    with pytest.raises(DataError):
        on_demand(folder).read(0)


def test_what_one_process_has_drawn_no_other_draws_again(tmp_path):
    source = on_demand(tmp_path / "data")
    source._album.put(5, b"drawn before")
    with writing_beside(source, tmp_path / "data", seed=0, **SMALL) as wait:
        wait()
    written = open_dataset(tmp_path / "data")
    assert written.read(5) == b"drawn before" and source._album.get(4) == written.read(4)
    assert [path.name for path in tmp_path.iterdir()] == ["data"], "the album has no name"


def test_an_album_keeps_what_fits_and_is_done_without_where_there_is_no_room_for_it(tmp_path):
    album = ImageCache.beside(tmp_path / "new" / "data", place=20)
    album.put(7, b"sixteen letters.")
    album.put(3, b"seventeen letters")
    assert [album.get(number) for number in (7, 3, 0, 9)] == [b"sixteen letters.", None, None, None]
    (tmp_path / "file").write_text("in the way")
    assert ImageCache.beside(tmp_path / "file" / "data", place=20) is None
    assert on_demand(tmp_path / "file" / "data").read(1) == on_demand(tmp_path / "data").read(1)


def test_pairs_drawn_at_once_are_those_of_the_file(tmp_path):
    write_dataset(tmp_path / "data", workers=1, **SMALL)
    names = ("eval_identities", "eval_pairs", "image_size")
    images, same = draw_pairs(**{name: SMALL[name] for name in names}, seed=0, workers=1)
    written, same_there = read_bin(tmp_path / "data" / "synth.bin")
    assert images == written and np.array_equal(same, same_there)


def test_a_writer_that_is_not_waited_for_leaves_nothing_and_one_that_fails_says_so(tmp_path, capfd):
    many = {"identities": 10**6}
    with writing_beside(on_demand(tmp_path / "data", **many), tmp_path / "data", seed=0, **SMALL | many):
        while not list(tmp_path.iterdir()):
            time.sleep(0.01)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("in the way")
    blocked = tmp_path / "file" / "data"
    with writing_beside(on_demand(blocked), blocked, seed=0, **SMALL) as wait:
        wait()
    assert "warning: the drawn images were not kept" in capfd.readouterr().err


def baseline_accuracy(features, same):
    distance = np.square(features[0::2] - features[1::2]).reshape(len(same), -1).sum(1)
    return fold_accuracy(distance / distance.max() * 3.99, same).mean


def test_neither_colors_nor_raw_pixels_tell_people_apart():
    random = np.random.default_rng(0)
    pictures, same = [], np.arange(300) % 2 == 0
    for of_one_person in same:
        first = int(random.integers(200))
        for identity in (first, first if of_one_person else (first + 1 + int(random.integers(198))) % 200):
            conditions = draw_conditions(0, identity, int(random.integers(1000)))
            pictures.append(draw_face(draw_identity(0, identity), conditions, 64))
    images = np.stack(pictures).astype(np.float64)
    small = np.stack([cv2.resize(image, (16, 16), interpolation=cv2.INTER_AREA) for image in images])
    normed = small - small.mean((1, 2, 3), keepdims=True)
    normed /= np.linalg.norm(normed.reshape(len(normed), -1), axis=1)[:, None, None, None]
    for features in (images.mean((1, 2)), images, small, normed):
        assert baseline_accuracy(features, same) < 0.75


def test_a_person_looks_different_from_image_to_image():
    person = draw_identity(0, 1)
    pictures = [draw_face(person, draw_conditions(0, 1, number)) for number in range(3)]
    assert pictures[0].shape == (112, 112, 3) and pictures[0].dtype == np.uint8
    assert not np.array_equal(pictures[0], pictures[1])
