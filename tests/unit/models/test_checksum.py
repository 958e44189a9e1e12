"""Checksums of model files: what they find, and which files have none."""

import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from facetrain.backbone.zoo import build_backbone
from facetrain.data.formats.bin import write_bin
from facetrain.errors import ModelError
from facetrain.models.checksum import checksum_of
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import open_model
from tests.support.command import refusal
from tests.support.faces import face
from tests.support.models import SMALL, write_model

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
    with pytest.raises(ModelError, match=r"m\.safetensors: its weights are damaged: .*; copy"):
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


def test_every_command_refuses_a_model_with_a_flipped_bit(path, tmp_path):
    for number in range(4):
        (tmp_path / "faces" / f"{number // 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "faces" / f"{number // 2}" / f"{number}.png").write_bytes(face(number, size=32))
    faces, image, out = tmp_path / "faces", tmp_path / "faces" / "0" / "0.png", tmp_path / "out.safetensors"
    write_bin(tmp_path / "set.bin", [image.read_bytes()] * 4, [True, False])
    sound = tmp_path / "sound.safetensors"
    sound.write_bytes(path.read_bytes())
    flip(path, 0.5)
    for arguments in (
        ["eval", path, "--target", tmp_path / "set.bin"],
        ["eval", sound, "--target", tmp_path / "set.bin", "--against", path],
        ["embed", path, faces, "--output", tmp_path / "e.npz"],
        ["compare", path, image, image],
        ["search", faces, faces, "--model", path],
        ["calibrate", path, "--target", faces, "--fmr", 0.5],
        ["average", sound, path, "--output", out],
        ["export", path, "--format", "safetensors", "--output", out],
    ):
        assert "its weights are damaged: their SHA-256 is not the stored one" in str(refusal(*arguments))
    assert not out.exists()
    with pytest.raises(ModelError, match="SHA-256"):
        initialize_backbone(build_backbone("iresnet", **SMALL), path, None)
