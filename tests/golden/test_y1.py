"""InsightFace's published MobileFaceNet y1, compared with measurements by NumPy and onnxruntime."""

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.data.images.decode import decode_rgb
from facetrain.data.images.normalize import normalize
from facetrain.embeddings.inference import Inference
from facetrain.models.embedding_model import open_model
from facetrain.models.initialize_from import initialize_backbone
from facetrain.verify.evaluate import evaluate
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.sets.pair_set import load_pair_sets
from tests.support.shared import shared_path

FACES = "real/lfw_verification/lfw_folds1-2.bin"


def some_faces(count):
    faces = shared_path(FACES)
    (pairs,) = load_pair_sets([str(faces)], faces.parent)
    return torch.stack([torch.from_numpy(decode_rgb(data, location="")) for data in pairs.images[:count]])


@pytest.mark.slow
def test_y1_has_the_accuracy_on_real_faces_that_numpy_measured():
    faces, model = shared_path(FACES), shared_path("real/y1/model-symbol.json")
    options = EvaluationOptions(bootstrap=0)
    (found,) = evaluate(
        model, [str(faces)], faces.parent, options=options, inference=Inference("cpu")
    ).results.values()
    assert found.metrics["accuracy"] == pytest.approx(0.995, abs=5e-4)
    assert found.metrics["accuracy_no_flip"] == pytest.approx(0.99417, abs=5e-4)
    assert found.metrics["auc"] == pytest.approx(0.99964, abs=5e-4)


def test_the_mxnet_and_onnx_files_of_y1_give_the_same_embeddings():
    image, found = some_faces(8), []
    for name in ("model-symbol.json", "y1_rgb_pm1.onnx"):
        opened = open_model(shared_path(f"real/y1/{name}"), torch.device("cpu"))
        with torch.no_grad():
            found.append(opened.network(opened.prepare(image)))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model-symbol.json", "y1_rgb_pm1.onnx"])
def test_a_network_initialized_from_y1_gives_its_embeddings_also_in_training_mode(name):
    path, (image, others) = shared_path(f"real/y1/{name}"), some_faces(128).chunk(2)
    opened, ours = open_model(path, torch.device("cpu")), build_backbone("mbf_small", embedding_size=128)
    initialize_backbone(ours, path, lambda: normalize(others))
    with torch.no_grad():
        expected = opened.network(opened.prepare(image))
        torch.testing.assert_close(ours.eval()(normalize(image)), expected, atol=1e-4, rtol=1e-4)
        training = ours.train()(normalize(image))
    # The ONNX file has no batch-norm statistics. With other statistics than those of faces this would be 0.6.
    assert torch.nn.functional.cosine_similarity(training, expected).mean() > 0.85


def test_a_smaller_network_starts_with_the_first_blocks_of_y1():
    path = shared_path("real/y1/model-symbol.json")
    options = {"name": "mbf_small", "layers": (1, 3, 2, 0), "embedding_size": 128}
    deeper, ours = build_backbone("mbf_small", embedding_size=128), build_backbone(**options)
    initialize_backbone(deeper, path, list)
    initialize_backbone(ours, path, list, first_blocks_of=options)
    published, found = deeper.state_dict(), ours.state_dict()
    assert len(found) < len(published)
    assert all(torch.equal(value, published[name]) for name, value in found.items())
