"""Networks with KP-RPE in evaluation and export: every path gives the embeddings of the network with its landmarks."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import facetrain
from facetrain.api.model import Model
from facetrain.backbone.keypoint_vit import KeypointVisionTransformer
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.landmark_file import write_landmarks
from facetrain.data.images.augment import mirror_landmarks
from facetrain.data.images.decode import decode_rgb
from facetrain.data.images.normalize import normalize
from facetrain.distributed.world import join
from facetrain.embeddings.embed_images import embed_images, embed_input, open_embedder
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.image_inputs import read_input
from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError, ModelError
from facetrain.face_landmarks import ARCFACE_TEMPLATE, NORMALIZED_TEMPLATE
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from facetrain.models.inference_network import inference_network
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.pair_protocol import verification_result
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.protocols import evaluate_set
from facetrain.verify.sets.ijb import open_ijb
from facetrain.verify.sets.pair_set import load_pair_set
from facetrain.verify.verifier import Verifier
from tests.support.datasets import encoded_image, write_records
from tests.support.protocols import write_ijb

CPU = torch.device("cpu")
COUNT = 12


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    sizes = {"heads": 2, "mlp_ratio": 2, "embedding_size": 12, "image_size": 32}
    net = KeypointVisionTransformer(8, 2, drop_path=0.0, **sizes)
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=2.0 if name.startswith("keypoint") else 0.4)
    return net.eval()


@pytest.fixture
def opened(network):
    return EmbeddingModel(network, 32, 12, normalize, "small")


@pytest.fixture
def landmarks():
    return np.random.default_rng(0).uniform(0, 1, (COUNT, 5, 2)).astype(np.float32)


IMAGES = [encoded_image(n, 32) for n in range(COUNT)]


def expected(network, points, *, mirrored):
    image = normalize(torch.from_numpy(np.stack([decode_rgb(data, location="x") for data in IMAGES])))
    points = torch.from_numpy(np.array(points))
    if mirrored:
        image, points = image.flip(3), mirror_landmarks(points)
    with torch.no_grad():
        return network(image, points).numpy()


def aligned(count=COUNT):
    return np.broadcast_to(NORMALIZED_TEMPLATE, (count, 5, 2))


@pytest.fixture
def val(tmp_path):
    write_bin(tmp_path / "val.bin", IMAGES, [True, False] * (COUNT // 4))


@pytest.mark.usefixtures("val")
def test_pairs_are_embedded_with_the_landmarks_beside_the_set(network, landmarks, tmp_path):
    landmarks[3] = np.nan
    write_landmarks(tmp_path / "val.landmarks.npy", landmarks)
    pairs = load_pair_set("val", tmp_path)
    embedder = ImageEmbedder(network, 32, 5, CPU)
    found = embedder.embed_plain_and_mirrored(pairs.images, name="val", landmarks=pairs.landmarks)
    verified = Verifier([pairs], partial(ImageEmbedder, image_size=32, batch_size=5, device=CPU))
    expected_result = verification_result(*found, pairs, draws=Draws(0))
    assert verified.score(embedder, pairs).metrics == expected_result.metrics
    landmarks[3] = NORMALIZED_TEMPLATE
    for embedding, mirrored in zip(found, (False, True), strict=True):
        np.testing.assert_allclose(embedding, expected(network, landmarks, mirrored=mirrored), atol=1e-5)
    rows = embedder.embed_rows(
        pairs.images, name="val", mirrored=True, indices=range(2, 9), landmarks=pairs.landmarks
    )
    np.testing.assert_allclose(rows, np.stack(found, 1)[2:9], atol=1e-5)
    write_landmarks(tmp_path / "val.landmarks.npy", landmarks[1:])
    with pytest.raises(DataError, match="12 images"):
        load_pair_set("val", tmp_path)


@pytest.mark.usefixtures("val")
def test_both_models_of_a_mixed_evaluation_get_the_landmarks_of_their_images(network, landmarks, tmp_path):
    write_landmarks(tmp_path / "val.landmarks.npy", landmarks)
    embedder = ImageEmbedder(network, 32, 5, CPU)
    pairs, options = load_pair_set("val", tmp_path), EvaluationOptions(bootstrap=0)
    alone, mixed = (
        evaluate_set(pairs, embedder, options, gallery=gallery)["val"] for gallery in (None, embedder)
    )
    scores = [
        [pair.score for pair in (*one.hardest_genuine, *one.hardest_impostors)] for one in (mixed, alone)
    ]
    np.testing.assert_allclose(*scores, atol=1e-6)


def test_without_a_file_the_landmarks_are_those_of_aligned_faces(network):
    for net in (network, inference_network(network, CPU)):
        plain, mirrored = ImageEmbedder(net, 32, 5, CPU).embed_plain_and_mirrored(IMAGES, name="val")
        np.testing.assert_allclose(plain, expected(network, aligned(), mirrored=False), atol=1e-5)
        np.testing.assert_allclose(mirrored, expected(network, aligned(), mirrored=True), atol=1e-5)


@pytest.mark.usefixtures("val")
def test_a_dataset_and_a_set_are_embedded_with_their_landmarks(
    network, opened, landmarks, tmp_path, monkeypatch
):
    write_landmarks(tmp_path / "val.landmarks.npy", landmarks)
    with join("cpu") as world:
        images, _, _, read_points = read_input(tmp_path / "val.bin")
        embedder = open_embedder(opened, world, Inference("cpu", 5))
        found, _ = embed_images(embedder, images, "val", flip=False, landmarks=read_points())
    plain = expected(network, landmarks, mirrored=False)
    unit = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    np.testing.assert_allclose(found, unit, atol=1e-5)
    monkeypatch.setattr("facetrain.embeddings.embed_images.open_model", lambda path, device: opened)
    embedded = embed_input(tmp_path / "model", tmp_path / "val.bin", Inference("cpu", 5), flip=False)
    np.testing.assert_allclose(embedded.embedding, unit, atol=1e-5)

    folder = write_records(tmp_path / "records", [n // 2 for n in range(COUNT)], size=32)
    write_landmarks(folder / "landmarks.npy", landmarks)
    np.testing.assert_array_equal(read_input(folder).landmarks(), landmarks)
    model = Model(tmp_path, opened, CPU)
    by_path, by_dataset = model.embed(folder), model.embed(facetrain.Dataset(folder))
    arrays = [image for image, _ in facetrain.Dataset(folder)]
    np.testing.assert_allclose(by_path, model.embed(arrays, landmarks=landmarks), atol=1e-6)
    np.testing.assert_allclose(by_path, by_dataset, atol=1e-6)
    assert np.abs(by_path - model.embed(arrays)).max() > 0.01
    with pytest.raises(DataError, match=r"expected \(12, 5, 2\)"):
        model.embed(arrays, landmarks=landmarks[1:])
    with pytest.raises(DataError, match="landmarks in pixels, not in fractions of the image's sides; divide"):
        model.embed(arrays, landmarks=32 * landmarks)
    with pytest.raises(DataError, match=r"landmarks: .*; expected an array of numbers \(12, 5, 2\)"):
        model.embed(arrays, landmarks=[["left eye"]])
    # An image beside the dataset is no part of it.
    (folder / "preview.png").write_bytes(encoded_image(0, 32))
    for path in (folder, folder / "train.rec"):
        np.testing.assert_allclose(by_dataset, model.embed(facetrain.Dataset(path)), atol=1e-6)


def test_the_landmarks_of_ijb_are_aligned_with_its_faces(tmp_path):
    write_ijb(tmp_path)
    turned = (ARCFACE_TEMPLATE - 56) @ np.array([[0.8, 0.6], [-0.6, 0.8]]) * 2 + 300
    lists = replace(open_ijb(tmp_path, "ijbc"), landmarks=turned[None])
    np.testing.assert_allclose(lists.aligned_landmarks[0], NORMALIZED_TEMPLATE, atol=1e-6)


def test_the_images_of_ijb_are_embedded_with_their_landmarks(tmp_path):
    write_ijb(tmp_path)
    target, seen = open_ijb(tmp_path, "ijbc"), []
    shift = np.random.default_rng(0).normal(size=target.landmarks.shape)
    target = replace(target, landmarks=(target.landmarks + shift).astype(np.float32))

    def network(image_BCHW, landmarks_B52):
        seen.extend(landmarks_B52)
        return image_BCHW.mean((2, 3))

    network.takes_landmarks = True
    evaluate_set(target, ImageEmbedder(network, 32, 5, CPU), EvaluationOptions(bootstrap=0, flip=False))
    np.testing.assert_allclose(seen, target.aligned_landmarks, atol=1e-6)


@pytest.mark.slow
def test_onnx_takes_landmarks_as_a_second_input(network, opened, landmarks, tmp_path):
    path = tmp_path / "model.onnx"
    assert export(opened, "onnx", path, ExportOptions()).comparison.difference < 1e-4
    written = open_model(path, CPU)
    assert written.takes_landmarks
    embedder = ImageEmbedder(written.network, 32, 5, CPU)
    found = embedder.embed(IMAGES, name="val", flip=False, landmarks=landmarks)
    np.testing.assert_allclose(found, expected(network, landmarks, mirrored=False), atol=1e-4)
    with torch.no_grad():
        image = normalize(torch.from_numpy(np.stack([decode_rgb(IMAGES[0], location="x")])))
        np.testing.assert_allclose(written.network(image), network(image), atol=1e-4)


def test_a_vision_transformer_is_not_quantized(opened, tmp_path):
    with pytest.raises(ModelError, match="--int8 quantizes IResNets and MobileFaceNets"):
        export(opened, "onnx", tmp_path / "int8.onnx", ExportOptions(int8=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_program_takes_landmarks_after_the_images(opened, tmp_path):
    exported = export(opened, "torch_export", tmp_path / "model.pt2", ExportOptions())
    assert exported.comparison.difference < 1e-4
