"""Index of lists: its results beside the exact ones, and the index on the disk."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from facetrain.cli.app import app
from facetrain.embeddings import ivf_index
from facetrain.embeddings.embedding_files import Embeddings, save_embeddings
from facetrain.embeddings.exact_search import Found, search_exactly
from facetrain.embeddings.ivf_index import IvfIndex, build_ivf, default_nlist, recall
from facetrain.embeddings.stored_embeddings import StoredEmbeddings, open_embeddings
from facetrain.errors import DataError

pytest.importorskip("faiss")


def stored(rows, path="p.npz"):
    return StoredEmbeddings.of(embeddings(rows), Path(path))


def embeddings(rows):
    return Embeddings(rows, [f"{n // 2}.jpg" for n in range(len(rows))], np.arange(len(rows)))


def people(count=1500, size=16):
    random = np.random.default_rng(0)
    center = random.normal(size=(count // 10, size))
    gallery = (np.repeat(center, 10, 0) + 0.5 * random.normal(size=(count, size))).astype(np.float32)
    return (gallery[::50] + 0.3 * random.normal(size=(count // 50, size))).astype(np.float32), gallery


def test_all_lists_give_the_exact_results_and_few_lists_most_of_them(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ivf_index, "_SHARD_ROWS", 400)
    monkeypatch.setattr("facetrain.embeddings.stored_embeddings.BLOCK_BYTES", 4 * 16 * 100)
    probe, gallery = people()
    save_embeddings(tmp_path / "g.npz", embeddings(gallery), "float16")
    entries = open_embeddings(tmp_path / "g.npz")
    build_ivf(entries, tmp_path / "built", 20)
    assert sorted(path.name for path in (tmp_path / "built").iterdir()) == [
        "facts.json",
        "index.faiss",
        "lists.ivfdata",
    ]
    shutil.move(tmp_path / "built", tmp_path / "moved")
    index, exact = IvfIndex(tmp_path / "moved", entries), search_exactly(stored(probe), entries, 5)
    found = index.search(stored(probe), 5, 20)
    np.testing.assert_array_equal(found.row_QK, exact.row_QK)
    np.testing.assert_array_equal(found.cosine_QK, exact.cosine_QK)
    few = index.search(stored(probe), 5, 2)
    assert 0.6 < recall(few, exact) < 1 and recall(few, exact) < recall(
        index.search(stored(probe), 5, 8), exact
    )
    assert capfd.readouterr().out == ""


def test_lists_with_fewer_entries_than_results_leave_places_empty(tmp_path):
    probe, gallery = people(100)
    entries = stored(gallery)
    build_ivf(entries, tmp_path / "i", 50)
    found = IvfIndex(tmp_path / "i", entries).search(stored(probe), 60, 1)
    assert (found.row_QK[:, -1] == -1).all() and np.isneginf(found.cosine_QK[:, -1]).all()
    assert (found.row_QK[:, 0] >= 0).all()


def test_an_index_of_another_gallery_is_refused(tmp_path):
    _, gallery = people(100)
    build_ivf(stored(gallery), tmp_path / "i", 4)
    for other in (gallery[:50], gallery[::-1].copy(), gallery[:, :8].copy()):
        with pytest.raises(DataError, match=r"i: index of another gallery.*remove the folder"):
            IvfIndex(tmp_path / "i", stored(other))


def test_a_folder_without_an_index_is_refused_in_one_line(tmp_path):
    _, gallery = people(100)
    with pytest.raises(DataError, match="no index of facetrain search"):
        IvfIndex(tmp_path, stored(gallery))
    (tmp_path / "facts.json").write_text("{}")
    with pytest.raises(DataError, match="not an index"):
        IvfIndex(tmp_path, stored(gallery))
    build_ivf(stored(gallery), tmp_path / "i", 4)
    (tmp_path / "i" / "index.faiss").write_bytes(b"none")
    with pytest.raises(DataError, match="build the index again") as caught:
        IvfIndex(tmp_path / "i", stored(gallery))
    assert "\n" not in str(caught.value)


def test_lists_that_end_early_are_refused(tmp_path):
    probe, gallery = people(100)
    build_ivf(stored(gallery), tmp_path / "i", 4)
    lists = tmp_path / "i" / "lists.ivfdata"
    lists.write_bytes(lists.read_bytes()[:100])
    with pytest.raises(DataError, match=r"lists.ivfdata: has 100 of [\d,]+ bytes; remove the folder"):
        IvfIndex(tmp_path / "i", stored(gallery)).search(stored(probe), 5, 4)


def test_the_recall_of_many_results_needs_little_memory():
    many = np.tile(np.arange(20_000), (2, 1))
    exact, half = Found(many, many / 1e6), Found(np.where(many % 2, many, -1)[:, ::-1], many / 1e6)
    tracemalloc.start()
    assert recall(exact, exact) == 1 and recall(half, exact) == 0.5
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_more_lists_than_entries_are_refused(tmp_path):
    with pytest.raises(DataError, match="choose a smaller --nlist"):
        build_ivf(stored(people(100)[1]), tmp_path / "i", 101)
    assert not (tmp_path / "i").exists()


def test_the_number_of_lists_grows_with_the_root_of_the_gallery():
    assert [default_nlist(n) for n in (1, 100, 10_000, 1_000_000, 10_000_000)] == [1, 1, 128, 2048, 8192]


def test_two_searches_may_build_the_index_at_the_same_time(tmp_path, capfd, monkeypatch):
    _, gallery = people(400)
    save_embeddings(tmp_path / "g.npz", embeddings(gallery))
    sample = ivf_index._sample_digest
    others = [lambda: build_ivf(open_embeddings(tmp_path / "g.npz"), tmp_path / "g.npz.ivf", 6)]

    def build_another_first(entries):
        if others:
            others.pop()()
        return sample(entries)

    # Called when the index is complete, before its folder gets its name.
    monkeypatch.setattr(ivf_index, "_sample_digest", build_another_first)
    files = [str(tmp_path / "g.npz")] * 2
    app(["search", *files, "--index", "ivf", "--top", "1", "--json"], standalone_mode=False)
    assert len(json.loads(capfd.readouterr().out)) == 400 and not others
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.npz", "g.npz.ivf"]


def test_search_builds_the_index_once_and_reports_its_recall(tmp_path, capfd, monkeypatch):
    probe, gallery = people(400)
    save_embeddings(tmp_path / "g.npz", embeddings(gallery))
    save_embeddings(tmp_path / "p.npz", embeddings(probe))

    def run(index):
        files = (str(tmp_path / name) for name in ("g.npz", "p.npz"))
        lists = ["--nprobe", "6", "--nlist", "6", "--recall"] if index == "ivf" else []
        app(["search", *files, "--top", "3", "--index", index, *lists, "--json"], standalone_mode=False)
        return capfd.readouterr()

    exact = run("exact")
    assert run("flat").out == exact.out
    found = run("ivf")
    assert found.out == exact.out and "recall 1.0000 of the exact results, 8 probes, 6 lists" in found.err
    monkeypatch.setattr(ivf_index, "build_ivf", lambda *_, **__: pytest.fail("built again"))
    assert run("ivf").out == exact.out
    first = json.loads(exact.out)[0]["found"][0]
    assert first["name"] == f"{first['row'] // 2}.jpg" and first["label"] == first["row"]
