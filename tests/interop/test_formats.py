"""Exchange of datasets with the libraries that define their formats, which `make interop` installs."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from facetrain.data.open_dataset import open_dataset
from tests.support.datasets import images_of, write_records
from tests.unit.data.tools.helpers import convert

_ROOT = Path(__file__).resolve().parents[2]
_PEERS = _ROOT / "build" / "interop-formats"


def peer(do, *args):
    """Call a function of formats_peer.py in an environment with the original libraries."""
    if not (_PEERS / "ready").exists():
        pytest.skip("the libraries of the formats are not installed; run `make interop`")
    done = subprocess.run(
        [_PEERS / "bin" / "python", "-W", "ignore", _ROOT / "tests" / "interop" / "formats_peer.py"],
        input=json.dumps({"do": do, "with": [str(one) for one in args]}),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def digests(dataset):
    return [[label, hashlib.sha256(image).hexdigest()] for label, image in images_of(dataset)]


def test_a_database_of_the_lmdb_library_is_read_identically(tmp_path):
    expected = peer("write_lmdb", tmp_path / "a.lmdb")
    assert digests(open_dataset(tmp_path / "a.lmdb")) == expected and len(expected) == 60


def test_shards_of_the_webdataset_library_are_read_identically(tmp_path):
    expected = peer("write_webdataset", tmp_path)
    subprocess.run(["gunzip", *tmp_path.glob("*.tar.gz")], check=True)
    dataset = open_dataset(tmp_path)
    assert digests(dataset) == expected and dataset.name(59) == "set/059.png"
    assert len(list(tmp_path.glob("*.tar"))) == 3


def test_parquet_that_datasets_wrote_is_read_identically(tmp_path):
    expected = peer("write_hub_parquet", tmp_path)
    dataset = open_dataset(tmp_path)
    assert digests(dataset) == expected and dataset.identity_name(3) == "d"


def test_the_webdataset_library_reads_what_we_convert(tmp_path):
    write_records(tmp_path / "in", [n * 3 % 4 for n in range(30)])
    expected = digests(open_dataset(tmp_path / "in"))
    convert(tmp_path / "in", tmp_path / "shards", "webdataset")
    assert peer("read_webdataset", tmp_path / "shards") == expected


def test_datasets_reads_the_names_of_identities_in_our_parquet(tmp_path):
    (tmp_path / "identities.csv").write_text("identity,name\n0,ann\n1,zoë\n")
    write_records(tmp_path, [1, 0, 1])
    convert(tmp_path, tmp_path / "out", "parquet")
    names, rows = peer("read_hub_parquet", tmp_path / "out")
    assert names == ["ann", "zoë"] and rows == digests(open_dataset(tmp_path))
