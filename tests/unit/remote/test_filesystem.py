import asyncio
import json
import sys
import threading
import time

import fsspec
import pytest

from facetrain.errors import CheckpointError, DataError, UsageError
from facetrain.remote import filesystem
from facetrain.remote.filesystem import open_filesystem, side_by_side, with_retries
from tests.support.waiting import set_time, wait_until


@pytest.fixture
def no_wait(monkeypatch):
    monkeypatch.setattr(filesystem, "FIRST_WAIT_S", 0.001)


def read(url):
    store, path = open_filesystem(url)
    return with_retries(url, lambda: store.cat_file(path))


def test_objects_are_written_read_by_ranges_and_listed(object_store):
    store, path = open_filesystem("s3://bucket/runs/one")
    store.pipe_file(path, bytes(range(100)))
    assert store.cat_file(path, start=10, end=14) == bytes(range(10, 14))
    assert object_store.requests[-1] == ("GET", "/bucket/runs/one", "bytes=10-13")
    assert store.ls("bucket/runs", detail=False) == ["bucket/runs/one"]
    store.rm_file(path)
    assert store.ls("bucket", detail=False) == [], "a listing was cached"


@pytest.mark.slow
def test_requests_that_fail_now_and_then_are_repeated(object_store, no_wait):
    store, path = open_filesystem("s3://bucket/a")
    store.pipe_file(path, b"x" * 1000)
    object_store.failing = 0.3
    assert all(read("s3://bucket/a") == b"x" * 1000 for _ in range(12))
    assert object_store.failures > 3


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://bucket/none", "not found"),
        ("s3://nobucket/a", "not found"),
        (
            "https://key:word@localhost:1/a?sig=word",
            r"cannot be reached \(Client\w+, 5 attempts\); check the address",
        ),
    ],
)
def test_errors_have_the_address_without_secrets_and_nothing_of_the_library(
    object_store, no_wait, url, reason
):
    with pytest.raises(DataError, match=reason) as caught:
        read(url)
    assert "word" not in str(caught.value) and caught.value.__suppress_context__


def test_a_store_that_always_fails_is_an_error_of_the_kind_that_is_asked_for(object_store, no_wait):
    store, path = open_filesystem("s3://bucket/a")
    object_store.full = True
    with pytest.raises(CheckpointError, match=r"^s3://bucket/a: .*5 attempts"):
        with_retries("s3://bucket/a", lambda: store.pipe_file(path, b"x"), CheckpointError)


@pytest.mark.parametrize(
    "refusal", [("403 Forbidden", "InvalidAccessKeyId"), ("400 Bad Request", "ExpiredToken")]
)
def test_keys_that_were_replaced_are_read_again_when_the_store_refuses_the_old_ones(
    object_store, no_wait, monkeypatch, tmp_path, refusal
):
    keys = tmp_path / "credentials"
    keys.write_text("[default]\naws_access_key_id = OLD\naws_secret_access_key = x\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    store, path = open_filesystem("s3://bucket/a")
    store.pipe_file(path, b"x")
    object_store.refused = {"OLD": refusal}
    with pytest.raises(DataError, match="access denied; give credentials"):
        read("s3://bucket/a")
    keys.write_text(keys.read_text().replace("OLD", "NEW"))
    assert read("s3://bucket/a") == b"x"


def test_the_waits_between_attempts_double_and_differ_at_random(monkeypatch):
    waits = []
    set_time(monkeypatch, filesystem.__name__, sleep=waits.append)
    monkeypatch.setattr(filesystem, "FIRST_WAIT_S", 1.0)

    def fail():
        raise ConnectionResetError

    for _ in range(2):
        with pytest.raises(DataError, match="5 attempts"):
            with_retries("s3://bucket/a", fail)
    for wait, longest in zip(waits, [1, 2, 4, 8] * 2, strict=True):
        assert longest / 2 <= wait <= longest
    assert waits[:4] != waits[4:], "many ranks do not ask again at the same moment"


def test_an_answer_of_more_bytes_has_more_time(monkeypatch):
    monkeypatch.setattr(filesystem, "PATIENCE_S", 0)
    assert with_retries("s3://bucket/a", lambda: time.sleep(0.05) or b"x", most_bytes=10**7) == b"x"


def test_after_an_error_nothing_else_is_begun_side_by_side():
    begun, may_go_on, threads = [], threading.Event(), threading.active_count()

    def operation(item):
        begun.append(item)
        if item == "fails":
            raise DataError("the store refuses")
        may_go_on.wait(60)

    with pytest.raises(DataError, match="the store refuses"):
        side_by_side(operation, ["waits", "fails", "next"], threads=2)
    may_go_on.set()
    wait_until(lambda: threading.active_count() <= threads)
    assert sorted(begun) == ["fails", "waits"]


def test_wrong_credentials_are_not_tried_again(no_wait):
    calls = []

    def refused():
        calls.append(1)
        raise PermissionError("the key AKIA is wrong")

    with pytest.raises(DataError, match="access denied") as caught:
        with_retries("gs://bucket/a", refused)
    assert len(calls) == 1 and "AKIA" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "text", "attempts", "reason"),
    [
        (403, "no storage.objects.get access to SECRET", 1, "access denied; give credentials"),
        (401, "Anonymous caller", 1, "access denied; give credentials"),
        (400, "invalid name SECRET", 1, r"\(status 400\); check the address"),
        (400, "Bucket is a requester pays bucket", 1, r"\(status 400\); check the address"),
        (404, "no such object", 1, "not found"),
        (503, "busy", 5, r"\(status 503, 5 attempts\); try again later"),
        (502, "bad gateway", 5, r"\(ProxyError, 5 attempts\); try again later"),
    ],
)
def test_refusals_of_a_google_store_are_told_from_outages(no_wait, status, text, attempts, reason):
    from gcsfs.retry import retry_request, validate_response

    calls = []

    @retry_request(retries=1)
    async def answer():
        calls.append(1)
        content = json.dumps({"error": {"code": status, "message": text}})
        validate_response(status, content.encode(), "b/bucket/o/a")

    with pytest.raises(DataError, match=rf"^gs://bucket/a: .*{reason}") as caught:
        with_retries("gs://bucket/a", lambda: asyncio.run(answer()))
    assert len(calls) == attempts and "SECRET" not in str(caught.value)


def test_an_error_of_any_package_that_a_library_uses_is_one_of_the_store(no_wait):
    class ConnectError(Exception):
        __module__ = "httpx_of_another_version"

    def unreachable():
        raise ConnectError("https://key:word@host")

    with pytest.raises(DataError, match=r"^hf://org/repo: .*ConnectError, 5 attempts"):
        with_retries("hf://org/repo", unreachable)


@pytest.mark.parametrize("mistake", [lambda: {}["a"], lambda: int("a")])
def test_mistakes_of_the_program_are_not_hidden(mistake):
    with pytest.raises((KeyError, ValueError)):
        with_retries("s3://bucket/a", mistake)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("hf://org/repo", "org/repo"),
        ("hf://org/repo@v1", "org/repo@v1"),
        ("hf://org/repo/a/b.onnx@v1", "org/repo@v1/a/b.onnx"),
        ("hf://org/repo@v1/a/b.onnx", "org/repo@v1/a/b.onnx"),
        ("hf://datasets/org/repo/a@refs/pr/1", "datasets/org/repo@refs%2Fpr%2F1/a"),
        ("hf://spaces/org/repo/a@v1", "spaces/org/repo@v1/a"),
    ],
)
def test_the_revision_of_a_hub_address_may_stand_at_its_end(url, path):
    assert filesystem._hub_path(url.removeprefix("hf://")) == path


@pytest.mark.parametrize("package", ["fsspec", "gcsfs"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{package}.*facetrain\[remote\]"):
        open_filesystem("gs://bucket/a")


def test_a_path_in_a_google_store_may_have_the_generation_of_the_object(monkeypatch):
    monkeypatch.setattr(fsspec, "filesystem", lambda kind, **options: (kind, options))
    assert open_filesystem("gs://bucket/a")[0] == ("gs", {"use_listings_cache": False, "version_aware": True})
