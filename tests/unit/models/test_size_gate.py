"""Models of two networks, of which each face takes one by its size."""

import cv2
import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.data.synthetic.render import render_jpeg
from facetrain.errors import ModelError
from facetrain.models.average_models import gate_models
from facetrain.models.export.example_inputs import decode_faces
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from facetrain.models.inference_network import inference_network
from facetrain.models.initialize_from import check_backbone_weights
from facetrain.models.model_file import open_model
from facetrain.models.size_gate import is_small
from tests.support.command import refusal
from tests.support.models import write_model
from tests.support.mxnet_files import randomize

OPTIONS = {"layers": (1, 1, 1, 1), "widths": (4, 4, 8, 8), "embedding_size": 8, "image_size": 112}
CPU = torch.device("cpu")


def faces(size, count=6):
    """Return drawn faces of 112 pixels, uint8 (N, H, W, 3), that were enlarged from a size."""
    full = decode_faces([render_jpeg(0, identity, 0, 112) for identity in range(count)], 112).numpy()
    small = [cv2.resize(face, (size, size), interpolation=cv2.INTER_AREA) for face in full]
    return torch.from_numpy(np.stack([cv2.resize(face, (112, 112)) for face in small]))


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """Return the folder of two models and of the gate of both."""
    folder = tmp_path_factory.mktemp("gate")
    for seed, name in enumerate(("small", "large")):
        network = randomize(build_backbone("iresnet", **OPTIONS), seed=seed)
        write_model(folder / f"{name}.safetensors", options=OPTIONS, network=network, step=4)
    gate_models(*(folder / f"{name}.safetensors" for name in ("small", "large", "gate")))
    return folder


def embed(folder, name, pixels, *, folded=False):
    model = open_model(folder / f"{name}.safetensors", CPU)
    network = inference_network(model.network, CPU) if folded else model.network
    with torch.no_grad():
        return network(model.prepare(pixels))


@pytest.mark.parametrize("folded", [False, True])
def test_each_face_takes_the_network_for_its_size_whatever_is_beside_it(gate, folded):
    small, large = faces(16), faces(112)
    expected = embed(gate, "small", small, folded=folded), embed(gate, "large", large, folded=folded)
    mixed = embed(gate, "gate", torch.cat([small, large]), folded=folded)
    torch.testing.assert_close(mixed, torch.cat(expected), rtol=1e-5, atol=1e-5)
    for pixels, embedding in zip((small, large), expected, strict=True):
        torch.testing.assert_close(embed(gate, "gate", pixels, folded=folded), embedding)


@pytest.mark.parametrize(("size", "expected"), [(12, True), (16, True), (56, False), (112, False)])
def test_a_face_is_small_if_it_has_the_detail_of_few_pixels(size, expected):
    image = faces(size, 20).permute(0, 3, 1, 2)
    assert (is_small(image.float()) == expected).all()
    # Brightness and contrast change nothing.
    assert (is_small((image - 127.5) / 500 + 0.2) == expected).all()


@pytest.mark.parametrize("format", ["onnx", "torch_export"])
def test_an_exported_file_has_both_networks_and_the_choice(gate, tmp_path, format):
    pixels = torch.cat([faces(16), faces(112)])
    model = open_model(gate / "gate.safetensors", CPU)
    # `export` compares all embeddings of the file with the embeddings of the network.
    exported = export(model, format, tmp_path / "file", ExportOptions(images=pixels))
    assert exported.comparison.cosine.images == len(pixels) and exported.comparison.difference < 1e-4


def test_the_description_is_the_first_models_and_other_uses_are_refused(gate, tmp_path):
    model = open_model(gate / "gate.safetensors", CPU)
    assert "step" not in model.metadata and model.embedding_size == 8
    out = tmp_path / "out.safetensors"
    assert "has two networks" in str(
        refusal("average", gate / "gate.safetensors", gate / "small.safetensors", "--output", out)
    )
    other = write_model(gate / "other.safetensors", options=OPTIONS | {"widths": (4, 4, 8, 16)})
    assert other is not None
    assert "does not fit the network" in str(
        refusal("gate", gate / "small.safetensors", gate / "other.safetensors", "--output", out)
    )
    assert not out.exists()
    photos = gate / "photos"
    photos.mkdir()
    error = refusal("finetune", photos, "--model", gate / "gate.safetensors", "--output", tmp_path / "tuned")
    assert "gate.safetensors: has two networks" in str(error)
    with pytest.raises(ModelError, match="has two networks"):
        check_backbone_weights(gate / "gate.safetensors", {"name": "iresnet", **OPTIONS})
