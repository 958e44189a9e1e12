"""Checksums of model files: what they find, and which files have none."""

import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from facetrain.errors import ModelError
from facetrain.models.checksum import checksum_of
from facetrain.models.model_file import open_model
from tests.support.models import write_model

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    write_model(tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def flip(path, place):
    """Flip a bit of the weights; `place` is from 0 to 1."""
    content = bytearray(path.read_bytes())
    start = 8 + struct.unpack_from("<Q", content)[0]
    content[start + int(place * (len(content) - start - 1))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_flipped_bit_in_a_weight_is_an_error(path, place):
    open_model(path, CPU)
    flip(path, place)
    with pytest.raises(ModelError, match=r"m\.safetensors: .*damaged"):
        open_model(path, CPU)


def test_a_file_without_a_checksum_opens(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata.pop("sha256") == checksum_of(load_file(path))
    save_file(load_file(path), path, metadata)
    open_model(path, CPU)


def test_names_types_and_shapes_count_and_the_order_does_not():
    one, two = torch.zeros(2, 3), torch.arange(4.0)
    assert checksum_of({"a": one, "b": two}) == checksum_of({"b": two, "a": one})
    others = ({"b": one, "a": two}, {"a": one.view(3, 2), "b": two}, {"a": one.int(), "b": two})
    assert len({checksum_of({"a": one, "b": two}), *map(checksum_of, others)}) == 4
