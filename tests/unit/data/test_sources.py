import io
import json
import pickle
import tarfile

import numpy as np
import pytest

from facetrain.data.dataset import SubsetDataset
from facetrain.data.mixture import MixtureDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import MixtureSampler, build_sampler, epoch_size
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def seen(source):
    return [(int(source.labels[n]), source.read(n)) for n in range(source.num_images)]


def test_tar_shards_tell_identities_by_number(tmp_path):
    write_tar(tmp_path / "b.tar", {"2.png": encoded_image(2), "2.json": json.dumps({"label": 1}).encode()})
    write_tar(
        tmp_path / "a.tar",
        {"0.cls": b"1\n", "0.png": encoded_image(0), "1.png": encoded_image(1), "1.cls": b"0"},
    )
    for _ in range(2):  # the second time from the catalog that was kept
        source = open_dataset(tmp_path)
        assert seen(source) == [(1, encoded_image(0)), (0, encoded_image(1)), (1, encoded_image(2))]
    assert source.num_classes == 2 and "b.tar" in source.location(2)
    assert seen(pickle.loads(pickle.dumps(source))) == seen(source)


def test_tar_shards_tell_identities_by_folder(tmp_path):
    write_tar(
        tmp_path / "a.tar", {f"faces/{who}/1.jpg": encoded_image(n) for n, who in enumerate(["zoe", "ann"])}
    )
    assert seen(open_dataset(tmp_path)) == [(1, encoded_image(0)), (0, encoded_image(1))]


@pytest.mark.parametrize(
    ("members", "said"),
    [({"1.png": b"x"}, "nor a folder that names"), ({"1.png": b"x", "1.json": b"{}"}, "no identity"),
     ({}, "no images")],
)  # fmt: skip
def test_tar_shards_without_images_or_identities_are_refused(tmp_path, members, said):
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=said):
        open_dataset(tmp_path)
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b nonsense" * 99)
    with pytest.raises(DataError, match="not an uncompressed tar"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("names", [["p1", "p0", "p1"], [1, 0, 1]])
@pytest.mark.parametrize("nested", [False, True])
def test_parquet_rows_are_images(tmp_path, names, nested):
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    images = [encoded_image(n) for n in range(3)]
    column = [{"bytes": p, "path": None} for p in images] if nested else images
    table = pa.table({"image": column, "label": names})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    pq.write_table(table, tmp_path / "b.parquet")
    source = pickle.loads(pickle.dumps(open_dataset(tmp_path)))
    assert seen(source) == list(zip([1, 0, 1, 1, 0, 1], images * 2, strict=True))
    assert "a.parquet: row group 1, row 0" in source.location(2)


def test_parquet_without_the_columns_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"what": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column for the image: it has what"):
        open_dataset(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(DataError, match=r"a\.parquet"):
        open_dataset(tmp_path)


def mixture(tmp_path, text):
    write_records(tmp_path / "one", [0, 0, 1, 1, 1, 2])
    write_records(tmp_path / "two", [0, 1, 1, 1])
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    return path


def test_a_mixture_keeps_identities_apart_and_can_leave_some_out(tmp_path):
    path = mixture(tmp_path, "datasets: [{path: one, without: drop.txt}, {path: two, identities: keep.txt}]")
    (tmp_path / "drop.txt").write_text("1\n")
    (tmp_path / "keep.txt").write_text("1\n")
    source = open_dataset(path)
    assert source.labels.tolist() == [0, 0, 1, 2, 2, 2] and source.num_classes == 3
    assert [data for _, data in seen(source)] == [encoded_image(n) for n in (1, 2, 6, 2, 3, 4)]
    assert "two" in source.location(3) and "key 2" in source.location(3)


def test_lists_of_a_mixture_number_the_dataset_as_it_is_whatever_images_an_identity_must_have(tmp_path):
    write_records(tmp_path / "three", [0, 1, 1, 2, 2, 2])
    (tmp_path / "drop.txt").write_text("1\n")
    path = mixture(tmp_path, "datasets: [{path: three, without: drop.txt}]")
    left = open_dataset(path, min_images_per_identity=2)
    assert [data for _, data in seen(left)] == [encoded_image(n) for n in (4, 5, 6)]


def test_weights_say_how_often_an_epoch_shows_a_dataset(tmp_path):
    source = open_dataset(mixture(tmp_path, "datasets: [{path: one, weight: 0.5}, {path: two, weight: 2}]"))
    assert epoch_size(source) == 11
    order = build_sampler(source, seed=1, global_batch_size=1)
    first, second = (np.array([order.batch(11 * e + t)[0] for t in range(11)]) for e in range(2))
    for epoch in (first, second):
        assert np.bincount(epoch, minlength=10)[6:].tolist() == [2, 2, 2, 2]
        assert (epoch < 6).sum() == 3
    # The half that the first epoch left out is the second epoch's.
    assert sorted([*first[first < 6], *second[second < 6]]) == list(range(6))


def blocks_of_two(seed=1):
    return MixtureSampler(
        [1000, 300], [0.5, 2], seed=seed, global_batch_size=11, mode="blocks", block=16, window=4
    )


def test_a_mixture_in_blocks_shows_every_image_as_often_as_its_weight_says():
    order = blocks_of_two()
    assert order.num_images == 1100 and order.steps_per_epoch == 100
    first, second = (np.concatenate([order.batch(100 * e + t) for t in range(100)]) for e in range(2))
    for epoch in (first, second):
        assert (np.bincount(epoch[epoch >= 1000] - 1000, minlength=300) == 2).all()
        assert len(np.unique(epoch[epoch < 1000])) == 500
    assert sorted([*first[first < 1000], *second[second < 1000]]) == list(range(1000))
    assert not np.array_equal(order.batch(0), blocks_of_two(seed=2).batch(0))


def test_a_mixture_in_blocks_is_read_in_stretches_that_are_asked_for_ahead():
    order, asked, read = blocks_of_two(), set(), []
    for step in range(100):
        for start, count in order.ranges_to_prefetch(step, is_first_step=step == 0):
            asked |= set(range(start, start + count))
        batch = order.batch(step).tolist()
        assert len(set(batch) - asked) <= 300 % 16 + 1000 % 16 + 12  # those behind the last whole stretches
        read += batch
    full = MixtureSampler([1000, 300], [0.5, 2], seed=1, global_batch_size=11)
    windows = [read[start : start + 64] for start in range(0, 1024, 64)]
    scattered = np.concatenate([full.batch(step) for step in range(100)]).tolist()

    def neighbors(numbers):
        return sum(number + 1 in numbers for number in numbers)

    mixed = [scattered[start : start + 64] for start in range(0, 1024, 64)]
    assert sum(map(neighbors, windows)) > 0.8 * 1024 and sum(map(neighbors, mixed)) < 0.2 * 1024


class Noting:
    """A source that notes what it is asked to fetch."""

    def __init__(self, num_images):
        self.num_images, self.num_classes = num_images, 1
        self.labels = np.zeros(num_images, np.int64)
        self.asked = []

    def prefetch(self, first, count):
        self.asked.append((first, count))


def test_fetching_ahead_reaches_the_datasets_of_a_mixture_and_of_a_subset():
    one, two = Noting(10), Noting(20)
    MixtureDataset([one, two], [1, 1]).prefetch(6, 9)
    assert (one.asked, two.asked) == ([(6, 4)], [(0, 5)])
    whole = Noting(12)
    whole.labels = np.arange(12) // 2
    SubsetDataset(whole, [1, 2, 5]).prefetch(1, 5)
    assert whole.asked == [(3, 3), (10, 2)]


def test_a_mixed_batch_depends_on_seed_and_step_alone():
    orders = [MixtureSampler([100, 50], [1, 1.5], seed=seed, global_batch_size=7) for seed in (1, 1, 2)]
    a, b, c = (order.batch(40) for order in orders)
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("datasets: 3", "needs a list"),
        ("[1", "mix.yaml: "), ("datasets: [{path: three}]", "no such folder"),
        ("datasets: [{path: one, wait: 1}]", "has the keys .'path', 'wait'.; allowed are"),
        ("datasets: [{path: mix.yaml}]", "is itself a mixture"),
        ("datasets: [{path: one, weight: -1}]", "weight of one is -1"),
        ("datasets: [{path: one, identities: none.txt}]", "not a list of identities"),
        ("datasets: [!!python/object/apply:os.getcwd []]", "mix.yaml: "),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_followed_is_refused(tmp_path, text, said):
    with pytest.raises(DataError, match=said):
        open_dataset(mixture(tmp_path, text))
