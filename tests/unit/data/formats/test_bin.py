import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facetrain.data.decode import decode_rgb
from facetrain.data.formats.bin import read_bin, write_bin
from facetrain.errors import PairsError
from tests.support.datasets import encoded_image
from tests.support.shared import shared_path

IMAGES = [encoded_image(n) for n in range(4)]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "wrap", [bytes, bytearray, lambda b: np.frombuffer(b, np.uint8), lambda b: b.decode("latin1")]
)
def test_sets_of_every_protocol_and_kind_of_bytes_read_the_same(tmp_path, protocol, wrap):
    path = tmp_path / "a.bin"
    path.write_bytes(pickle.dumps(([wrap(image) for image in IMAGES], [True, False]), protocol=protocol))
    images, same = read_bin(path)
    assert images == IMAGES
    assert same.tolist() == [True, False]


@pytest.mark.parametrize("flags", [[1, 0], [np.bool_(True), np.bool_(False)], (True, False)])
def test_flags_of_every_kind_are_understood(tmp_path, flags):
    (tmp_path / "a.bin").write_bytes(pickle.dumps((IMAGES, flags)))
    assert read_bin(tmp_path / "a.bin")[1].tolist() == [True, False]


def test_what_we_write_the_peers_own_reader_understands(tmp_path):
    write_bin(tmp_path / "a.bin", IMAGES, [True, False])
    with (tmp_path / "a.bin").open("rb") as file:
        assert pickle.load(file, encoding="bytes") == (IMAGES, [True, False])
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    with pytest.raises(PairsError, match="two for each"):
        write_bin(tmp_path / "b.bin", IMAGES, [True])


def test_a_set_is_written_as_its_images_come_and_nothing_is_left_of_half_a_one(tmp_path):
    def pictures():
        for image in IMAGES[:3]:
            (scratch,) = tmp_path.iterdir()
            yield image * 1000
            assert scratch.stat().st_size > 0 or image == IMAGES[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_bin(tmp_path / "a.bin", pictures(), [True, False])
    assert not list(tmp_path.iterdir())


class Evil:
    def __reduce__(self):
        return (open, ("/tmp/facetrain-was-here", "w"))


def _pickle_that(code):
    return b"\x80\x04" + code + b"."


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps((IMAGES, [True, Evil()])), "may be an attack"),
        (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
        (_pickle_that(b"\x8c\x08builtins\x8c\x04eval\x93(\x8c\x011tR"), "builtins.eval"),
        (pickle.dumps(({"a": 1}, [True])), "EMPTY_DICT|SETITEM"),
        (pickle.dumps((IMAGES, [True])), "not two for each"),
        (pickle.dumps((IMAGES, [True, 7])), "something else"),
        (pickle.dumps(([1, 2], [True])), "image 0 is not"),
        (pickle.dumps(3), "holds no"),
        (b"", "not a verification set"),
        (b"garbage", "not a verification set"),
        (_pickle_that(b"B\xff\xff\xff\x7fabc"), "not a verification set"),
        (_pickle_that(b"\x8e" + struct.pack("<Q", 1 << 60)), "not a verification set"),
        (
            _pickle_that(b"\x8c\x08builtins\x8c\x05bytes\x93M\xff\xff\x85R"),
            "something else stands where bytes",
        ),
        (_pickle_that(b"0000"), "not a verification set"),
        (_pickle_that(b"]a"), "not a verification set"),
        (_pickle_that(b"cnumpy\ndty\\pe\n"), "not a verification set"),
        (_pickle_that(b"(((((tttttt"), "not a verification set"),
        (pickle.dumps((IMAGES, [True, False]))[:-30], "not a verification set"),
        (pickle.dumps(([np.zeros(3)] * 2, [True])), "numpy.dtype in a way"),
    ],
)
def test_what_is_no_set_is_refused_and_runs_nothing(tmp_path, data, said):
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(PairsError, match=said) as caught:
        read_bin(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_set_is_named(tmp_path):
    with pytest.raises(PairsError, match=r"lfw\.bin: No such file"):
        read_bin(tmp_path / "lfw.bin")


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_no_bytes_do_more_than_fail_with_the_documented_error(tmp_path_factory, noise, place):
    good = pickle.dumps((IMAGES[:2], [True]), protocol=4)
    path = tmp_path_factory.mktemp("bin") / "a.bin"
    path.write_bytes(good[:place] + noise + good[place + len(noise) :])
    try:
        read_bin(path)
    except PairsError:
        pass


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("real/lfw_verification/lfw_folds1-2.bin", 1200),
        ("real/lfw_verification/py2_style_120pairs.bin", 120),
        ("real/insightface_small/small_lfw.bin", 10),
    ],
)
def test_real_sets_read_as_they_are(name, pairs):
    images, same = read_bin(shared_path(name))
    assert len(same) == pairs and same.any()
    assert decode_rgb(images[-1], location="x").shape == (112, 112, 3)
