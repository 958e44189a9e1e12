"""Networks exported to ONNX and opened again."""

import copy
import dataclasses
import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.normalize import normalize
from facetrain.errors import ModelError, RunError
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.export import export as export_module
from facetrain.models.export import onnx as onnx_format
from facetrain.models.export.example_inputs import split_images
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from facetrain.models.preprocessing import RAW_PIXELS
from tests.support.models import write_model
from tests.support.mxnet_files import randomize, write_iresnet

pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")
pytestmark = pytest.mark.xdist_group("export")  # one worker makes `written`
CPU = torch.device("cpu")
QUICK = ExportOptions(opset=17)
"""By torch's older exporter, in a tenth of the time: for what does not depend on the exporter."""
NAMES_A_FOLDER = {"config": {"data": {"train": "/home/someone/faces"}}, "trained_on": ["/home/someone/faces"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.safetensors"
    torch.manual_seed(0)
    write_model(path, **NAMES_A_FOLDER)
    return open_model(path, CPU)


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """The file of the exporter of `torch.export`, which takes seconds; its comparison, and the reported progress."""
    path, progress = tmp_path_factory.mktemp("written") / "m.onnx", []
    options = ExportOptions(images=faces(6), opset=18)
    exported = export(model, "onnx", path, options, progress=lambda *done: progress.append(done))
    return path, exported.comparison, progress


def embedded(model, pixels):
    with torch.no_grad():
        return model.network(model.prepare(pixels)).numpy()


def faces(count=3, size=32):
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8)


def assert_opens_again(path, model, opset):
    pixels = faces()
    assert onnx.load(path).opset_import[0].version == opset
    again = open_model(path, CPU)
    assert (again.image_size, again.embedding_size) == (32, 16)
    assert again.metadata["backbone"] == model.metadata["backbone"]
    np.testing.assert_allclose(embedded(again, pixels), embedded(model, pixels), atol=1e-4)
    mirrored = embedded(model, pixels.flip(2))
    with torch.no_grad():
        theirs = again.network(again.prepare(pixels).flip(3)).numpy()
    np.testing.assert_allclose(theirs, mirrored, atol=1e-4)
    return again


@pytest.mark.slow
def test_an_exported_model_opens_again_and_gives_the_same_embeddings(model, written, tmp_path):
    path, comparison, _ = written
    assert comparison.difference < 1e-4
    again = assert_opens_again(path, model, 18)
    with pytest.raises(ModelError, match="cannot be exported"):
        export(again, "onnx", tmp_path / "n.onnx", ExportOptions())


@pytest.mark.slow
def test_an_exported_model_takes_pixels_in_a_newer_opset(model, tmp_path):
    options = ExportOptions(from_pixels=True, opset=20)
    assert export(model, "onnx", tmp_path / "m.onnx", options).comparison.difference < 1e-4
    assert_opens_again(tmp_path / "m.onnx", model, 20)


@pytest.mark.slow
def test_split_prelus_give_the_same_bits(model, tmp_path):
    model = dataclasses.replace(model, network=copy.deepcopy(model.network))
    slopes = [layer.weight for layer in model.network.modules() if isinstance(layer, torch.nn.PReLU)]
    for slope in slopes:
        torch.nn.init.uniform_(slope, -0.5, 1.5)
    export(model, "onnx", tmp_path / "prelu.onnx", QUICK)
    export(model, "onnx", tmp_path / "split.onnx", dataclasses.replace(QUICK, split_prelu=True))
    operators = [node.op_type for node in onnx.load(tmp_path / "split.onnx").graph.node]
    assert "PRelu" not in operators and operators.count("Min") == len(slopes) > 0
    pixels = faces(8)
    one, other = (embedded(open_model(tmp_path / name, CPU), pixels) for name in ("prelu.onnx", "split.onnx"))
    assert np.array_equal(one, other)


@pytest.mark.slow
def test_a_file_for_a_fixed_batch_takes_it_and_says_what_it_takes(model, tmp_path):
    options, progress = ExportOptions(batch=2, from_pixels=True), []
    exported = export(
        model, "onnx", tmp_path / "m.onnx", options, progress=lambda *done: progress.append(done)
    )
    assert exported.comparison.difference < 1e-4
    # The last image fills the last batch and counts once.
    assert exported.comparison.cosine.images == 5 and progress == [(2, 5), (4, 5), (5, 5)]
    (image,) = onnx.load(tmp_path / "m.onnx").graph.input
    assert [side.dim_value for side in image.type.tensor_type.shape.dim] == [2, 32, 32, 3]
    again, pixels = open_model(tmp_path / "m.onnx", CPU), faces()
    np.testing.assert_allclose(embedded(again, pixels), embedded(model, pixels), atol=1e-4)
    stated = again.preprocessing
    assert (stated["mean"], stated["scale"], stated["layout"]) == (0, 1, "NHWC")


@pytest.mark.parametrize("opset", [11, 16, 17])
@pytest.mark.parametrize(
    "options", [{}, {"batch": 2}, {"from_pixels": True, "unit": True, "split_prelu": True}]
)
def test_a_file_for_an_old_opset_gives_the_embeddings_of_the_network(model, tmp_path, opset, options):
    path, pixels = tmp_path / "m.onnx", faces()
    export(model, "onnx", path, ExportOptions(opset=opset, **options))
    proto = onnx.load(path)
    assert proto.opset_import[0].version == opset
    sides = proto.graph.output[0].type.tensor_type.shape.dim
    assert [side.dim_param or side.dim_value for side in sides] == [options.get("batch", "batch"), 16]
    found, expected = embedded(open_model(path, CPU), pixels), embedded(model, pixels)
    if options.get("unit"):
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.fixture
def vit(tmp_path):
    write_model(tmp_path / "vit.safetensors", "vit_t", {"embedding_size": 16, "image_size": 36})
    return open_model(tmp_path / "vit.safetensors", CPU)


@pytest.mark.slow
def test_a_vit_is_written_for_an_opset_without_layer_norms(vit, tmp_path):
    export(vit, "onnx", tmp_path / "m.onnx", ExportOptions(opset=16))
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 16


def test_weights_that_are_too_large_for_an_onnx_file_are_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_format, "_MOST_BYTES", 10_000)
    with pytest.raises(ModelError, match="2 GiB.*--format torch_export"):
        export(model, "onnx", tmp_path / "m.onnx", ExportOptions())


@pytest.mark.slow
def test_an_exported_file_takes_any_number_of_images_also_with_the_fixed_batch_of_onnxruntime(
    model, written, tmp_path
):
    from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

    path, comparison, progress = written
    assert comparison.cosine.images == 6 and progress == [(6, 6)]
    assert comparison.cosine.lowest > 0.99999
    proto, pixels = onnx.load(path), faces(6)
    make_dim_param_fixed(proto.graph, "batch", 4)  # as docs/models.md advises
    onnx.save(proto, tmp_path / "four.onnx")
    for opened in (path, tmp_path / "four.onnx"):
        again = open_model(opened, CPU)
        for count in (1, 4, 6):
            some = pixels[:count]
            np.testing.assert_allclose(embedded(again, some), embedded(model, some), atol=1e-4)


class Brightness(torch.nn.Module):
    def forward(self, image_BCHW):
        return image_BCHW.flatten(1)[:, :16] / 255


class FixedBatch(torch.nn.Module):
    def forward(self, image_BCHW):
        return image_BCHW.reshape(len(image_BCHW), -1)[:, :16]


def test_a_network_whose_code_fixes_the_number_of_images_is_refused_with_the_way_out(tmp_path):
    model = EmbeddingModel(FixedBatch(), 32, 16, normalize, "own")
    with pytest.raises(ModelError, match=r"^own: .*x\.flatten\(1\).*--batch N \("):
        export(model, "onnx", tmp_path / "m.onnx", QUICK)
    assert not list(tmp_path.iterdir())
    export(model, "onnx", tmp_path / "m.onnx", dataclasses.replace(QUICK, batch=2))


class Attention(torch.nn.Module):
    def forward(self, image_BCHW):
        return torch.nn.functional.scaled_dot_product_attention(*[image_BCHW] * 3).flatten(1)[:, :16]


class Fourier(torch.nn.Module):
    def forward(self, image_BCHW):
        return torch.fft.fft2(image_BCHW).real.flatten(1)[:, :16]


@pytest.mark.parametrize(
    ("network", "opset", "message"),
    [
        (Attention, 13, r"operator 'aten::scaled_dot_product_attention'.*added in version 14.*--opset 18$"),
        (Fourier, 17, r"operator 'aten::fft_fft2'.*--opset 18$"),
    ],
)
def test_an_operator_that_an_opset_lacks_is_named_in_one_line(tmp_path, capfd, network, opset, message):
    metadata = {"preprocessing": RAW_PIXELS}
    model = EmbeddingModel(network(), 32, 16, lambda x: x.permute(0, 3, 1, 2).float(), "own", metadata)
    with pytest.raises(ModelError, match=rf"opset {opset} .*{message}") as refused:
        export(model, "onnx", tmp_path / "m.onnx", ExportOptions(opset=opset))
    assert "\n" not in str(refused.value) and capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("from_pixels", [False, True])
def test_a_graph_that_normalizes_inside_is_not_normalized_twice(tmp_path, from_pixels):
    metadata = {"preprocessing": RAW_PIXELS}
    model = EmbeddingModel(Brightness(), 32, 16, lambda x: x.permute(0, 3, 1, 2).float(), "graph", metadata)
    options = dataclasses.replace(QUICK, from_pixels=from_pixels)
    export(model, "onnx", tmp_path / "m.onnx", options)
    again, pixels = open_model(tmp_path / "m.onnx", CPU), faces()
    assert again.preprocessing["mean"] == 0 and again.preprocessing["scale"] == 1
    np.testing.assert_allclose(embedded(again, pixels), embedded(model, pixels), atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        QUICK,
        pytest.param(ExportOptions(unit=True), marks=pytest.mark.long),
        ExportOptions(int8=True, images=faces(10, 112)),
    ],
)
def test_insightface_gives_pixels_to_a_file_of_an_mxnet_network(tmp_path, options):
    sizes = {"layers": (1, 1, 1, 1), "widths": (4, 4, 4, 4), "embedding_size": 16}
    write_iresnet(tmp_path, randomize(build_backbone("iresnet", **sizes)))
    export(open_model(tmp_path / "model-symbol.json", CPU), "onnx", tmp_path / "m.onnx", options)
    proto = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(proto)
    # The rule of ArcFaceONNX in insightface 2.1, model_zoo/arcface_onnx.py.
    names = [node.name for node in proto.graph.node[:8]]
    assert all(any(name.startswith(start) for name in names) for start in ("Sub", "Mul"))


@pytest.mark.parametrize("count", [1, 9, 10])
def test_an_int8_file_is_compared_on_other_images_than_those_that_calibrate_it(count):
    calibration, compared = split_images(ExportOptions(int8=True, images=faces(count)), 32)
    assert len(calibration) and len(compared)
    assert not any(torch.equal(one, other) for one in calibration for other in compared)


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_errors_name_the_output_and_no_temporary_file(model, tmp_path, monkeypatch, int8):
    def fill_disk(proto, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def refuse(path, *arguments):
        raise RunError(f"{path}: not written")

    output, options = tmp_path / "m.onnx", ExportOptions(int8=True) if int8 else QUICK
    with monkeypatch.context() as patched:
        patched.setattr(onnx, "save", fill_disk)
        with pytest.raises(RunError, match=f"^{output}: "):
            export(model, "onnx", output, options)
    monkeypatch.setattr(export_module, "_compare", refuse)
    with pytest.raises(RunError, match=f"^{output}: not written"):
        export(model, "onnx", output, options)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_has_nothing_about_the_machine_that_wrote_it(model, written, tmp_path):
    assert NAMES_A_FOLDER.items() <= model.metadata.items()
    export(model, "onnx", tmp_path / "int8.onnx", ExportOptions(int8=True))
    for path in (written[0], tmp_path / "int8.onnx"):
        content = path.read_bytes()
        assert b"/home/someone" not in content and b"site-packages" not in content and b".py" not in content


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True])
def test_a_flipped_bit_in_a_weight_is_an_error(model, tmp_path, int8):
    options = ExportOptions(int8=True) if int8 else QUICK
    path = export(model, "onnx", tmp_path / "m.onnx", options).files[-1]
    open_model(tmp_path / "m.onnx", CPU)
    weight = model.network.conv1.weight.detach().numpy().tobytes()
    content = bytearray(path.read_bytes())
    place = content.find(weight[:16]) if not int8 else None
    if place is None or place < 0:  # folded by the exporter: any weight of the file
        stored = onnx.load(tmp_path / "m.onnx", load_external_data=False)
        place = content.find(max((w.raw_data for w in stored.graph.initializer), key=len)[:16])
    content[place + 3] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"m\.onnx: .*SHA-256"):
        open_model(tmp_path / "m.onnx", CPU)


@pytest.mark.slow
def test_onnxruntime_gives_the_embeddings_with_the_code_of_the_docs(model, written, monkeypatch):
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page.split("### Run an exported file")[1], re.DOTALL)
    code = blocks[0] + next(block for block in blocks if block.startswith("# onnxruntime\n"))
    monkeypatch.chdir(written[0].parent)
    pixels = faces(1)
    names = {"np": np, "pixels": pixels[0].numpy()}
    exec(code, names)
    np.testing.assert_allclose(names["embedding"], embedded(model, pixels), atol=1e-4)
