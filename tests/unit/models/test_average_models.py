"""Weighted averages of models."""

import math
from pathlib import Path

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ModelError
from facetrain.models.average_models import average_models
from facetrain.models.embedding_model import open_model
from facetrain.models.model_file import describe_backbone, save_model, training_data
from tests.support.command import refusal
from tests.support.models import write_model
from tests.support.mxnet_files import randomize, write_iresnet

OPTIONS = {"layers": (1, 1, 1, 1), "widths": (4, 4, 8, 8), "embedding_size": 8, "image_size": 112}


def write(path, seed, **description):
    network = randomize(build_backbone("iresnet", **OPTIONS), seed=seed)
    return write_model(path, options=OPTIONS, network=network, **description).state_dict()


def opened(path):
    return open_model(path, torch.device("cpu"))


@pytest.mark.slow
def test_parameters_and_statistics_are_averaged_by_their_weights(tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    states = [write(path, seed) for seed, path in enumerate(paths)]
    average_models(paths, [1, 2, 5], tmp_path / "out.safetensors")
    found = opened(tmp_path / "out.safetensors").network.state_dict()
    for name, value in found.items():
        one, two, three = (state[name].double() for state in states)
        expected = (one + 2 * two + 5 * three) / 8 if value.is_floating_point() else one
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)


def test_the_description_is_that_of_the_first_model_without_what_was_measured_on_it(tmp_path, monkeypatch):
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write(first, 0, thresholds=[{"fmr": 1e-3}], step=4, config={"seed": 3})
    write(second, 1)
    monkeypatch.chdir(tmp_path)
    average_models([Path("a.safetensors"), second], [0.25, 0.75], tmp_path / "out.safetensors")
    metadata = opened(tmp_path / "out.safetensors").metadata
    assert metadata["config"] == {"seed": 3} and not metadata.keys() & {"thresholds", "step"}
    parts = [(part["model"], part["weight"]) for part in metadata["average_of"]]
    assert parts == [(str(first), 0.25), (str(second), 0.75)]


def test_the_data_of_all_models_are_known_of_their_average_and_of_its_average(tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in "abcd"]
    for seed, (path, data) in enumerate(zip(paths[:3], ("first", "second", "first"), strict=True)):
        write(path, seed, trained_on=[f"/{data}"], datasets=[{"name": data}])
    write(paths[3], 3)
    average_models(paths[:3], [1, 1, 1], tmp_path / "average.safetensors")
    metadata = opened(tmp_path / "average.safetensors").metadata
    assert metadata["datasets"] == [{"name": "first"}, {"name": "second"}]
    assert training_data(metadata) == ["/first", "/second"]
    average_models([paths[3], tmp_path / "average.safetensors"], [1, 1], tmp_path / "next.safetensors")
    metadata = opened(tmp_path / "next.safetensors").metadata
    assert metadata["datasets"] == [{"name": "first"}, {"name": "second"}]
    assert training_data(metadata) == ["/first", "/second"]


def test_a_file_of_mxnet_is_averaged_with_a_network_that_was_fine_tuned_from_it(tmp_path):
    options = {name: value for name, value in OPTIONS.items() if name != "image_size"}
    path = write_iresnet(tmp_path, randomize(build_backbone("iresnet", **options), eps=2e-5))
    write(tmp_path / "tuned.safetensors", 5)
    average_models([tmp_path / "tuned.safetensors", path], [0, 1], tmp_path / "out.safetensors")
    image = torch.randint(0, 256, (2, 112, 112, 3), dtype=torch.uint8)
    models = [opened(path), opened(tmp_path / "out.safetensors")]
    with torch.no_grad():
        expected, found = (model.network.eval()(model.prepare(image)) for model in models)
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("value", [0.0, math.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_weights_that_are_zero_or_not_finite_are_refused(tmp_path, value, place):
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, path in enumerate(paths):
        write(path, seed)
    network = randomize(build_backbone("iresnet", **OPTIONS), seed=9)
    network.layer3[0].conv1.weight.data.fill_(value)
    write_model(paths[place], options=OPTIONS, network=network)
    with pytest.raises(ModelError, match=rf"{paths[place].name}: layer3.0.conv1.weight"):
        average_models(paths, [1, 1], tmp_path / "out.safetensors")


@pytest.mark.parametrize("changed", ["image_size", "preprocessing"])
def test_a_model_for_other_images_is_refused_although_its_weights_fit(tmp_path, changed):
    """The network ends with a global pooling, so that its weights do not show the size of the images."""
    first, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    network = build_backbone("resnet18", embedding_size=8)
    for path, size in ((first, 112), (other, 64 if changed == "image_size" else 112)):
        description = describe_backbone("resnet18", embedding_size=8, image_size=size)
        if path == other and changed == "preprocessing":
            description["preprocessing"] = description["preprocessing"] | {"channels": "BGR"}
        save_model(path, network.state_dict(), description)
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        average_models([first, other], [1, 1], tmp_path / "out.safetensors")


def test_other_networks_and_wrong_weights_are_refused(tmp_path):
    first, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write(first, 0)
    write_model(other, options=OPTIONS | {"widths": (4, 4, 8, 16)})
    with pytest.raises(ModelError, match=r"b\.safetensors: .*layer4\.0\.conv1"):
        average_models([first, other], [1, 1], tmp_path / "out.safetensors")
    for weights in ([1, -1], [math.inf, 1], [math.nan, 1], [0, 0]):
        with pytest.raises(ModelError, match="finite"):
            average_models([first, first], weights, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    out = ["--output", tmp_path / "out.safetensors"]
    assert "needs at least two models" in str(refusal("average", first, *out))
    assert "2 models cannot be averaged with the weights [1.0]" in str(
        refusal("average", first, first, "--weight", 1, *out)
    )
    assert "ends with .safetensors" in str(refusal("average", first, first, "--output", tmp_path / "m.onnx"))


def test_the_model_of_a_run_that_is_averaged_is_not_replaced(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    write(run / "model.safetensors", 0)
    write(tmp_path / "b.safetensors", 1)
    before = (run / "model.safetensors").read_bytes()
    error = refusal("average", run, tmp_path / "b.safetensors", "--output", run / "model.safetensors")
    assert "is an input of the command" in str(error)
    assert (run / "model.safetensors").read_bytes() == before
