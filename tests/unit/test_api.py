"""The Python interface: models, datasets and their errors."""

import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import get_overloads, get_type_hints

import cv2
import numpy as np
import pytest
import torch

import facetrain
from facetrain.api.runs import _as_overrides
from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import values_of_overrides
from facetrain.data.formats.bin import write_bin
from facetrain.embeddings.embed_images import embed_input
from facetrain.embeddings.inference import Inference
from facetrain.models.embedding_model import open_model
from facetrain.run.parts.teacher_embeddings import write_teacher_embeddings
from tests.support.datasets import encoded_image, write_records
from tests.support.models import SMALL, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api")
    torch.manual_seed(0)
    write_model(folder / "m.safetensors")
    write_records(folder / "faces", [0, 0, 1, 1, 2], size=32)
    (folder / "images").mkdir()
    for number, (image, _) in enumerate(facetrain.Dataset(folder / "faces")):
        cv2.imwrite(str(folder / "images" / f"{number}.png"), image[:, :, ::-1])
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return facetrain.load_model(folder / "m.safetensors", device="cpu")


def test_the_import_takes_no_torch_and_offers_all_names():
    script = "import facetrain, sys; facetrain.errors.DataError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    for name in facetrain.__all__:
        assert getattr(facetrain, name) is not None
    assert set(facetrain.__all__) <= set(dir(facetrain))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        facetrain.trian  # noqa: B018


def test_a_dataset_is_a_sequence_of_images_and_labels(folder):
    dataset = facetrain.Dataset(str(folder / "faces"))
    assert (len(dataset), dataset.num_identities, dataset.labels.tolist()) == (5, 3, [0, 0, 1, 1, 2])
    image, label = dataset[-1]
    assert image.shape == (32, 32, 3) and image.dtype == np.uint8 and label == 2
    assert [label for _, label in dataset[1:4]] == [0, 1, 1] and len(list(dataset)) == 5
    assert len(facetrain.Dataset(folder / "faces" / "train.rec")) == 5
    with pytest.raises(IndexError):
        dataset[5]
    with pytest.raises(facetrain.errors.DataError, match="no such folder"):
        facetrain.Dataset(folder / "nowhere")


def test_the_items_of_a_dataset_have_types():
    item = tuple[np.ndarray, int]
    hints = [get_type_hints(each) for each in get_overloads(facetrain.Dataset.__getitem__)]
    assert [each["return"] for each in hints] == [item, list[item]]


class Column:
    """A column of a table, as of pandas, whose rows are in another order than their labels."""

    def __init__(self, values):
        self._of_label = dict(zip(reversed(range(len(values))), values, strict=True))

    def __len__(self):
        return len(self._of_label)

    def __getitem__(self, label):
        return self._of_label[label]

    def to_list(self):
        return list(self._of_label.values())


def test_files_arrays_lists_and_datasets_give_the_same_embeddings(folder, model):
    dataset = facetrain.Dataset(folder / "faces")
    images = [image for image, _ in dataset]
    files = sorted((folder / "images").iterdir())
    expected = embed_input(folder / "m.safetensors", folder / "images", Inference("cpu")).embedding
    assert model.embedding_size == 16 and model.image_size == 32
    for given in (
        dataset, images, np.stack(images), files, [files[0], *images[1:]], folder / "images",
        [*images[:-1], memoryview(images[-1])], Column(files),
    ):  # fmt: skip
        found = model.embed(given, batch_size=2)
        assert found.dtype == np.float32 and found.shape == (5, 16)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)
    assert model.embed(str(files[0])).shape == model.embed(images[0]).shape == (1, 16)
    assert [found.shape for found in model.embed([], return_quality=True)] == [(0, 16), (0,)]
    assert not np.allclose(model.embed(images, flip=False), expected, atol=1e-3)


def test_the_quality_is_the_length_of_the_sum_with_the_mirror_image_as_float64_computes_it(folder, model):
    images = np.stack([image for image, _ in facetrain.Dataset(folder / "faces")])
    network = open_model(model.path, torch.device("cpu")).network.eval().double()
    pixels = (torch.from_numpy(images).permute(0, 3, 1, 2).double() - 127.5) / 127.5
    with torch.no_grad():
        plain, mirrored = network(pixels).numpy(), network(pixels.flip(3)).numpy()
    for flip, total in ((True, plain + mirrored), (False, plain)):
        unit, quality = model.embed(images, flip=flip, return_quality=True)
        assert quality.dtype == np.float32
        np.testing.assert_allclose(quality, np.linalg.norm(total, axis=1), rtol=1e-5)
        np.testing.assert_allclose(quality[:, None] * unit, total, atol=1e-5)


def test_two_images_are_compared_with_and_without_a_threshold(folder, model):
    image = facetrain.Dataset(folder / "faces")[0][0]
    assert model.compare(image, image).cosine == pytest.approx(1) and model.compare(image, image).same is None
    compared = model.compare(folder / "images" / "0.png", folder / "images" / "1.png", threshold=1.5)
    assert compared.same is False and -1 <= compared.cosine <= 1
    files = sorted((folder / "images").iterdir())[:2]
    assert compared.quality == pytest.approx(model.embed(files, return_quality=True)[1].tolist())
    least = sum(compared.quality) / 2
    worse, better = sorted(files, key=lambda file: compared.quality[files.index(file)])
    assert model.compare(better, better, min_quality=least).quality == (max(compared.quality),) * 2
    for pair in ((better, worse), (worse, better)):
        with pytest.raises(facetrain.errors.ImageError, match=f"{worse}: quality "):
            model.compare(*pair, min_quality=least)
    assert model.compare(image, image, threshold=0.9).same is True


def test_the_cosine_of_an_image_to_itself_is_at_most_1(folder, model, monkeypatch):
    row = np.array([1 + np.finfo(np.float32).eps, 0], np.float32)
    monkeypatch.setattr(model, "embed", lambda *_, **__: (np.stack([row, row]), np.ones(2)))
    assert model.compare("a.png", "a.png").cosine == 1


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((1, 32, 32, 3), np.float32), r"image 0: float32 \(32, 32, 3\).*uint8 \(height, width, 3\)"),
        (np.zeros((1, 3, 32, 32), np.uint8), r"uint8 \(3, 32, 32\)"),
        ([np.zeros((32, 32), np.uint8)], r"uint8 \(32, 32\)"),
        (np.zeros((32, 40), np.uint8), r"image 0: uint8 \(32, 40\)"),
        ([(np.zeros((32, 32, 3), np.uint8), 1)], "image 0: a tuple cannot be embedded"),
        ([torch.zeros(32, 32, 3, requires_grad=True)], "image 0: a Tensor cannot be embedded"),
        (["nowhere.jpg"], "nowhere.jpg: No such file"),
        ("nowhere.jpg", "nowhere.jpg: No such file"),
        ((name for name in ["a.jpg"]), "images: a generator cannot be embedded"),
        ({"a": "a.jpg"}, "images: a dict cannot be embedded"),
        (None, "images: a NoneType cannot be embedded"),
    ],
)
def test_unusable_images_are_named(model, image, message):
    with pytest.raises(facetrain.errors.DataError, match=message):
        model.embed(image)


@pytest.mark.parametrize("images", ["hf://org", ["hf://org"]])
def test_images_may_be_addresses(model, images):
    with pytest.raises(facetrain.errors.UsageError, match="^hf://org: use the form"):
        model.embed(images)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: facetrain.train({1: 2}), "config: 1: "),
        (lambda: facetrain.train(5), "config: 5: "),
        (lambda: facetrain.train(), "nothing to train on; give a config"),
        (lambda: facetrain.train("quickstart", 5), "run_dir: 5: "),
        (lambda: facetrain.train("quickstart", resume="runs/a"), "resume: 'runs/a': "),
        (lambda: facetrain.train(dataset="nowhere"), f"{Path('nowhere').absolute()}: no such folder or file"),
        (lambda: facetrain.resume("runs/a", "7b"), "checkpoint: '7b': "),
    ],
)
def test_an_argument_of_another_type_is_a_usage_error(call, message):
    with pytest.raises(facetrain.errors.UsageError) as refused:
        call()
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_landmarks_that_have_no_effect_are_refused(folder, model):
    landmarks_N52 = np.zeros((5, 5, 2), np.float32)
    with pytest.raises(facetrain.errors.UsageError, match="the network has no KP-RPE"):
        model.embed(folder / "images", landmarks=landmarks_N52)
    with_detector = facetrain.load_model(model.path, "cpu", detector=folder / "detector.onnx")
    with pytest.raises(facetrain.errors.UsageError, match="the detector finds them"):
        with_detector.embed(folder / "images", landmarks=landmarks_N52)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.tensor(0.1), r": a config cannot hold a torch\.Tensor;"),
        (date(2020, 1, 2), r": give the date 2020-01-02 as a text, in quotes"),
        ({"a": {1, 2}}, r"\.a: a config cannot hold a .*set;"),
        ([0.9, np.ones(2)], r"\[1\]: a config cannot hold a numpy\.ndarray;"),
        ({(1, 2): 3}, r": the key \(1, 2\) is not text"),
        ({"a": "caf\udce9"}, r"\.a=.*: a name that is not UTF-8;"),
        ({"caf\udce9": 1}, ".*: a name that is not UTF-8;"),
    ],
)
def test_a_value_that_no_config_can_hold_is_refused_with_its_key(value, reason):
    for config, overrides in ("quickstart", {"optim": {"lr": value}}), ({"optim": {"lr": value}}, {}):
        with pytest.raises(facetrain.errors.UsageError, match=rf"^optim\.lr{reason}"):
            facetrain.train(config, **overrides)


@pytest.mark.parametrize("dotted", [False, True])
def test_the_keys_of_a_mapping_in_a_config_may_have_dots(dotted):
    factors = {"stem.conv": 0.1, "layers.0": 0.2}
    overrides = {"model.lr_factors": factors} if dotted else {"model": {"lr_factors": factors}}
    assert values_of_overrides(_as_overrides(overrides)) == {"model": {"lr_factors": factors}}


def test_numbers_that_are_not_finite_are_for_configs_alone():
    with pytest.raises(facetrain.errors.UsageError, match=r"^optim\.lr: nan and inf cannot be given here;"):
        facetrain.train("quickstart", optim={"lr": [float("inf")]})


@pytest.mark.parametrize(
    "call", [lambda: facetrain.resume(""), lambda: facetrain.train("quickstart", run_dir="")]
)
def test_an_empty_text_is_no_run_folder(call):
    with pytest.raises(facetrain.errors.UsageError, match="the run folder is an empty text"):
        call()


def test_a_network_that_has_diverged_is_refused(folder, tmp_path):
    network = build_backbone("iresnet", **SMALL)
    torch.nn.init.constant_(network.fc.bias, float("nan"))
    write_model(tmp_path / "m.safetensors", network=network)
    model = facetrain.load_model(tmp_path / "m.safetensors", "cpu")
    files = sorted((folder / "images").iterdir())
    cached, cpu = tmp_path / "t.safetensors", Inference("cpu")
    for use in (
        lambda: model.embed(files[0]),
        lambda: model.compare(*files[:2], threshold=0.3),
        lambda: embed_input(model.path, folder / "images", cpu),
        lambda: write_teacher_embeddings(model.path, folder / "faces", cached, cpu),
    ):
        with pytest.raises(facetrain.errors.ModelError, match="image 0 "):
            use()
    assert not (tmp_path / "t.safetensors").exists()


def test_a_run_takes_the_place_of_its_folder(folder):
    run = facetrain.Run(folder / "m.safetensors")
    assert facetrain.load_model(run, "cpu").path == run.load_model("cpu").path == run.folder
    missing = facetrain.Run(folder / "absent")
    for call in (facetrain.resume, lambda run: facetrain.evaluate(run, "val", device="cpu")):
        with pytest.raises(facetrain.errors.FacetrainError, match=f"^{missing.folder}: "):
            call(missing)


def test_an_open_model_keeps_its_place_when_the_current_folder_changes(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    model = facetrain.load_model("m.safetensors", "cpu", detector="detector.onnx")
    monkeypatch.chdir(tmp_path)
    assert model.path == folder / "m.safetensors"
    with pytest.raises(facetrain.errors.DataError, match=f"^{folder / 'detector.onnx'}: "):
        model.embed(folder / "images")


def test_to_open_a_model_and_embed_leaves_the_generator_of_the_program_as_it_was(folder):
    before = torch.get_rng_state()
    facetrain.load_model(folder / "m.safetensors", device="cpu").embed(folder / "images")
    assert torch.equal(torch.get_rng_state(), before)


def test_sets_are_given_as_text_or_paths_one_or_several(model, tmp_path):
    images = [encoded_image(number, 32) for number in range(40)]
    path = tmp_path / "val.bin"
    write_bin(path, images, [number % 2 == 0 for number in range(20)])
    results = [
        facetrain.evaluate(model, sets, bootstrap=0) for sets in (str(path), path, [path], (str(path),))
    ]
    assert all(result == results[0] and result.keys() == {"val"} for result in results)


def test_the_second_image_of_each_pair_is_embedded_by_the_gallery_model(model, tmp_path):
    write_bin(tmp_path / "val.bin", [encoded_image(number, 32) for number in range(40)], [True, False] * 10)
    torch.manual_seed(1)
    write_model(tmp_path / "other.safetensors")
    plain, same, other = (
        facetrain.evaluate(model, "val", tmp_path, gallery_model=gallery, bootstrap=0)["val"]["auc"]
        for gallery in (None, model.path, str(tmp_path / "other.safetensors"))
    )
    assert plain == same != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0: too small; give a number of at least 1"),
        ({"bootstrap": -1}, "bootstrap -1: .* at least 0"),
        ({"bootstrap": 38}, "bootstrap 38: .* at least 39"),
        ({"seed": -1}, "seed -1: .* at least 0"),
        ({"device": "gpu"}, "unknown device; choose one of auto, cpu, cuda"),
        ({"data_dir": "s3://b/x/"}, "^s3://b/x: .* such as s3://b/x/lfw.bin$"),
    ],
)
def test_unusable_options_are_errors_of_facetrain(folder, model, options, message):
    with pytest.raises(facetrain.errors.UsageError, match=message):
        facetrain.evaluate(model, "val", **{"data_dir": folder} | options)
    if "batch_size" in options:
        with pytest.raises(facetrain.errors.UsageError, match=message):
            model.embed(folder / "images", **options)


def test_under_torchrun_each_rank_loads_a_model_onto_its_own_gpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("facetrain.api.model.open_model", lambda file, device, **_: device)
    for variables, number in ({}, 0), ({"LOCAL_RANK": "1"}, 0), ({"RANK": "3", "WORLD_SIZE": "4"}, 1):
        for name, value in ({"MASTER_ADDR": "127.0.0.1"} | variables).items():
            monkeypatch.setenv(name, value)
        assert facetrain.load_model(folder / "m.safetensors").device == torch.device("cuda", number)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # CUDA_VISIBLE_DEVICES shows it alone
    assert facetrain.load_model(folder / "m.safetensors").device == torch.device("cuda", 0)


def test_a_machine_without_a_gpu_is_a_usage_error_that_names_the_argument(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for call in (facetrain.load_model, lambda path, device: facetrain.evaluate(path, "lfw", device=device)):
        with pytest.raises(facetrain.errors.UsageError, match="'cuda'.*'cpu'"):
            call(tmp_path / "nothing.safetensors", device="cuda")
    for config, settings, message in (
        ("quickstrt", {}, "quickstrt: no such file or preset; did you mean"),
        ("quickstart", {"train": {"epochs": -1}}, "train.epochs"),
        ("quickstart", {"optim.lr": "high"}, "optim.lr"),
    ):
        with pytest.raises(facetrain.errors.ConfigError, match=message):
            facetrain.train(config, **settings)
    with pytest.raises(facetrain.errors.UsageError, match=r"config\.yaml"):
        facetrain.resume(tmp_path)
