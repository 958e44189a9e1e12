import json
import pickle
import shutil
import subprocess
import sys
import tarfile
from functools import partial

import gcsfs
import numpy as np
import pytest

from facetrain.cli.app import _exit_with_error
from facetrain.data import object_blocks
from facetrain.data.build import open_training_data
from facetrain.data.images.decode import decode_rgb
from facetrain.data.loading.reader import BatchSlots, ImageReader, ReadRequest
from facetrain.data.object_blocks import ObjectPath, StoredObject
from facetrain.data.open_dataset import open_dataset
from facetrain.data.remote_dataset import (
    ObjectCache,
    dataset_path,
    forget_description,
    object_versions,
    remarks_on_reading,
)
from facetrain.data.settings import DataSettings
from facetrain.errors import DataError
from facetrain.remote import filesystem
from facetrain.remote.filesystem import open_filesystem
from facetrain.remote.listing import version_token
from tests.support.datasets import encoded_image, images_of, write_records
from tests.support.object_store import upload
from tests.support.waiting import wait_until

LABELS = [label for label in range(6) for _ in range(5)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    monkeypatch.setattr(object_blocks, "BLOCK_BYTES", 1 << 11)
    monkeypatch.setattr(filesystem, "FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def write_tar(folder):
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"shard-{shard:06}.tar", "w") as archive:
            for number in range(shard, len(LABELS), 2):
                _add(archive, f"{LABELS[number]:02}/{number}.png", encoded_image(number), folder)


def _add(archive, name, data, folder):
    path = folder / "member"
    path.write_bytes(data)
    archive.add(path, name)
    path.unlink()


def write_parquet(folder):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    images = [encoded_image(number) for number in range(len(LABELS))]
    for name, options in {"a": {"compression": "none", "use_dictionary": False}, "b": {}}.items():
        table = pyarrow.table({"image": images, "label": LABELS})
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=7, **options)


WRITERS = {
    "records": lambda folder: write_records(folder, LABELS),
    "tar": write_tar,
    "parquet": write_parquet,
}


def open_remote(url, cache, **settings):
    return open_training_data(DataSettings(train=url, cache=str(cache), **settings))


def block_bytes(cache):
    return sum(path.stat().st_size for path in (cache / "blocks").rglob("*") if path.is_file())


@pytest.mark.parametrize("format", WRITERS)
def test_a_remote_dataset_is_the_one_on_the_disk(format, object_store, tmp_path):
    WRITERS[format](tmp_path / "faces")
    expected = open_dataset(tmp_path / "faces")
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache")
    assert images_of(remote) == images_of(expected)
    assert images_of(pickle.loads(pickle.dumps(remote))) == images_of(expected)
    index = np.arange(expected.num_images)
    assert np.array_equal(remote.places(index), expected.places(index))
    assert [remote.name(number) for number in index] == [expected.name(number) for number in index]


def test_blocks_and_catalog_are_read_once_and_no_more_than_the_images_need(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    url = upload(tmp_path / "faces")
    images = images_of(open_remote(url, tmp_path / "cache"))
    object_store.requests.clear()
    again = open_remote(url, tmp_path / "cache")
    assert images_of(again) == images
    assert not [request for request in object_store.requests if request[0] == "GET" and request[2]]


def test_an_announced_range_is_fetched_by_few_requests_and_read_without_one(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS * 4)
    expected = [data for _, data in images_of(open_dataset(tmp_path / "faces"))]
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / "blocks")
    (tmp_path / "cache" / "blocks").mkdir()
    object_store.requests.clear()
    remote.prefetch(10, 60)
    stored = remote.opened(0)._object
    _, start, end = remote._extents(slice(10, 70))
    needed = range(start[0] // 2048, -(-end[-1] // 2048))
    wait_until(lambda: all(stored._is_cached(number) for number in needed))
    ranges = [request for request in object_store.requests if request[2]]
    assert len(ranges) == len({number // 16 for number in needed})
    object_store.requests.clear()
    assert [remote.read(number) for number in range(10, 70)] == expected[10:70]
    assert not object_store.requests


@pytest.mark.slow
def test_the_cache_stays_within_its_bound_and_every_image_is_right(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS * 4)
    expected = images_of(open_dataset(tmp_path / "faces"))
    limit = 20_000
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache", cache_bytes=limit)
    assert remote.opened(0).size > 4 * limit
    rng, largest = np.random.default_rng(0), 0
    for number in rng.permutation(remote.num_images).tolist():
        assert (int(remote.labels[number]), remote.read(number)) == expected[number]
        largest = max(largest, block_bytes(tmp_path / "cache"))
    assert limit // 2 < largest <= limit


@pytest.mark.slow
def test_many_processes_read_the_same_through_one_small_cache(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    expected = images_of(open_dataset(tmp_path / "faces"))
    limits, url = (100, 10_000), upload(tmp_path / "faces")
    remotes = [open_remote(url, tmp_path / f"cache_{limit}", cache_bytes=limit) for limit in limits]
    (tmp_path / "pickled").write_bytes(pickle.dumps(remotes))
    script = (
        "import pickle, sys\n"
        "from facetrain.data import object_blocks\n"
        "object_blocks.BLOCK_BYTES = 1 << 11\n"
        "images = []\n"
        "for dataset in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    dataset.prefetch(0, dataset.num_images)\n"
        "    images.append([dataset.read(number) for number in range(dataset.num_images)])\n"
        "assert 'torch' not in sys.modules\n"
        "sys.stdout.buffer.write(pickle.dumps(images))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path / "pickled"], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in processes:
        images = pickle.loads(process.communicate()[0])
        assert process.returncode == 0 and images == [[image for _, image in expected]] * len(limits)
    assert all(block_bytes(tmp_path / f"cache_{limit}") <= limit for limit in limits)


def damaged_once(damage):
    """Return a lie of the store: the first answer is damaged, the others are right."""
    answers = iter([damage])
    return lambda body: next(answers, bytes)(body)


@pytest.mark.parametrize("format", WRITERS)
def test_a_block_that_the_disk_has_damaged_is_fetched_again(format, object_store, tmp_path):
    WRITERS[format](tmp_path / "faces")
    expected = images_of(open_dataset(tmp_path / "faces"))
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache")
    assert images_of(remote) == expected
    for block in (path for path in (tmp_path / "cache" / "blocks").rglob("*") if path.is_file()):
        data = bytearray(block.read_bytes())
        data[len(data) // 2] ^= 1
        block.write_bytes(data)
    (tmp_path / "cache" / "used").write_bytes(b"1\xff")
    assert images_of(remote) == expected
    assert (tmp_path / "cache" / "used").read_text().isdecimal()


def test_images_are_read_without_the_cache_while_its_limit_is_damaged(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / "blocks")
    (tmp_path / "cache" / "blocks").mkdir()
    (tmp_path / "cache" / "limit").write_bytes(b"\xff")
    in_another_process = pickle.loads(pickle.dumps(remote))
    assert images_of(in_another_process) == images_of(open_dataset(tmp_path / "faces"))
    assert not block_bytes(tmp_path / "cache")


@pytest.mark.parametrize("reverse", [False, True])
def test_all_blocks_of_a_record_that_makes_no_sense_are_fetched_again(reverse, object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS, size=40)
    index = tmp_path / "faces" / "train.idx"
    lines = index.read_text().splitlines(keepends=True)
    if reverse:  # the next image is before this one in the file
        keys = [line.split()[0] for line in lines[1:31]]
        places = [line.split()[1] for line in lines[30:0:-1]]
        lines[1:31] = [f"{key}\t{place}\n" for key, place in zip(keys, places, strict=True)]
        index.write_text("".join(lines))
    expected = images_of(open_dataset(tmp_path / "faces"))
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache")
    stored, offsets = remote.opened(0)._object, remote.columns.arrays["offset"]
    for number in (3, 29):
        end = int(offsets[number]) + len(expected[number][1])
        blocks = range(int(offsets[number]) // 2048, end // 2048 + 1)
        assert len(blocks) > 1
        for block in blocks:
            stored._store(block, bytes(stored._block_size(block)))
        assert (int(remote.labels[number]), remote.read(number)) == expected[number]


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: bytes(len(body)),
        lambda body: body[:-1],
        lambda body: body + b"x",
        lambda body: body[::-1],
    ],
)
def test_a_wrong_answer_that_passes_is_asked_for_again(damage, object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    expected = images_of(open_dataset(tmp_path / "faces"))
    url = upload(tmp_path / "faces")
    object_store.lie = damaged_once(damage)
    remote = open_remote(url, tmp_path / "cache")
    assert images_of(remote) == expected
    shutil.rmtree(tmp_path / "cache" / "blocks")
    (tmp_path / "cache" / "blocks").mkdir()
    object_store.lie = damaged_once(damage)
    assert images_of(remote) == expected


@pytest.mark.parametrize(
    "damage",
    [lambda body: bytes(len(body)), lambda body: body[:-1], lambda body: body + b"x"],
    ids=["zeros", "short", "long"],
)
def test_a_store_that_keeps_lying_is_an_error(damage, object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache", cache_bytes=100)
    object_store.lie = damage
    with pytest.raises(DataError, match=r"train\.rec"):
        images_of(remote)


def test_an_index_that_was_damaged_on_its_way_is_not_kept(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    url = upload(tmp_path / "faces")
    for damage in (lambda body: body[:-1], lambda body: bytes(len(body))):
        object_store.lie = damage
        with pytest.raises(DataError):
            open_remote(url, tmp_path / "cache")
        assert not list((tmp_path / "cache" / "datasets").iterdir())
    object_store.lie = None
    assert images_of(open_remote(url, tmp_path / "cache")) == images_of(open_dataset(tmp_path / "faces"))


def test_a_description_is_removed_from_a_cache_folder_with_a_space_in_its_path(tmp_path):
    description = tmp_path / "my cache" / "datasets" / "0123456789abcdef"
    path = ObjectPath(description, "s3", "bucket", "faces")
    path.mkdir(parents=True)
    forget_description(path)
    assert not description.exists() and description.parent.is_dir()


def test_a_store_that_answers_too_late_is_an_error(object_store, tmp_path, monkeypatch):
    write_records(tmp_path / "faces", LABELS)
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache", cache_bytes=100)
    monkeypatch.setattr(filesystem, "PATIENCE_S", 0.05)
    object_store.latency_s = 0.5
    with pytest.raises(DataError, match=r"train\.rec"):
        images_of(remote)


def test_an_image_that_cannot_be_decoded_is_fetched_again(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache")
    slots = BatchSlots(1, 4, 16)
    reader = ImageReader(remote, slots, skip_bad=False)
    whole = remote.read(3)
    shutil.rmtree(tmp_path / "cache" / "blocks")
    (tmp_path / "cache" / "blocks").mkdir()
    object_store.lie = damaged_once(lambda body: body.replace(whole[10:], bytes(len(whole) - 10)))
    assert reader.read(ReadRequest(0, 0, (3,))).error is None
    assert np.array_equal(slots.image[0, 0], decode_rgb(whole, location=""))


def test_a_changed_object_is_an_error_for_who_reads_it_and_new_for_who_opens_it(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    url = upload(tmp_path / "faces")
    remote = open_remote(url, tmp_path / "cache", cache_bytes=100)
    before = remote.read(0), object_versions(remote)
    write_records(tmp_path / "other", LABELS[::-1])
    upload(tmp_path / "other")
    for dataset in (remote, pickle.loads(pickle.dumps(remote))):
        with pytest.raises(DataError, match=r"^s3://bucket/faces/train.rec: "):
            dataset.read(1)
    again = open_remote(url, tmp_path / "cache")
    assert images_of(again) == images_of(open_dataset(tmp_path / "other"))
    assert object_versions(again) != before[1]


class GoogleStore:
    """A zonal bucket of Google in memory without old versions, read by the file of gcsfs."""

    generation, metageneration, content = "1", "1", b"old"
    split_path = staticmethod(partial(gcsfs.GCSFileSystem._split_path, version_aware=True))

    def info(self, path, **_):
        versions = {"etag": f"e{self.generation}.{self.metageneration}", "generation": self.generation}
        return versions | {"size": len(self.content), "name": path, "type": "file"}

    def cat_file(self, path, start, end, generation=None, **_):
        if self.split_path(path)[2] not in (None, self.generation):
            raise FileNotFoundError(path)
        return self.content[start:end]

    def open(self, path, mode, **options):
        return gcsfs.core.GCSFile(self, path, mode, **options)


def test_a_changed_object_of_a_google_store_is_an_error(tmp_path, monkeypatch):
    store = GoogleStore()
    monkeypatch.setattr(object_blocks, "open_filesystem", lambda url: (store, "bucket/train.rec"))
    (tmp_path / "locks").mkdir()
    version = version_token(store.info("bucket/train.rec"))
    store.metageneration = "2"  # such as by a hold on the object
    stored = StoredObject("gs://bucket/train.rec", version, 3, str(tmp_path))
    assert stored.bytes_at(0, 2) == b"ol"
    store.generation, store.content = "2", b"new"
    with pytest.raises(DataError, match="the object was changed while the run read it"):
        stored.bytes_at(2, 1)


def test_a_removed_object_is_an_error(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    remote = open_remote(upload(tmp_path / "faces"), tmp_path / "cache", cache_bytes=100)
    open_filesystem("s3://bucket")[0].rm_file("bucket/faces/train.rec")
    with pytest.raises(DataError, match=r"^s3://bucket/faces/train.rec: "):
        remote.read(1)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train.rec"], "has no train.idx"),
        (["1.jpg", "list.lst"], "not a dataset that is read in place"),
        ([], "not found"),
    ],
)
def test_what_cannot_be_read_in_place_is_refused_with_one_line(names, message, object_store, tmp_path):
    for name in names:
        open_filesystem("s3://bucket")[0].pipe_file(f"bucket/faces/{name}", b"x")
    with pytest.raises(DataError, match=rf"^s3://bucket/faces: {message}.*") as caught:
        open_remote("s3://bucket/faces", tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_damaged_archive_is_named_by_its_address(object_store, web_server, tmp_path, capfd):
    write_tar(tmp_path / "faces")
    half = (tmp_path / "faces" / "shard-000000.tar").read_bytes()[:5000]
    open_filesystem("s3://bucket")[0].pipe_file("bucket/faces.tar", half)
    web_server.files["/faces.tar"] = half
    for url in ("s3://bucket/faces.tar", f"{web_server.address}/faces.tar"):
        with pytest.raises(DataError) as caught:
            open_remote(url, tmp_path / "my cache")
        with pytest.raises(SystemExit):
            _exit_with_error(caught.value)
        printed = capfd.readouterr().err
        assert printed.splitlines()[-1].startswith(f"error: {url}: ") and str(tmp_path) not in printed


def test_small_files_beside_the_objects_count_as_on_a_disk(object_store, tmp_path):
    folder = write_records(tmp_path / "faces", LABELS)
    (folder / "property").write_text("9,16,16\n")
    (folder / "identities.csv").write_text("identity,name\n" + "".join(f"{n},name{n}\n" for n in range(6)))
    np.save(folder / "landmarks.npy", np.full((len(LABELS), 5, 2), 0.5, np.float32))
    remote = open_remote(upload(folder), tmp_path / "cache")
    assert remote.num_classes == 9 and remote.identity_name(3) == "name3"
    assert remote.landmarks.shape == (len(LABELS), 5, 2)


def test_a_mixture_may_have_remote_parts(object_store, tmp_path):
    write_records(tmp_path / "one", LABELS)
    write_records(tmp_path / "two", LABELS[:10])
    url = upload(tmp_path / "two")
    for name, path in (("local", "two"), ("remote", url)):
        text = json.dumps({"datasets": [{"path": "one"}, {"path": path}]})
        (tmp_path / f"{name}.yaml").write_text(text)
    cache = ObjectCache(tmp_path / "cache")
    remote = open_dataset(tmp_path / "remote.yaml", cache=cache, min_images_per_identity=2)
    assert images_of(remote) == images_of(open_dataset(tmp_path / "local.yaml"))
    assert [each[0] for each in object_versions(remote)] == [f"{url}/train.rec"]
    assert block_bytes(tmp_path / "cache")


def test_a_file_of_other_people_cannot_lead_to_an_object(object_store, tmp_path):
    write_tar(tmp_path / "faces")
    path = dataset_path(upload(tmp_path / "faces"), ObjectCache(tmp_path / "cache"))
    shutil.copytree(path, tmp_path / "copied")
    with pytest.raises(DataError, match="copied"):
        open_dataset(tmp_path / "copied")


def test_slow_reading_is_remarked(object_store, tmp_path):
    write_records(tmp_path / "faces", LABELS)
    url = upload(tmp_path / "faces")
    source = open_remote(url, tmp_path / "cache")
    (line,) = remarks_on_reading(source, cache_bytes=10, shuffle="full")
    assert "use data.shuffle: blocks" in line
    for cache_bytes, shuffle in ((10, "blocks"), (1 << 20, "full")):
        assert not list(remarks_on_reading(source, cache_bytes=cache_bytes, shuffle=shuffle))


def test_a_read_only_cache_folder_is_one_line(object_store, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=rf"^{tmp_path}/cache.*data\.cache"):
        open_remote("s3://bucket/faces", tmp_path / "cache")
