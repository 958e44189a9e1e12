import asyncio
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from facetrain.errors import DataError, RunError, UsageError
from facetrain.remote import download, filesystem, ranges, web_filesystem
from facetrain.remote.download import fetch, is_name, local_path, pinned
from facetrain.remote.listing import list_files

CONTENT = bytes(range(256)) * 20
CHECKSUM = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    """An empty cache, short waits and parts."""
    monkeypatch.setattr(filesystem, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(ranges, "_FIRST_PART", 1000)
    monkeypatch.setattr(ranges, "_LARGEST_PART", 2000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("FACETRAIN_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(web_server):
    web_server.files["/models/a.onnx"] = CONTENT
    return f"{web_server.address}/models/a.onnx"


def asked(web_server):
    return [span for method, _, span in web_server.requests if method == "GET"]


def files_in_cache(tmp_path):
    names = {"lock", "newest.json"}
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name not in names]


def test_a_file_is_downloaded_once_and_looked_for_again(web_server, url):
    reports, lines = [], []
    path, _ = fetch(url, lambda *numbers: reports.append(numbers), lines.append)
    assert path.name == "a.onnx" and path.read_bytes() == CONTENT
    assert reports == [(done, 5120) for done in (0, 1000, 3000, 5000, 5120)]
    assert lines == [f"{url}: 0.01 MB; terms: unknown, see its publisher"]
    assert {each["Accept-Encoding"] for each in web_server.headers} == {"identity"}
    web_server.requests.clear()
    assert fetch(url, say=lines.append)[0] == path
    assert web_server.requests == [("HEAD", "/models/a.onnx", "")] and len(lines) == 1


def test_a_program_that_downloads_says_so_on_standard_error(url, capsys):
    for _ in range(2):
        local_path(url)
    assert capsys.readouterr() == ("", f"{url}: 0.01 MB; terms: unknown, see its publisher\n")


def test_a_changed_file_is_downloaded_again_and_the_old_one_stays(web_server, url):
    old = local_path(url)
    web_server.files["/models/a.onnx"] = b"new"
    new = local_path(url)
    assert (old.read_bytes(), new.read_bytes()) == (CONTENT, b"new")
    web_server.files["/models/a.onnx"] = CONTENT
    web_server.requests.clear()
    assert local_path(url) == old and not asked(web_server)


def test_an_address_with_its_version_needs_no_network(web_server, url, tmp_path):
    exact = pinned(url)
    assert exact == f"{url}#sha256={CHECKSUM}"
    web_server.requests.clear()
    assert local_path(exact).read_bytes() == CONTENT and not web_server.requests
    shutil.rmtree(tmp_path / "cache")
    assert pinned(exact) == exact and not web_server.requests


def test_a_version_is_found_after_newer_ones(web_server, url):
    exact = pinned(url)
    web_server.files["/models/a.onnx"] = b"new"
    assert local_path(url).read_bytes() == b"new"
    assert local_path(exact).read_bytes() == CONTENT
    web_server.requests.clear()
    with pytest.raises(DataError, match="checksum"):
        local_path(f"{url}#sha256={'0' * 64}")
    assert local_path(url).read_bytes() == b"new"


def test_a_pinned_file_that_has_changed_is_an_error(web_server, url, tmp_path):
    exact = pinned(url)
    web_server.files["/models/a.onnx"] = b"new"
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match="checksum"):
        local_path(exact)
    assert files_in_cache(tmp_path) == []


def cut(web_server, url):
    """Download a file whose server closes the connection after 3,000 bytes, and is whole again afterwards."""

    def close(done, total):
        web_server.cut_after = 500 if done == 3000 else None

    with pytest.raises(DataError, match=r"a\.onnx: .*5 attempts"):
        fetch(url, close)
    web_server.cut_after = None
    web_server.requests.clear()


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_a_cut_download_leaves_no_file_and_continues(web_server, url, tmp_path, takes_ranges):
    cut(web_server, url)
    assert all(".partial" in str(path) for path in files_in_cache(tmp_path))
    web_server.takes_ranges = takes_ranges
    assert local_path(url).read_bytes() == CONTENT
    assert asked(web_server)[0] == "bytes=3000-3999"


def test_a_server_without_ranges_may_have_files_up_to_a_size(web_server, url, monkeypatch):
    web_server.takes_ranges = False
    monkeypatch.setattr(web_filesystem, "_MOST_WHOLE_BYTES", len(CONTENT) - 1)
    with pytest.raises(DataError, match="sends no parts of a file"):
        local_path(url)
    monkeypatch.setattr(web_filesystem, "_MOST_WHOLE_BYTES", len(CONTENT))
    assert local_path(url).read_bytes() == CONTENT


def test_a_rest_is_not_continued_if_the_file_has_changed_but_removed(web_server, url, tmp_path):
    cut(web_server, url)
    web_server.files["/models/a.onnx"] = changed = CONTENT[::-1]
    assert local_path(url).read_bytes() == changed
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_file_that_changes_during_the_download_is_not_used(web_server, url, tmp_path):
    def change(done, total):
        web_server.files["/models/a.onnx"] = CONTENT[::-1]

    with pytest.raises(DataError, match=r"/models/a\.onnx: "):
        fetch(url, change)
    assert files_in_cache(tmp_path) == []


def test_a_server_that_is_busy_for_a_while_is_asked_again(web_server, url):
    web_server.busy = 5
    assert local_path(url).read_bytes() == CONTENT
    web_server.busy = 99
    with pytest.raises(DataError, match=r"status 503, 5 attempts"):
        local_path(f"{url}?again")
    web_server.busy = 0
    with pytest.raises(DataError, match=r"/none: not found$"):
        local_path(f"{web_server.address}/none")
    with pytest.raises(DataError, match=r"http://localhost:1/a: .*5 attempts"):
        local_path("http://localhost:1/a")


def test_without_versions_nothing_is_continued(web_server, url):
    web_server.has_etags = False
    cut(web_server, url)
    assert local_path(url).read_bytes() == CONTENT
    assert asked(web_server)[0] == "bytes=0-999"


def test_without_versions_a_file_is_downloaded_again_however_long_it_is(web_server, url):
    web_server.has_etags = False
    old = local_path(url)
    web_server.files["/models/a.onnx"] = CONTENT[::-1]
    assert local_path(url).read_bytes() == CONTENT[::-1] != CONTENT
    assert old.read_bytes() == CONTENT, "the file of a command that still runs"
    web_server.files["/models/a.onnx"] = CONTENT
    before = old.stat()
    assert local_path(url) == old and old.stat() == before


def test_a_checksum_counts_in_capitals_too_and_one_that_is_none_is_refused(url):
    checksum = hashlib.sha256(CONTENT).hexdigest()
    assert fetch(f"{url}#sha256={checksum.upper()}")[1] == f"{url}#sha256={checksum}"
    with pytest.raises(DataError, match="checksum|SHA-256"):
        fetch(f"{url}#sha256={'A' * 64}")
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        fetch(f"{url}#sha256={checksum[:-1]}")


def test_a_checksum_that_is_given_counts_more_than_that_of_the_server(url, monkeypatch):
    monkeypatch.setattr(
        download, "list_files", lambda url: [replace(file, sha256=CHECKSUM) for file in list_files(url)]
    )
    assert local_path(url).read_bytes() == CONTENT
    with pytest.raises(DataError, match="checksum"):
        local_path(f"{url}#sha256={'0' * 64}")


LIES = {
    "short": lambda content, first, last: (206, f"bytes {first}-{last}/5120", content[first:last]),
    "long": lambda content, first, last: (206, f"bytes {first}-{last}/5120", content[first : last + 2]),
    "another range": lambda content, first, last: (206, f"bytes 0-{last - first}/5120", content[: last - first + 1]),
    "a range without its place": lambda content, first, last: (206, None, content[first : last + 1]),
    "a part as the whole": lambda content, first, last: (200, None, content[: last - first + 1]),
    "more than the whole": lambda content, first, last: (200, None, content + b"x"),
    "an error with the whole": lambda content, first, last: (500, None, content),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_with_other_bytes_than_those_asked_for_is_no_download(web_server, url, tmp_path, lie):
    web_server.lie = LIES[lie]
    with pytest.raises(DataError) as caught:
        local_path(url)
    assert "models/a.onnx" in str(caught.value) and all(
        ".partial" in str(path) for path in files_in_cache(tmp_path)
    )
    web_server.lie = None
    assert local_path(url).read_bytes() == CONTENT


def test_a_rest_that_is_longer_than_the_file_is_dropped(web_server, url, tmp_path):
    cut(web_server, url)
    (rest,) = (tmp_path / "cache").rglob("*.partial/a.onnx")
    rest.write_bytes(CONTENT * 2)
    assert local_path(url).read_bytes() == CONTENT


def test_a_server_of_a_byte_now_and_then_is_given_up(web_server, url, monkeypatch):
    monkeypatch.setattr(filesystem, "PATIENCE_S", 0.05)
    web_server.drip_s = 0.05
    with pytest.raises(DataError, match="models/a.onnx"):
        local_path(url)


def test_a_redirect_is_checked_before_it_is_followed(web_server, url):
    web_server.redirects = {
        "/here": f"{web_server.address}/models/a.onnx",
        "/away": "http://facetrain.invalid/a",
    }
    assert local_path(f"{web_server.address}/here").read_bytes() == CONTENT
    with pytest.raises(UsageError, match="facetrain.invalid"):
        local_path(f"{web_server.address}/away")


def test_a_redirect_does_not_leave_an_encrypted_connection():
    answer = SimpleNamespace(headers={"Location": "http://localhost/a"})
    hop = SimpleNamespace(url="https://host/a", response=answer)
    with pytest.raises(DataError, match="http://localhost/a, which is not encrypted"):
        asyncio.run(web_filesystem._check_redirect(None, None, hop))


def test_a_proxy_of_the_environment_is_asked(web_server, monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", web_server.address)
    web_server.files["http://localhost:1/a.onnx"] = CONTENT
    assert local_path("http://localhost:1/a.onnx").read_bytes() == CONTENT


def flip(path):
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 9), lambda path: path.unlink()])
def test_a_copy_that_was_damaged_in_the_cache_is_downloaded_again(web_server, url, monkeypatch, damage):
    exact = pinned(url)
    for address in (exact, url):
        damage(local_path(address))
        assert local_path(address).read_bytes() == CONTENT
    damage(local_path(exact))
    monkeypatch.setenv("FACETRAIN_OFFLINE", "1")
    with pytest.raises(DataError, match="FACETRAIN_OFFLINE"):
        local_path(exact)


def test_a_copy_with_other_times_is_used_after_one_look_at_its_bytes(web_server, url, monkeypatch):
    path = local_path(url)
    os.utime(path, (1, 1))
    web_server.requests.clear()
    for _ in range(2):
        assert local_path(f"{url}#sha256={CHECKSUM}") == path and not web_server.requests
        monkeypatch.setattr(download.hashlib, "file_digest", refuse)


@pytest.mark.parametrize("place", ["{outside}", "../../../{name}", "{key}/../../../../{name}"])
def test_a_record_cannot_name_another_file(web_server, url, tmp_path, place):
    exact = pinned(url)
    outside = tmp_path / "outside"
    outside.write_bytes(b"evil")
    for record in (tmp_path / "cache").rglob("*.json"):
        content = json.loads(record.read_text())
        key = content["place"].partition("/")[0]
        content["place"] = place.format(outside=outside, name=outside.name, key=key)
        status = outside.stat()
        stamp = [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
        record.write_text(json.dumps(content | {"files": {"": [CHECKSUM, stamp]}}))
    assert local_path(exact).read_bytes() == CONTENT


def test_a_cache_that_other_users_can_change_is_refused(web_server, url, tmp_path):
    local_path(url)
    folder = tmp_path / "cache" / "facetrain" / "downloads"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(DataError, match="chmod go-w"):
        local_path(url)


@pytest.mark.parametrize("checksum", ["", f"#sha256={CHECKSUM}"], ids=["without", "with a checksum"])
def test_two_processes_download_a_file_once(web_server, url, checksum):
    web_server.wait_s = 0.1
    script = (
        "import sys\nfrom facetrain.remote.download import fetch\n"
        "print(fetch(sys.argv[1], say=lambda line: print(line, file=sys.stderr))[0])"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, url + checksum],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    results = [process.communicate() for process in started]
    (first, second), errors = zip(*results, strict=True)
    assert first == second and Path(first.strip()).read_bytes() == CONTENT
    assert len(asked(web_server)) == 1 and sum("terms:" in text for text in errors) == 1


def test_offline_what_is_there_is_used(web_server, url, monkeypatch):
    path = local_path(url)
    web_server.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert local_path(url) == path and not web_server.requests
    with pytest.raises(DataError, match="FACETRAIN_OFFLINE"):
        local_path(f"{url}2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("FACETRAIN_OFFLINE", "1")
    assert local_path(url) == path


@pytest.mark.parametrize(("is_cut", "needed"), [(False, 5120), (True, 2120)])
def test_a_disk_without_enough_space_is_an_error_before_the_download(
    web_server, url, monkeypatch, is_cut, needed
):
    if is_cut:
        cut(web_server, url)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage(needed - 1))
    with pytest.raises(RunError, match=r"0\.0 MB.*XDG_CACHE_HOME"):
        local_path(url)
    assert not asked(web_server)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage(needed))
    assert local_path(url).read_bytes() == CONTENT


def test_a_disk_that_gets_full_leaves_no_file(url, monkeypatch, tmp_path):
    def full(descriptor, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(ranges, "sync_file", full)
    with pytest.raises(RunError, match=r"XDG_CACHE_HOME"):
        local_path(url)
    assert all(".partial" in str(path) for path in files_in_cache(tmp_path))


def test_files_of_objects_and_of_a_run_are_downloaded_without_its_checkpoints(object_store):
    store, _ = filesystem.open_filesystem("s3://bucket")
    for name in ("config.yaml", "model.safetensors", "checkpoints/step_1/shard_0.safetensors"):
        store.pipe_file(f"bucket/run/{name}", name.encode())
    folder = local_path("s3://bucket/run")
    assert sorted(path.name for path in folder.rglob("*")) == ["config.yaml", "model.safetensors"]
    assert local_path("s3://bucket/run/config.yaml").read_bytes() == b"config.yaml"
    with pytest.raises(DataError, match=r"^s3://bucket/none: not found"):
        local_path("s3://bucket/none")


def test_the_keys_of_folders_that_the_console_of_a_store_has_made_are_no_files(object_store):
    store, _ = filesystem.open_filesystem("s3://bucket")
    for key in ("set/", "set/ann/", "set/ann/1..jpg"):
        store.call_s3("put_object", Bucket="bucket", Key=key, Body=b"")
    folder = local_path("s3://bucket/set")
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*")] == ["ann", "ann/1..jpg"]


@pytest.mark.parametrize("name", ["../../../../evil", "{folder}/evil"], ids=["relative", "absolute"])
def test_names_of_a_store_stay_in_the_folder(object_store, tmp_path, name):
    store, _ = filesystem.open_filesystem("s3://bucket")
    store.pipe_file(f"bucket/set/{name.format(folder=tmp_path)}", b"x")
    with pytest.raises(DataError, match="s3://bucket/set: .* leads out of the folder"):
        local_path("s3://bucket/set")
    assert not list(tmp_path.rglob("evil"))


def test_paths_are_returned_as_they_are_and_win_over_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_name("yunet") and not is_name("runs") and not is_name("runs/yunet")
    (tmp_path / "yunet").touch()
    assert not is_name("yunet") and local_path("yunet") == Path("yunet")
    assert local_path(tmp_path) == tmp_path


def test_a_name_of_the_catalog_is_downloaded_with_its_checksum_and_terms(web_server, monkeypatch):
    from facetrain.remote.catalog import catalog

    web_server.files["/file/17"] = CONTENT
    address = f"{web_server.address}/file/17"
    lfw = replace(catalog()["lfw"], address=address, sha256=CHECKSUM)
    wrong = replace(lfw, sha256="0" * 64)
    monkeypatch.setattr(download, "catalog", lambda: {"lfw": lfw, "wrong": wrong})
    lines = []
    path, exact = fetch("lfw", lambda done, size: None, lines.append)
    assert path.name == "lfw.tgz" and exact == f"{address}#sha256={CHECKSUM}"
    assert lines == [f"{address}: 0.01 MB; terms: {lfw.terms}"]
    shutil.rmtree(path.parent.parent)
    with pytest.raises(DataError, match="checksum"):
        local_path("wrong")


def test_what_cannot_be_had_says_what_can():
    with pytest.raises(UsageError, match=r"^webface42m: .*facetrain get hsface10k$"):
        local_path("webface42m")


def test_the_cache_has_no_secret(web_server, url, tmp_path):
    secret = url.replace("http://", "http://user:planted@") + "?signature=planted"
    exact = fetch(secret)[1]
    assert exact == f"{url}#sha256={CHECKSUM}"
    assert "Authorization" in web_server.headers[0] and web_server.requests[0][1].endswith(
        "?signature=planted"
    )
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored and not any(b"planted" in path.read_bytes() for path in stored)
    assert not any("planted" in str(path) for path in stored)
    assert (
        json.loads(next(path for path in stored if path.name == "newest.json").read_text())["address"]
        == exact
    )


def test_a_cache_that_may_only_be_read_is_enough_without_a_network(url, monkeypatch):
    path = local_path(url)
    pinned_path = local_path(f"{url}#sha256={CHECKSUM}")
    os.utime(path)  # as in a copied image: the stamp of the file is another one
    monkeypatch.setattr(download, "locked", refuse)
    monkeypatch.setattr(download, "write_atomically", refuse)
    assert local_path(f"{url}#sha256={CHECKSUM}") == pinned_path
    monkeypatch.setenv("FACETRAIN_OFFLINE", "1")
    assert local_path(url) == path


def refuse(path, *arguments, **options):
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_text_of_a_user_without_a_home_folder_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(download, "user_cache_folder", Mock(side_effect=FileNotFoundError))
    assert download.with_addresses("data/faces: 3 images") == "data/faces: 3 images"
