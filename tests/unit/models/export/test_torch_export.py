"""What leaves as a torch.export program is the same network, and is said to be so only where it is."""

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ModelError, RunError
from facetrain.models.export import torch_export
from facetrain.models.export.torch_export import export_program
from facetrain.models.model_file import RAW_PIXELS, EmbeddingModel, describe_backbone, open_model, save_model
from tests.support.mxnet_files import shaken

CPU = torch.device("cpu")
SMALL = {"layers": (1, 1, 1, 1), "widths": (8, 8, 8, 8), "embedding_size": 16, "image_size": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    save_model(
        path, shaken(build_backbone("iresnet", **SMALL)).state_dict(), describe_backbone("iresnet", **SMALL)
    )
    return open_model(path, CPU)


def test_the_file_gives_the_embeddings_of_the_network_for_any_number_of_images(model, tmp_path):
    difference, written = export_program(model, tmp_path / "m.pt2")
    assert difference < 1e-5
    program = torch.export.load(tmp_path / "m.pt2").module()
    for count in (1, 4):
        image = torch.randn(count, 3, 32, 32)
        with torch.no_grad():
            expected = model.network(image)
            torch.testing.assert_close(program(image), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(written.network.eval()(image), expected, atol=1e-5, rtol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]


def test_a_file_with_other_embeddings_does_not_appear(model, tmp_path, monkeypatch):
    class Wrong:
        def module(self):
            return torch.nn.Conv2d(3, 16, 32)

    monkeypatch.setattr(torch_export.torch.export, "load", lambda path: Wrong())
    with pytest.raises(RunError, match=r"m.pt2: gives embeddings that differ by"):
        export_program(model, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_what_onnxruntime_runs_is_no_network_to_export(tmp_path):
    onnx_network = object.__new__(torch_export.OnnxNetwork)
    torch.nn.Module.__init__(onnx_network)
    model = EmbeddingModel(onnx_network, 32, 16, lambda x: x, "ONNX, m.onnx", {"preprocessing": RAW_PIXELS})
    with pytest.raises(ModelError, match="no torch network"):
        export_program(model, tmp_path / "n.pt2")
