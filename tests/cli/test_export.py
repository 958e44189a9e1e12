"""`facetrain export`: quantization, comparison with the model, and the model card."""

import json
from typing import get_args, get_type_hints

import pytest

from facetrain.backbone.zoo import build_backbone
from facetrain.cli.export_options import Outputs
from facetrain.data.formats.bin import write_bin
from facetrain.models.model_file import save_model
from facetrain.models.weight_files import read_weights
from facetrain.text import percent
from tests.support.command import facetrain, output_of, refusal
from tests.support.faces import face
from tests.support.models import write_model
from tests.support.mxnet_files import randomize, write_iresnet

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
        "export", model, "--format", "onnx", "--output", tmp_path / "small.onnx", "--int8",
        "--images", tmp_path / "faces.bin", "--target", "faces",
        "--data-dir", tmp_path, "--json", "--model-card", tmp_path / "card.md",
    )  # fmt: skip
    report = json.loads(printed)
    cosine = report["cosine"]
    assert 0.98 < cosine["lowest"] <= cosine["mean"] <= 1 and cosine["images"] == 8
    card, shown = (
        (tmp_path / "card.md").read_text(),
        json.loads(
            output_of(
                "eval", tmp_path / "small.onnx", "--target", "faces", "--data-dir", tmp_path, "--json", "-"
            )
        ),
    )
    accuracy = shown["sets"]["faces"]["accuracy"]
    assert card.startswith("# small.onnx\n") and f"| faces | accuracy | {percent(accuracy)} |" in card
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
    options = ("--opset", 17, "--batch", 4, "--model-card", card)  # by the faster exporter
    output_of("export", graph, "--output", output, *options)
    expected = (
        "- input of the file: float32 (4, 3, 112, 112), RGB, pixels from 0 to 255; it normalizes them itself"
    )
    assert expected in card.read_text()


def test_a_network_that_the_format_cannot_store_is_refused_before_its_evaluation(tmp_path):
    network = build_backbone("iresnet", layers=(1, 1, 1, 1), widths=(4, 4, 4, 4))
    graph = write_iresnet(tmp_path, randomize(network))
    card = ("--model-card", tmp_path / "card.md", "--target", "no_set")
    error = str(refusal("export", graph, "--output", tmp_path / "m.safetensors", *card))
    assert "--format safetensors" in error and "no_set" not in error


@pytest.mark.slow
def test_a_quantized_model_has_none_of_the_thresholds_that_were_measured_before(model, tmp_path):
    import onnx

    file = read_weights(model)
    save_model(model, file.weights, json.loads(file.metadata["facetrain"]) | {"thresholds": []})
    arguments = ["export", model, "--format", "onnx", "--output", tmp_path / "small.onnx", "--int8"]
    printed = output_of(*arguments)
    assert "The file has no thresholds: those of the model were measured in float32" in printed
    assert f"facetrain calibrate {tmp_path / 'small.onnx'} --people" in printed
    stored = {entry.key for entry in onnx.load(tmp_path / "small.onnx").metadata_props}
    assert "backbone" in stored and "thresholds" not in stored


@pytest.mark.slow
def test_a_torch_export_program_reports_its_difference(model, tmp_path):
    printed = output_of(
        "export", model, "--format", "torch_export", "--output", tmp_path / "m.pt2", "--json",
        "--target", "faces", "--data-dir", tmp_path, "--model-card", tmp_path / "card.md",
    )  # fmt: skip
    assert "| faces | accuracy |" in (tmp_path / "card.md").read_text()
    found = json.loads(printed)
    refused = refusal("compare", tmp_path / "m.pt2", tmp_path / "faces.bin", tmp_path / "faces.bin")
    assert "m.pt2: is a program that torch.export wrote" in str(refused) and refused.exit_code == 2
    assert found["difference"] < 1e-4


@pytest.mark.slow
def test_the_file_is_compared_on_given_faces_and_its_size_is_printed(model, tmp_path):
    done = facetrain(
        "export", model, "--format", "onnx", "--opset", 17, "--output", tmp_path / "m.onnx", "--from-pixels",
        "--images", tmp_path / "faces.bin", "--model-card", tmp_path / "card.md",
    )  # fmt: skip
    first, given, second = done.stdout.splitlines()
    assert done.stderr == f"writing {tmp_path / 'm.onnx'}\n"
    assert given == "input: uint8 (N, 32, 32, 3), RGB, pixels from 0 to 255; it normalizes them itself"
    assert "differs by at most" in first and "40 images)" in first
    size = (tmp_path / "m.onnx").stat().st_size / 1e6
    assert second == f"{size:.2f} MB"
    card = (tmp_path / "card.md").read_text()
    assert (
        f"- input of the file: {given.removeprefix('input: ')}" in card and f"- size: {size:.2f} MB" in card
    )
    assert "127.5" not in card  # the file takes pixels, and not what the network takes
    (tmp_path / "none").mkdir()
    refused = refusal(
        "export", model, "--format", "onnx", "--output", tmp_path / "n.onnx", "--images", tmp_path / "none"
    )
    assert "neither train.rec nor images" in str(refused) and not (tmp_path / "n.onnx").exists()


@pytest.mark.parametrize(("form", "place"), [("folder", "faces/2.jpg"), ("bin", "faces.bin: image 2")])
def test_a_damaged_image_is_named_by_its_place(model, tmp_path, monkeypatch, form, place):
    monkeypatch.setattr("facetrain.cli.export._NUM_COMPARED", 2)  # the first and the third image
    images = [face(n) for n in range(4)]
    images[2] = b"no image"
    write_bin(tmp_path / "faces.bin", images, [False, False])
    (tmp_path / "faces").mkdir()
    for number, image in enumerate(images):
        (tmp_path / "faces" / f"{number}.jpg").write_bytes(image)
    given = tmp_path / {"folder": "faces", "bin": "faces.bin"}[form]
    refused = refusal("export", model, "--output", tmp_path / "m.onnx", "--images", given)
    assert str(refused).startswith(f"{tmp_path / place}: its 8 bytes") and refused.exit_code == 2


@pytest.mark.parametrize("int8", [[], ["--int8"]])
def test_a_set_that_cannot_be_read_leaves_no_file(model, tmp_path, int8):
    card, output = ["--model-card", tmp_path / "card.md"], tmp_path / "m.onnx"
    refused = refusal("export", model, "--output", output, *int8, "--target", "none", *card)
    assert "no such verification set" in str(refused) and refused.exit_code == 2
    assert not output.exists()


def test_the_help_names_the_files_of_each_format():
    output = get_args(get_type_hints(Outputs, include_extras=True)["output"])[1].help
    assert output.endswith("openvino: FILE.xml and FILE.bin.")


def test_a_verification_set_of_the_name_of_the_weights_is_not_replaced(model, tmp_path):
    refused = refusal("export", model, "--output", tmp_path / "faces.xml")
    assert f"would also replace {tmp_path / 'faces.bin'}" in str(refused) and refused.exit_code == 2


def test_options_that_exclude_each_other_are_refused(model, tmp_path):
    for name, options, message in (
        ("m.safetensors", "--int8", "--format onnx"),
        ("m.pt2", "--unit", "--format torch_export has no option --unit; use --format onnx"),
        ("m.pt2", "--batch 1", "--format torch_export has no option --batch; use --format onnx or openvino"),
        ("m.xml", "--opset 17", "--format openvino has no option --opset; use --format onnx"),
        ("m.onnx", "--int8 --unit", "cannot be combined"),
        ("m.safetensors", "--images faces.bin", "--format safetensors has no option --images"),
        ("m.onnx", "--target lfw", "--model-card"),
        ("m.onnx", "--license mit", "--model-card"),
        ("m.onnx", "--data-dir sets", "--target"),
        ("m.onnx", "--private --model-card card.md", "--push"),
    ):
        refused = refusal("export", model, "--output", tmp_path / name, *options.split())
        assert message in str(refused) and refused.exit_code == 2


@pytest.mark.parametrize(
    ("name", "format", "suffixes"),
    [
        ("m.pt", [], (".onnx", ".pt2", ".xml", ".safetensors")),
        ("m.pt", ["--format", "onnx"], (".onnx",)),
        ("m.onnx", ["--format", "openvino"], (".xml",)),
    ],
)
def test_the_suffix_says_the_format_and_contradicts_no_other(model, tmp_path, name, format, suffixes):
    refused = refusal("export", model, "--output", tmp_path / name, *format)
    assert refused.exit_code == 2 and all(suffix in str(refused) for suffix in suffixes)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("card", ["m.onnx", "./../here/m.onnx"])
def test_a_model_card_needs_another_file_than_the_export(card, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused = refusal("export", "m", "--format", "onnx", "--output", "m.onnx", "--model-card", card)
    assert "is given for two outputs" in str(refused) and refused.exit_code == 2
