"""What can be embedded, and under which names and labels it comes out."""

import numpy as np
import pytest
import torch
from torch import nn

from facetrain.backbone.zoo import build_backbone
from facetrain.data.formats.bin import write_bin
from facetrain.errors import DataError
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.verify import image_embeddings
from facetrain.verify.embedder import ImageEmbedder, autocast
from facetrain.verify.image_embeddings import read_input, spill_buffer
from tests.support.datasets import encoded_image, write_records

CPU = torch.device("cpu")


def read(path):
    images, names, labels = read_input(path)
    return list(images), list(names), np.asarray(labels).tolist()


def test_images_alone_and_in_a_folder_have_their_names_and_no_label(tmp_path):
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_bytes(encoded_image(ord(name[0])))
    (tmp_path / "notes.txt").write_text("no image")
    assert read(tmp_path / "b.png") == ([encoded_image(ord("b"))], ["b.png"], [-1])
    assert read(tmp_path) == (
        [encoded_image(ord("a")), encoded_image(ord("b"))],
        ["a.png", "b.png"],
        [-1, -1],
    )


def test_a_folder_per_person_gives_labels(tmp_path):
    for person, number in (("x", 1), ("x", 2), ("y", 3)):
        (tmp_path / person).mkdir(exist_ok=True)
        (tmp_path / person / f"{number}.png").write_bytes(encoded_image(number))
    images, names, labels = read(tmp_path)
    assert images == [encoded_image(n) for n in (1, 2, 3)] and labels == [0, 0, 1]
    assert [name.rpartition("/")[2] for name in names] == ["1.png", "2.png", "3.png"]


@pytest.mark.parametrize("name", ["train.rec", "others.rec"])
def test_records_of_any_name_are_those_of_that_name(tmp_path, name):
    write_records(tmp_path / "of_others", [0, 0, 5])
    for suffix in ("rec", "idx"):
        (tmp_path / "of_others" / f"train.{suffix}").rename(tmp_path / f"others.{suffix}")
    write_records(tmp_path, [0, 0, 0, 0, 1])
    (tmp_path / "property").write_text("2,16,16")
    images, names, labels = read(tmp_path / name)
    assert labels == ([0, 0, 0, 0, 1] if name == "train.rec" else [0, 0, 5])
    assert images == [encoded_image(n + 1) for n in range(len(labels))]
    assert all(name in where and f"key {n + 1}" in where for n, where in enumerate(names))


def test_verification_sets_are_numbered(tmp_path):
    write_bin(tmp_path / "s.bin", [encoded_image(n) for n in range(4)], [True, False])
    assert read(tmp_path / "s.bin") == (
        [encoded_image(n) for n in range(4)],
        [f"s.bin:{n}" for n in range(4)],
        [-1] * 4,
    )


@pytest.mark.parametrize("name", ["none.png", "none.rec", "none"])
def test_what_is_not_there_is_said(tmp_path, name):
    with pytest.raises(DataError, match="none"):
        read(tmp_path / name)


class Seen(nn.Module):
    """A layer that autocast runs in 16 bits, and remembers in which type it did."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.dtype = nn.Linear(3 * 16 * 16, 8), None

    def forward(self, image_BCHW):
        embedding = self.fc(image_BCHW.flatten(1))
        self.dtype = embedding.dtype
        return embedding


def test_a_network_embeds_in_bfloat16_where_that_is_asked_for():
    network, images = Seen(), [encoded_image(n) for n in range(9)]
    found = {}
    for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        embedder = ImageEmbedder(network, 16, 4, CPU, autocast=autocast(CPU, bf16))
        found[bf16] = embedder.embed(images, name="set")
        assert network.dtype == dtype and found[bf16].dtype == np.float32
    gap = np.abs(found[True] - found[False]).max() / np.abs(found[False]).max()
    assert 0 < gap < 0.02


def test_embeddings_that_go_to_a_file_are_those_that_stay_in_memory(tmp_path, monkeypatch):
    options = {"layers": [1, 1, 1, 1], "widths": [8, 8, 8, 8], "embedding_size": 8, "image_size": 16}
    network = build_backbone("iresnet", **options)
    save_model(tmp_path / "m.safetensors", network.state_dict(), describe_backbone("iresnet", **options))
    write_records(tmp_path / "data", [0, 0, 1, 1, 2, 2, 2])
    reports, found = [], []
    for most in (7, 3):
        monkeypatch.setattr(image_embeddings, "_IN_MEMORY", most)
        found.append(
            image_embeddings.embed_input(
                tmp_path / "m.safetensors", tmp_path / "data", device="cpu", batch_size=2,
                progress=lambda done, count: reports.append((done, count)),
            )
        )  # fmt: skip
    whole, in_stretches = found
    np.testing.assert_allclose(in_stretches.embedding, whole.embedding, atol=1e-6)
    assert list(in_stretches.name) == list(whole.name) and in_stretches.label.tolist() == [
        0,
        0,
        1,
        1,
        2,
        2,
        2,
    ]
    assert reports == [(n, 7) for n in (2, 4, 6, 7)] + [(n, 7) for n in (2, 3, 5, 6, 7)]


def test_room_that_is_not_there_is_said_before_anything_is_written():
    array = spill_buffer((3, 5), np.float32)
    assert array.shape == (3, 5) and array.dtype == np.float32 and not array.any()
    with pytest.raises(DataError, match="no room for .* bytes of scratch .* TMPDIR"):
        spill_buffer((1 << 40, 1 << 20), np.float32)
