import pytest

from facetrain.errors import UsageError
from facetrain.remote.address import (
    has_secrets,
    is_read_in_place,
    is_remote,
    public,
    require_supported,
    without_secrets,
    without_version,
)


@pytest.mark.parametrize(
    "url",
    [
        "hf://org/repo@main",
        "HTTPS://host/a",
        "http://127.0.0.1:1/a",
        "http://[::1]:1/a",
        "s3://b/k",
        "gs://b",
    ],
)
def test_addresses_are_no_local_paths(url):
    assert is_remote(url)
    require_supported(url)


@pytest.mark.parametrize(
    "path", ["runs/one", "/data/a:b", "s3:/bucket", "C:\\faces", "model.onnx", "a b://c"]
)
def test_other_texts_are_local_paths(path):
    assert not is_remote(path)


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("ftp://host/a", "unknown kind"),
        ("http://example.com/a", "not encrypted"),
        ("http://127.0.0.1.example.com/a", "not encrypted"),
        ("https:///a", "names no host"),
        ("s3://", "names no host"),
        ("https://:443/a", "names no host"),
        ("https://user:pass/word@host/a", "not a valid address"),
        ("https://user:12/pass@host/a", "not a valid address; write / in a key as %2F"),
        ("s3://id:12/pass@bucket/a", "not a valid address"),
        ("s3://id:password@bucket/a", "give them by the environment"),
        ("gs://id:password@bucket/a", "give them by the environment"),
        (f"hf://org#sha256={64 * '0'}", "use the form hf://org/repo"),
        ("hf://org/@main", "use the form hf://org/repo"),
        ("https://[::1/a", "not a valid address"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_without_its_secrets(url, word):
    with pytest.raises(UsageError, match=word) as caught:
        require_supported(url)
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("https://user:secret@host:80/a%2Fb?sig=secret#secret", "https://host:80/a%2Fb"),
        ("s3://key:secret@bucket/a", "s3://bucket/a"),
        ("https://a@b:secret@host/a", "https://host/a"),
        ("https://user:sec/ret@host/a", "https://..."),
        ("https://user:12/secret@host/a", "https://..."),
        ("https://user:/secret@host/a", "https://..."),
        ("https://host:12/a?b@c", "https://host:12/a"),
        ("hf://org/repo/file@main", "hf://org/repo/file@main"),
        ("read 'https://u:secret@h/a?b' and s3://b/c", "read 'https://h/a' and s3://b/c"),
        ("no such files: ['https://h/a?sig=secret', '/b']", "no such files: ['https://h/a', '/b']"),
        ("https://h/o'brien?sig=secret", "https://h/o'brien"),
        ("'https://h/a','https://u:secret@h/b'", "'https://h/a','https://h/b'"),
        ("failed (https://h/a?sig=secret); again", "failed (https://h/a); again"),
        ("https://u:secret@h/a?sig=secret: no such file", "https://h/a: no such file"),
        ("a/local/path?x", "a/local/path?x"),
    ],
)
def test_secrets_are_removed_from_texts(text, public):
    assert without_secrets(text) == public


def test_signed_addresses_are_known():
    assert has_secrets("https://host/a?sig=1") and has_secrets("s3://key:word@bucket/a")
    assert has_secrets("https://host/o'brien?sig=1") and has_secrets("https://host/two words?sig=1")
    for text in ("https://host/a", f"https://host/a#sha256={64 * '0'}", "hf://org/repo@main", "a?b"):
        assert not has_secrets(text)


@pytest.mark.parametrize(
    ("address", "rest"),
    [
        ("hf://org/repo/file@main", "hf://org/repo/file"),
        ("HF://org/repo@main", "HF://org/repo"),
        ("hf://org/repo@main/file", "hf://org/repo@main/file"),
        ("https://host/a@b#sha256=0", "https://host/a@b"),
        ("a/local@path#1", "a/local@path#1"),
    ],
)
def test_a_revision_and_a_checksum_are_left_out_of_an_address(address, rest):
    assert without_version(address) == rest


def test_a_message_shows_no_control_characters_of_an_address():
    assert "\x1b" not in public("https://host/a\x1b[2J")


def test_object_stores_alone_are_read_in_place():
    assert all(map(is_read_in_place, ("s3://b/k", "GS://b/k")))
    assert not any(map(is_read_in_place, ("https://host/a", "hf://org/repo", "s3/b")))
