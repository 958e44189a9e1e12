import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest

from facetrain.data.formats.bin import read_bin, write_bin
from facetrain.data.images.decode import decode_rgb
from facetrain.errors import PairsError
from tests.support.datasets import encoded_image
from tests.support.shared import shared_path

IMAGES = [encoded_image(n) for n in range(4)]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "wrap", [bytes, bytearray, lambda b: np.frombuffer(b, np.uint8), lambda b: b.decode("latin1")]
)
def test_every_pickle_protocol_and_type_of_bytes_reads_the_same(tmp_path, protocol, wrap):
    path = tmp_path / "a.bin"
    path.write_bytes(pickle.dumps(([wrap(image) for image in IMAGES], [True, False]), protocol=protocol))
    images, same = read_bin(path)
    assert images == IMAGES
    assert same.tolist() == [True, False]


def test_the_text_protocol_of_python_2_reads_the_same(tmp_path):
    # Python 2's pickle.dump without a protocol: a str as a line of its repr, True as I01.
    lines = [b"S%a\np%d\na" % (image.decode("latin1"), number) for number, image in enumerate(IMAGES, 2)]
    (tmp_path / "a.bin").write_bytes(b"((lp0\n" + b"".join(lines) + b"(lp1\nI01\naI00\natp9\n.")
    images, same = read_bin(tmp_path / "a.bin")
    assert images == IMAGES
    assert same.tolist() == [True, False]


def test_an_escape_that_python_does_not_know_is_read_as_it_is_and_without_a_warning(tmp_path):
    (tmp_path / "a.bin").write_bytes(_pickle_that(b"((S'\\q'\nS'\\q'\nl(I01\nlt"))
    assert read_bin(tmp_path / "a.bin")[0] == [b"\\q"] * 2


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", ["?", "i1", "u2", "<i4", ">i8", "i8", "f4", ">f8", "O"])
@pytest.mark.parametrize("wrap", [np.array, list, tuple])
def test_every_type_of_labels_is_understood(tmp_path, protocol, kind, wrap):
    labels = wrap(np.array([1, 0]).astype(kind))
    (tmp_path / "a.bin").write_bytes(pickle.dumps((IMAGES, labels), protocol=protocol))
    assert read_bin(tmp_path / "a.bin")[1].tolist() == [True, False]


def test_images_in_an_array_of_objects_are_understood(tmp_path):
    images = np.empty(len(IMAGES), object)
    images[:] = [np.frombuffer(image, np.uint8) for image in IMAGES]
    (tmp_path / "a.bin").write_bytes(pickle.dumps((images, [True, False])))
    assert read_bin(tmp_path / "a.bin")[0] == IMAGES


def test_two_joined_sets_are_refused_instead_of_read_in_part(tmp_path):
    write_bin(tmp_path / "a.bin", IMAGES, [True, False])
    whole = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "b.bin").write_bytes(2 * whole)
    with pytest.raises(PairsError, match=rf"b\.bin: .*\b{len(whole):,} bytes"):
        read_bin(tmp_path / "b.bin")


def test_a_written_set_can_be_read_by_insightface(tmp_path):
    write_bin(tmp_path / "a.bin", IMAGES, [True, False])
    with (tmp_path / "a.bin").open("rb") as file:
        assert pickle.load(file, encoding="bytes") == (IMAGES, [True, False])
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    with pytest.raises(PairsError, match=rf"b\.bin: {len(IMAGES)} .*\b1 pair"):
        write_bin(tmp_path / "b.bin", IMAGES, [True])


def test_images_are_streamed_to_the_file_and_an_interrupted_write_leaves_no_file(tmp_path):
    def one_missing():
        for image in IMAGES[:3]:
            (scratch,) = tmp_path.iterdir()
            yield image * 1000
            assert scratch.stat().st_size > 0 or image == IMAGES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bin(tmp_path / "a.bin", one_missing(), [True, False])
    assert not list(tmp_path.iterdir())


def test_a_set_is_on_the_disk_before_it_appears(tmp_path, monkeypatch):
    path, synced = tmp_path / "a.bin", []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_size, path.exists())))
    write_bin(path, IMAGES, [True, False])
    assert synced == [(path.stat().st_size, False)]


class Evil:
    def __reduce__(self):
        return (open, ("ran", "w"))


def _pickle_that(code):
    return b"\x80\x04" + code + b"."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps((IMAGES, [True, Evil()])), "unexpected object .*; the file may be malicious"),
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (_pickle_that(b"\x8c\x08builtins\x8c\x04eval\x93(\x8c\x011tR"), "builtins.eval"),
        (
            pickle.dumps({"bins": IMAGES}),
            "EMPTY_DICT.*expected a pickle of a pair of lists .*facetrain data pairs",
        ),
        (pickle.dumps((IMAGES, [True])), "4 images for 1 pairs; expected two for each"),
        (pickle.dumps((IMAGES, [True, 7])), "a value other than true and false"),
        (pickle.dumps(([1, 2], [True])), "image 0 is not"),
        (pickle.dumps(3), "expected a pickle of a pair of lists"),
        (_pickle_that((1 << 20) * b"N0"), "more than 196,608 instructions"),
        (b"", "not a verification set"),
        (b"garbage", "not a verification set"),
        (_pickle_that(b"B\xff\xff\xff\x7fabc"), "not a verification set"),
        (_pickle_that(b"\x8e" + struct.pack("<Q", 1 << 60)), "not a verification set"),
        (
            _pickle_that(b"\x8c\x08builtins\x8c\x05bytes\x93M\xff\xff\x85R"),
            "a value of type int in place of bytes",
        ),
        (_pickle_that(b"X\1\0\0\0\xbf"), r"\(text not in UTF-8 \(byte 0xbf\)\); .* or download it again"),
        (_pickle_that(b"0000"), "not a verification set"),
        (_pickle_that(b"]a"), "not a verification set"),
        (_pickle_that(b"cnumpy\ndty\\pe\n"), "not a verification set"),
        (_pickle_that(b"(((((tttttt"), "not a verification set"),
        (pickle.dumps((IMAGES, [True, False]))[:-30], "not a verification set"),
        (pickle.dumps(([np.zeros(3)] * 2, [True])), "an encoded image is an array of bytes"),
        (pickle.dumps((IMAGES, np.array([0.5, 1]))), "the labels"),
        (pickle.dumps((IMAGES, np.array(["1", "0"]))), "unexpected call of numpy.dtype"),
    ],
)
def test_other_data_is_refused_and_runs_no_code(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(PairsError, match=message) as caught:
        read_bin(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]


def _nested(depth):
    """A tuple of (x, x) of (x, x) …: hashing or printing it takes 2^depth steps."""
    return b")" + b"".join(b"\x94h" + bytes([n]) + b"\x86" for n in range(depth))


BOMBS = {
    "a memo index that needs gigabytes": b"]r" + struct.pack("<I", 1 << 30),
    "a frame longer than the file": b"\x95" + struct.pack("<Q", 1 << 40) + b"]",
    "a module name that takes long to hash": _nested(60) + b"\x8c\x01a\x93",
    "a dtype that takes long to hash": b"cnumpy\ndtype\n" + _nested(60) + b"\x85R",
    "a dtype nested too deeply for the stack": b"cnumpy\ndtype\n)" + b"\x85" * 500_000 + b"R",
    "one string encoded many times": b"c_codecs\nencode\nX" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
    + b"\x8c\x06latin1\x86\x940(" + b"c_codecs\nencode\nh\0R" * 10_000 + b"l",
    "one image that a set refers to many times": b"(X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
    + b"\x94" + b"h\0" * 100_000 + b"l]\x86",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_little_memory_and_time(tmp_path, name):
    path = tmp_path / "a.bin"
    path.write_bytes(_pickle_that(BOMBS[name]))
    script = f"""
import resource, sys
from pathlib import Path
from facetrain.data.formats.bin import read_bin
from facetrain.errors import PairsError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), resource.RLIM_INFINITY))
try:
    read_bin(Path({str(path)!r}))
except PairsError as error:
    sys.exit("MemoryError" in str(error))
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PairsError, match=r"lfw\.bin: "):
        read_bin(tmp_path / "lfw.bin")


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("real/lfw_verification/lfw_folds1-2.bin", 1200),
        ("real/lfw_verification/py2_style_120pairs.bin", 120),
        ("real/insightface_small/small_lfw.bin", 10),
    ],
)
def test_published_sets_can_be_read(name, pairs):
    images, same = read_bin(shared_path(name))
    assert len(same) == pairs and same.any()
    assert decode_rgb(images[-1], location="x").shape == (112, 112, 3)
