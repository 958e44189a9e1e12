"""`facetrain export`: quantization, comparison with the model, and the model card."""

import json
from typing import get_args, get_type_hints

import pytest

from facetrain.backbone.zoo import build_backbone
from facetrain.cli.export_options import Outputs
from facetrain.data.formats.bin import write_bin
from facetrain.models.model_file import save_model
from facetrain.models.weight_files import read_weights
from tests.support.command import facetrain, output_of, refusal
from tests.support.faces import face
from tests.support.models import write_model
from tests.support.mxnet_files import randomize, write_iresnet
from tests.support.protocols import write_ijb, write_tinyface

pytest.importorskip("onnxscript")


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model.safetensors", config={"data": {"train": "data/some_faces"}})
    same = [n % 2 == 0 for n in range(20)]
    images = [face(n + (0 if k == 0 or one else 50), k, 32) for n, one in enumerate(same) for k in range(2)]
    write_bin(tmp_path / "faces.bin", images, same)
    return tmp_path / "model.safetensors"


@pytest.mark.slow
def test_a_quantized_model_has_int8_weights_and_its_accuracy_is_reported(model, tmp_path):
    printed = output_of(
        "export", model, "--format", "onnx", "--output", tmp_path / "small.onnx", "--int8", "static",
        "--images", tmp_path / "faces.bin", "--target", "faces",
        "--data-dir", tmp_path, "--json", "--model-card", tmp_path / "card.md",
    )  # fmt: skip
    report = json.loads(printed)
    found, cosine = report["rates"]["faces"]["accuracy"], report["cosine"]
    assert abs(found["file"] - found["model"]) <= 0.1
    assert 0.98 < cosine["lowest"] <= cosine["mean"] <= 1 and cosine["images"] == 8
    card = (tmp_path / "card.md").read_text()
    assert card.startswith("# small.onnx\n") and f"| faces | accuracy | {found['file']:.3%} |" in card
    assert "- `data.train`: data/some_faces" in card
    assert (
        "## Limits" in card and "| faces | accuracy |" in card and "faces is too small for tar@1e-06" in card
    )
    import onnx

    stored = onnx.load(tmp_path / "small.onnx").graph
    assert any(weight.data_type == onnx.TensorProto.INT8 for weight in stored.initializer)
    assert sum(node.op_type == "QuantizeLinear" for node in stored.node) > 4


@pytest.mark.slow
def test_the_card_of_a_network_that_normalizes_says_that_it_takes_pixels(tmp_path):
    network = build_backbone("iresnet", layers=(1, 1, 1, 1), widths=(4, 4, 4, 4))
    graph, card = write_iresnet(tmp_path, randomize(network)), tmp_path / "card.md"
    output = tmp_path / "m.onnx"
    output_of("export", graph, "--format", "onnx", "--output", output, "--model-card", card)
    expected = (
        "- input of the file: float32 (N, 3, 112, 112), pixels from 0 to 255; it normalizes them itself"
    )
    assert expected in card.read_text()


@pytest.mark.slow
def test_a_quantized_model_has_none_of_the_thresholds_that_were_measured_before(model, tmp_path):
    import onnx

    weights, metadata = read_weights(model)
    save_model(model, weights, json.loads(metadata["facetrain"]) | {"thresholds": []})
    arguments = ["export", model, "--format", "onnx", "--output", tmp_path / "small.onnx", "--int8", "static"]
    printed = output_of(*arguments)
    assert "The file has no thresholds: those of the model were measured in float32" in printed
    stored = {entry.key for entry in onnx.load(tmp_path / "small.onnx").metadata_props}
    assert "backbone" in stored and "thresholds" not in stored


def test_a_torch_export_program_reports_its_difference_and_accuracy(model, tmp_path):
    printed = output_of(
        "export", model, "--format", "torch_export", "--output", tmp_path / "m.pt2",
        "--target", "faces", "--data-dir", tmp_path, "--json",
    )  # fmt: skip
    found = json.loads(printed)
    refused = refusal("compare", tmp_path / "m.pt2", tmp_path / "faces.bin", tmp_path / "faces.bin")
    assert "m.pt2: is a program that torch.export wrote" in str(refused) and refused.exit_code == 2
    assert found["difference"] < 1e-4
    (rates,) = found["rates"]["faces"].values()
    assert rates["file"] == rates["model"]


def test_the_accuracy_of_safetensors_is_reported_too(model, tmp_path):
    options = ["--output", tmp_path / "m.safetensors", "--target", tmp_path / "faces.bin"]
    printed = output_of("export", model, "--format", "safetensors", *options)
    assert "faces: accuracy of the file " in printed and "(+0.000%)" in printed


def test_the_rates_of_a_set_without_accuracy_are_reported(model, tmp_path):
    for write, name in ((write_ijb, "ijbc"), (write_tinyface, "tinyface")):
        write(tmp_path / name)
    options = ["--target", "ijbc", "--target", "tinyface", "--data-dir", tmp_path]
    arguments = ["export", model, "--format", "safetensors", "--output", tmp_path / "m.safetensors", *options]
    report = json.loads(facetrain(*arguments, "--json").stdout)
    done = facetrain("eval", model, *options, "--bootstrap", 0, "--json", "-")
    sets, lines = json.loads(done.stdout)["sets"], facetrain(*arguments).stdout.splitlines()
    for name, metric in (("ijbc", "tar@1e-01"), ("ijbc_1n", "rank1"), ("tinyface", "rank20")):
        rates, value = report["rates"][name], sets[name][metric]
        assert rates[metric] == {"model": value, "file": value} and "tar@1e-06" not in rates
        assert f"{name}: {metric} of the file {value:.3%}, of the model {value:.3%} (+0.000%)" in lines


def test_the_file_is_compared_on_given_faces_and_its_size_is_printed(model, tmp_path):
    printed = output_of(
        "export", model, "--format", "onnx", "--output", tmp_path / "m.onnx", "--batch", 2, "--from-pixels",
        "--images", tmp_path / "faces.bin", "--model-card", tmp_path / "card.md",
    )  # fmt: skip
    first, second = printed.splitlines()
    assert "differs by at most" in first and "40 images)" in first
    size = (tmp_path / "m.onnx").stat().st_size / 1e6
    assert second == f"{size:.2f} MB"
    card = (tmp_path / "card.md").read_text()
    assert "- input of the file: uint8 (N, 32, 32, 3)" in card and f"- size: {size:.2f} MB" in card
    (tmp_path / "none").mkdir()
    refused = refusal(
        "export", model, "--format", "onnx", "--output", tmp_path / "n.onnx", "--images", tmp_path / "none"
    )
    assert "neither train.rec nor images" in str(refused) and not (tmp_path / "n.onnx").exists()


def test_the_help_names_the_files_of_each_format():
    output = get_args(get_type_hints(Outputs, include_extras=True)["output"])[1].help
    assert output.endswith("openvino: FILE.xml and FILE.bin.")


def test_options_that_exclude_each_other_are_refused(model, tmp_path):
    to = ["export", model, "--output", tmp_path / "m"]
    for options, message in (
        ("safetensors --int8 static", "--format onnx"),
        ("torch_export --unit", "--format torch_export has no option --unit; use --format onnx"),
        ("onnx --int8 static --unit", "cannot be combined"),
        ("safetensors --images faces.bin", "--format safetensors has no option --images"),
        ("onnx --int8 static --batch 2", "cannot be combined"),
        ("onnx --int8 static --opset 18", "cannot be combined"),
        ("safetensors", "the name of a file for safetensors ends with .safetensors"),
        ("safetensors --opset 18", "--format safetensors has no option --opset; use --format onnx"),
    ):
        refused = refusal(*to, "--format", *options.split())
        assert message in str(refused) and refused.exit_code == 2


@pytest.mark.parametrize("card", ["m.onnx", "./../here/m.onnx"])
def test_a_model_card_needs_another_file_than_the_export(card, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused = refusal("export", "m", "--format", "onnx", "--output", "m.onnx", "--model-card", card)
    assert "is given for two outputs" in str(refused) and refused.exit_code == 2
