"""Rules that hold for every export format in the registry."""

import copy
import itertools
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ModelError, RunError
from facetrain.models.embedding_model import open_model
from facetrain.models.export import onnx
from facetrain.models.export.export import export
from facetrain.models.export.formats import FORMATS, ExportOptions
from facetrain.models.onnx_network import OnnxNetwork
from tests.support.models import SMALL, write_model
from tests.support.mxnet_files import randomize

pytest.importorskip("onnxscript")
pytestmark = pytest.mark.xdist_group("export")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    folder = "/home/someone/faces"
    paths = {"config": {"data": {"train": folder}}, "trained_on": [folder], "average_of": [{"model": folder}]}
    write_model(path, network=randomize(build_backbone("iresnet", **SMALL)), **paths)
    return open_model(path, torch.device("cpu"))


def is_installed(package):
    """Return whether a package can be imported. Of a subpackage the parent counts, which `find_spec` would import."""
    return find_spec(package.partition(".")[0]) is not None


HERE = [name for name, row in FORMATS.items() if all(map(is_installed, row.packages))]
"""Formats whose packages are installed. `make interop` tests the others."""
TIMM = ["convnext_atto", "edgenext_xx_small", "mobilenetv4_conv_small_050", "vit_small_patch16_dinov3"]


@pytest.mark.parametrize(
    ("error", "batch", "named"),
    [(TypeError("no"), None, r"change it, or give .* --batch N \(TypeError: no\)"),
     (TypeError("no"), 2, r"change it \(TypeError: no\)"),
     (torch.OutOfMemoryError("no memory"), None, "^no memory$"), (MemoryError("no memory"), None, "^no memory$")],
)  # fmt: skip
def test_an_error_in_the_code_of_another_network_is_explained_and_a_lack_of_memory_is_not(
    model, tmp_path, monkeypatch, error, batch, named
):
    def write(*_):
        raise error

    monkeypatch.setattr(onnx, "write", write)
    expected = ModelError if isinstance(error, TypeError) else type(error)
    with pytest.raises(expected, match=named):
        other = replace(model, network=torch.nn.Flatten())
        export(other, "onnx", tmp_path / "m.onnx", ExportOptions(batch=batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_a_format_writes_its_files_without_names_of_folders_and_replaces_older_ones(model, tmp_path, name):
    files = FORMATS[name].files(tmp_path / f"exported{FORMATS[name].suffix}")
    for path in files:
        path.write_text("older")
    # By the older exporter of ONNX, which is faster.
    exported = export(model, name, files[0], ExportOptions(opset=17) if name == "onnx" else ExportOptions())
    assert set(tmp_path.iterdir()) == set(exported.files) and exported.files == files
    assert exported.files[-1].stat().st_size > 10_000
    assert not any(b"/home/someone" in path.read_bytes() for path in files)
    assert exported.comparison is None or exported.comparison.difference < 1e-5


def test_a_torch_program_gives_the_embeddings_of_the_network_for_any_number_of_images(model, tmp_path):
    export(model, "torch_export", tmp_path / "m.pt2", ExportOptions())
    program = torch.export.load(tmp_path / "m.pt2").module()
    for count in (1, 4):
        image = torch.randn(count, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(program(image), model.network(image), atol=1e-5, rtol=1e-5)


def test_a_file_with_other_embeddings_is_not_written(model, tmp_path, monkeypatch):
    wrong = SimpleNamespace(module=lambda: torch.nn.Conv2d(3, 16, 32))
    monkeypatch.setattr(torch.export, "load", lambda path: wrong)
    with pytest.raises(RunError, match=r"m\.pt2: not written"):
        export(model, "torch_export", tmp_path / "m.pt2", ExportOptions())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "backbone"),
    [
        *itertools.product(HERE, TIMM[-1:]),
        *(
            pytest.param(name, backbone, marks=pytest.mark.long)
            for name in HERE
            for backbone in (TIMM[:-1] if name == "onnx" else TIMM[:1])
        ),
    ],
)
@pytest.mark.slow
def test_networks_of_timm_are_exported_for_any_number_of_images(model, tmp_path, name, backbone):
    pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    network = build_backbone(f"timm/{backbone}", image_size=32, embedding_size=16).eval()
    if "vit" in backbone:
        network.network.blocks = network.network.blocks[:2]  # all twelve are alike
    path = tmp_path / f"exported{FORMATS[name].suffix}"
    exported = export(replace(model, network=network), name, path, ExportOptions())
    assert exported.comparison is None or exported.comparison.difference < 1e-5


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ModelError, match=r"onnxscript.*`pip install 'facetrain\[onnx\]'`"):
        FORMATS["onnx"].load()


@pytest.mark.parametrize("name", HERE)
def test_a_format_that_cannot_write_or_gets_an_onnx_file_leaves_no_file(model, tmp_path, name):
    with pytest.raises(RunError, match="missing"):
        export(model, name, tmp_path / "missing" / "exported", ExportOptions())
    network = object.__new__(OnnxNetwork)
    torch.nn.Module.__init__(network)
    onnx_model = type(model)(network, 32, 16, model.prepare, "ONNX, m.onnx", model.metadata)
    with pytest.raises(ModelError, match="ONNX, m.onnx"):
        export(onnx_model, name, tmp_path / "exported", ExportOptions())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("weight", ["fc.weight", "bn1.running_var"])
def test_a_network_that_has_diverged_is_refused(model, tmp_path, name, weight):
    network = copy.deepcopy(model.network)
    network.state_dict()[weight].flatten()[0] = float("nan")
    for int8 in (False, True) if name == "onnx" else (False,):
        with pytest.raises(ModelError, match=f"{weight} .*not finite"):
            export(replace(model, network=network), name, tmp_path / "exported", ExportOptions(int8=int8))
    assert list(tmp_path.iterdir()) == []
