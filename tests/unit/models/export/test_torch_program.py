"""Networks exported as torch.export programs."""

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import RunError
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from facetrain.models.model_file import describe_backbone, open_model, save_model
from tests.support.mxnet_files import randomize

CPU = torch.device("cpu")
SMALL = {"layers": (1, 1, 1, 1), "widths": (8, 8, 8, 8), "embedding_size": 16, "image_size": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    save_model(
        path,
        randomize(build_backbone("iresnet", **SMALL)).state_dict(),
        describe_backbone("iresnet", **SMALL),
    )
    return open_model(path, CPU)


def test_the_file_gives_the_embeddings_of_the_network_for_any_number_of_images(model, tmp_path):
    exported = export(model, "torch_export", tmp_path / "m.pt2", ExportOptions())
    assert exported.difference < 1e-5
    program = torch.export.load(tmp_path / "m.pt2").module()
    for count in (1, 4):
        image = torch.randn(count, 3, 32, 32)
        with torch.no_grad():
            expected = model.network(image)
            torch.testing.assert_close(program(image), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(exported.model.network.eval()(image), expected, atol=1e-5, rtol=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]


def test_a_file_with_other_embeddings_is_not_written(model, tmp_path, monkeypatch):
    class Wrong:
        def module(self):
            return torch.nn.Conv2d(3, 16, 32)

    monkeypatch.setattr(torch.export, "load", lambda path: Wrong())
    with pytest.raises(RunError, match=r"m.pt2: not written: its embeddings differ"):
        export(model, "torch_export", tmp_path / "m.pt2", ExportOptions())
    assert list(tmp_path.iterdir()) == []
