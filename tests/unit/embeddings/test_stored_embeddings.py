"""Embeddings read from their file in blocks."""

from dataclasses import replace

import numpy as np
import pytest

from facetrain.embeddings import embedding_npz, embeddings
from facetrain.embeddings.embedding_files import open_embeddings, save_embeddings
from facetrain.embeddings.embeddings import Embeddings
from facetrain.errors import DataError
from tests.support.bombs import write_equal_embeddings
from tests.support.embeddings import load_rows
from tests.support.memory import resident_peak


def some(count=50, size=8):
    rows = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    length = np.linalg.norm(rows, axis=1)
    names = [f"ä{'x' * (n % 5)} {n // 2}.jpg" for n in range(count)]  # some are equal
    return Embeddings(
        rows / length[:, None],
        names,
        np.arange(count) - 1,
        quality=length,
        model=rows[0] / length[0],
        flip=False,
    )


@pytest.mark.parametrize("suffix", [".npz", ".parquet", "compressed", "columns first"])
def test_columns_are_those_that_were_written_and_rows_are_read_in_any_order(tmp_path, monkeypatch, suffix):
    known, path = some(), tmp_path / "e.npz"
    arrays = {"embedding": known.embedding, "name": known.name, "label": known.label}
    if suffix == "compressed":
        np.savez_compressed(path, **arrays)
    elif suffix == "columns first":
        np.savez(path, **arrays | {"embedding": np.asfortranarray(known.embedding)})
    else:
        if suffix == ".parquet":
            pytest.importorskip("pyarrow")
        save_embeddings(path := path.with_suffix(suffix), known)
    monkeypatch.setattr(embedding_npz, "_READ_ROWS", 7)
    found = open_embeddings(path)
    assert (found.count, found.size) == (50, 8)
    for start, stop in ((0, 3), (3, 20), (30, 30), (36, 37), (6, 99), (14, 21)):
        np.testing.assert_array_equal(found.rows(start, stop), known.embedding[start:stop])
    assert list(found.name) == known.name and list(found.label) == known.label.tolist()
    if suffix.startswith("."):
        np.testing.assert_array_equal(found.quality, known.quality)
        np.testing.assert_array_equal(found.model, known.model)
        assert found.flip is False
    else:
        assert found.quality is found.model is found.flip is None and found.usable(0).all()


@pytest.mark.parametrize(
    ("quality", "usable"),
    [([2.0, None, 1.0], [True, False, False]), (["good", "bad", "bad"], None), ([[3.0]] * 3, None)],
)
def test_a_quality_of_another_program_counts_if_it_is_one_number_for_each_image(tmp_path, quality, usable):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"embedding": [[1.0, 2.0]] * 3, "name": ["a", "b", "c"], "label": [0, 1, 2], "quality": quality}
    pq.write_table(pa.table(columns), tmp_path / "e.parquet")
    np.savez(tmp_path / "e.npz", **columns | {"quality": np.array(quality, float if usable else None)})
    for suffix in ("npz", "parquet"):
        found = open_embeddings(tmp_path / f"e.{suffix}")
        assert found.model is None
        assert found.quality is None if usable is None else found.usable(2).tolist() == usable


@pytest.mark.parametrize("model", ["no JSON", '{"a": 1}', "[1, 2, 3]"])
def test_a_fingerprint_of_another_form_counts_as_unknown(tmp_path, model):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"embedding": [[1.0, 2.0]], "name": ["a"], "label": [0]}
    pq.write_table(pa.table(columns, metadata={"facetrain.model": model}), tmp_path / "e.parquet")
    assert open_embeddings(tmp_path / "e.parquet").model is None


def test_a_row_that_is_not_finite_is_named_by_its_place_in_the_file():
    row_ND = np.ones((6, 4))
    row_ND[4] = np.inf
    stored = Embeddings(row_ND, list("abcdef"), np.arange(6))
    assert stored.rows(0, 4).shape == (4, 4)
    with pytest.raises(DataError, match=r"row 4 \(e\) has numbers that are not finite"):
        stored.rows(3, 6)


ONE = np.ones((1, 4))
NO_TEXT = np.array([b"a\0\0\0", b"\xff\xff\xff\xff"]).view("<U1")
NOT_FINITE = r"e\.npz: row 1 \(b\) has numbers that are not finite"


@pytest.mark.parametrize(
    ("embedding", "name", "label", "message"),
    [
        (np.ones((0, 4)), np.empty(0, "U1"), np.zeros(0, int), "has no embeddings"),
        (np.ones((3, 4)), ["a"], [0, 1, 2], "expected one name"),
        (np.ones((3, 4)), ["a"] * 3, [0, 1], "expected one name"),
        (np.ones(3), ["a"] * 3, [0, 1, 2], "expected one name"),
        (np.array([["x"]]), ["a"], [0], "one row of numbers"),
        (ONE, ["a"], [0.5], "labels that are whole numbers"),
        (ONE, ["a"], ["x"], "labels that are whole numbers"),
        (ONE, None, [0], "has no column name, but embedding, label; a file of embeddings has"),
        (ONE, np.array(["a"], object), [0], r"name.npy has Python objects; .* numpy\.array\(names, str\)"),
        (ONE, ["a"], np.array([0], object), "label.npy has Python objects"),
        (np.eye(2), NO_TEXT, [0, 1], r"e\.npz: has a name that is no text"),
        (ONE, np.array([b"a"]), [0], "the names must be texts"),
        (np.eye(2), np.array([["a"], ["b"]]), [0, 1], "the names must be texts"),
        *((np.array([[1, 0], [n, 1]]), ["a", "b"], [0, 1], NOT_FINITE) for n in (np.nan, np.inf)),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit_are_refused_in_one_line(tmp_path, embedding, name, label, message):
    arrays = {"embedding": embedding, "label": label} | ({} if name is None else {"name": name})
    np.savez(tmp_path / "e.npz", **arrays)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(tmp_path / "e.npz")
    assert "\n" not in str(caught.value) and str(caught.value).count("e.npz") == 1


@pytest.mark.parametrize(
    ("rows", "names", "message"),
    [
        ([], [], "no embeddings"),
        ([[1.0], [1.0, 2.0, 3.0]], ["a", "b"], "of different sizes"),
        ([[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0]], ["a", "b", "c"], "without an embedding"),
        ([[1.0], [2.0]], ["a", None], "1 row has no name"),
    ],
)
def test_rows_of_parquet_that_do_not_fit_are_refused(tmp_path, rows, names, message):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "embedding": pa.array(rows, pa.list_(pa.float32()) if rows else pa.list_(pa.float32(), 4)),
        "name": pa.array(names, pa.string()),
        "label": pa.array(range(len(rows)), pa.int64()),
    }
    pq.write_table(pa.table(columns), tmp_path / "e.parquet")
    for read in (open_embeddings, load_rows):
        with pytest.raises(DataError, match=message):
            read(tmp_path / "e.parquet")


def test_embeddings_that_another_program_has_rounded_to_whole_numbers_are_read(tmp_path):
    np.savez(tmp_path / "e.npz", embedding=np.array([[3, -4]], np.int8), name=["a"], label=[0])
    row_ND = open_embeddings(tmp_path / "e.npz").rows(0, 1)
    assert row_ND.tolist() == [[3, -4]] and row_ND.dtype == np.float32


def test_a_file_that_shrinks_is_an_error(tmp_path):
    save_embeddings(tmp_path / "e.npz", some())
    found = open_embeddings(tmp_path / "e.npz")
    with (tmp_path / "e.npz").open("r+b") as file:
        file.truncate(300)
    with pytest.raises(DataError, match=r"e\.npz: damaged"):
        found.rows(0, 50)


def test_a_flipped_bit_in_an_embedding_of_parquet_is_noticed(tmp_path):
    pytest.importorskip("pyarrow")
    save_embeddings(path := tmp_path / "e.parquet", known := some())
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(known.embedding[7, 0]).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"e\.parquet: damaged, .*checksum"):
        open_embeddings(path)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_other_programs_read_the_files(tmp_path, suffix):
    path, known = tmp_path / f"e{suffix}", some()
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
    save_embeddings(path, replace(known, stored=np.float64(known.stored), quality=np.float64(known.quality)))
    columns = np.load(path) if suffix == ".npz" else parquet.read_table(path).to_pydict()
    if suffix == ".npz":
        assert columns["embedding"].dtype == columns["quality"].dtype == np.float32
    assert list(columns["name"]) == known.name and list(columns["label"]) == known.label.tolist()
    for column in ("embedding", "quality"):
        np.testing.assert_array_equal(np.array(columns[column], np.float32), getattr(known, column))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "has no column name, but embedding, label; a file of embeddings has"),
        ({"label": None}, "has no column label, but embedding, name;"),
        ({"name": [1, 2]}, "the names must be texts, not int64"),
    ],
)
def test_columns_of_parquet_that_are_missing_or_no_texts_are_named(tmp_path, change, message):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"embedding": [[1.0, 2.0]] * 2, "name": ["a", "b"], "label": [0, 1]} | change
    table = pa.table({name: values for name, values in columns.items() if values is not None})
    pq.write_table(table, tmp_path / "e.parquet")
    with pytest.raises(DataError, match=rf"e\.parquet: {message}"):
        open_embeddings(tmp_path / "e.parquet")


def test_optional_columns_of_other_types_count_as_missing(tmp_path):
    columns = {"embedding": ONE, "name": ["a"], "label": [0]}
    np.savez(tmp_path / "e.npz", **columns, quality=None, model=None, flip=None)
    found = open_embeddings(tmp_path / "e.npz")
    assert found.quality is found.model is found.flip is None


@pytest.mark.slow
def test_one_row_of_equal_numbers_is_refused_before_it_is_decoded(tmp_path):
    pytest.importorskip("pyarrow")
    # A row of 70 million numbers in 800 bytes: decoded, it would need 270 MiB, and its levels 270 MiB more.
    path = write_equal_embeddings(tmp_path / "a.parquet", rows=1, size=70_000_000, name="x")
    refused = pytest.raises(DataError, match=r"decompresses to 280,000,000 bytes, more than")
    with resident_peak() as peak, refused:
        load_rows(path)
    assert peak.bytes < 50 << 20


def test_compressed_columns_may_be_as_small_as_those_of_an_int8_network(tmp_path, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(embeddings, "_SPARE_BYTES", 0)
    columns = {
        "embedding": (np.random.default_rng(0).integers(-127, 128, (500, 64)) / 127).astype(np.float32),
        "name": np.array([f"{number:08d}.jpg" for number in range(500)], "U60"),
        "label": np.arange(500),
    }
    np.savez_compressed(tmp_path / "e.npz", **columns)
    assert 4 * (tmp_path / "e.npz").stat().st_size < sum(column.nbytes for column in columns.values())
    # Columns that are not read may be of any size.
    lists = {name: column.tolist() for name, column in columns.items()}
    pq.write_table(
        pa.table(lists | {"note": ["x" * 10_000] * 500}), tmp_path / "e.parquet", use_dictionary=False
    )
    for suffix in (".npz", ".parquet"):
        assert open_embeddings(tmp_path / f"e{suffix}").count == 500
    np.savez_compressed(tmp_path / "e.npz", **columns | {"embedding": np.ones((500, 1000), np.float32)})
    with pytest.raises(DataError, match=r"decompresses to 2,.*; write it without compression.*numpy\.savez"):
        open_embeddings(tmp_path / "e.npz")


def test_a_changed_byte_of_an_embedding_is_found_in_the_first_pass_over_the_rows(tmp_path, monkeypatch):
    path, known = tmp_path / "e.npz", some(3000)
    save_embeddings(path, known)
    data = bytearray(path.read_bytes())
    data[data.index(known.embedding[2000].tobytes())] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(embeddings, "BLOCK_BYTES", 4 * 8 * 700)
    with pytest.raises(DataError, match=r"e\.npz: damaged.*Bad CRC-32 for file 'embedding\.npy'"):
        list(open_embeddings(path).blocks())
    with pytest.raises(DataError, match="CRC"):
        load_rows(path)
