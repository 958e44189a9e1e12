from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from facetrain.data.formats.bin import write_bin
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.errors import ImageError, PairsError
from facetrain.verify.output.figures import result_figures
from facetrain.verify.pair_protocol import verification_result
from facetrain.verify.sets.pair_set import PairSet, load_pair_sets
from facetrain.verify.verifier import Verifier
from tests.support.datasets import encoded_image


def pair_set(name="set", pairs=20):
    # A genuine pair is the same image twice.
    images = [encoded_image(n if k == 0 or n % 2 else 1000 + n) for n in range(pairs) for k in range(2)]
    return PairSet(name, images, np.arange(pairs) % 2 == 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3 * 16 * 16, 8)

    def forward(self, x):
        return self.fc(self.norm(x).flatten(1))


def make_verifier(*sets, progress=None):
    embedder = partial(ImageEmbedder, image_size=16, batch_size=7, device=torch.device("cpu"))
    return Verifier(sets, embedder, progress)


def test_the_progress_names_the_set_that_is_embedded():
    shown = []
    pairs = pair_set()
    dict(make_verifier(pairs, progress=lambda *report: shown.append(report))(Net()))
    count = len(set(pairs.images))
    assert shown == [("set", min(done, count), count) for done in range(7, count + 7, 7)]


def test_verification_separates_the_pairs_and_does_not_change_the_network():
    net = Net()
    net.norm.eval()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    state = torch.get_rng_state()
    ((name, result),) = make_verifier(pair_set())(net)
    metrics = result.available_metrics
    assert (name, metrics["accuracy"], metrics["auc"]) == ("set", 1.0, 1.0)
    assert metrics["accuracy_no_flip"] == 1.0 and metrics["xnorm"] > 0
    assert net.training and not net.norm.training
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_xnorm_is_the_mean_length_over_images_and_mirror_images():
    plain, mirrored = np.eye(4), 3 * np.eye(4)
    result = verification_result(plain, mirrored, PairSet("set", [b""] * 4, np.array([True, False])))
    assert result.metrics["xnorm"] == 2


def test_an_image_in_several_pairs_is_embedded_once():
    images = [encoded_image(number) for number in (4, 9, 4, 2, 9, 9)]
    rows = []

    def embed(image_BCHW):
        rows.append(len(image_BCHW))
        return image_BCHW.flatten(1)

    embedder = ImageEmbedder(embed, image_size=16, batch_size=2, device=torch.device("cpu"))
    plain, mirrored = embedder.embed_plain_and_mirrored(images, name="set")
    alone = [embedder.embed([one], name="set", flip=False)[0] for one in images]
    assert sum(rows[:-6]) == 2 * 3
    assert np.array_equal(plain, np.stack(alone)) and np.array_equal(mirrored[0], mirrored[2])
    assert not np.array_equal(plain[0], plain[1]) and not np.array_equal(plain[0], mirrored[0])


def test_a_diverged_network_has_accuracy_zero():
    net = Net()
    nn.init.constant_(net.fc.weight, float("nan"))
    result = dict(make_verifier(pair_set())(net))["set"]
    assert result.metrics == {"accuracy": 0.0, "accuracy_std": 0.0, "pairs": 20.0}
    assert result_figures(result) == {}


def test_a_damaged_image_is_named_by_set_and_index():
    pairs = pair_set()
    pairs.images[5] = b"nothing"
    with pytest.raises(ImageError, match="set: image 5"):
        dict(make_verifier(pairs)(Net()))


def test_sets_are_found_by_name_or_path_and_a_missing_set_is_named(tmp_path):
    for name in ("lfw", "other"):
        write_bin(tmp_path / f"{name}.bin", [encoded_image(n) for n in range(4)], [True, False])
    sets = load_pair_sets(["lfw", str(tmp_path / "other.bin")], tmp_path)
    assert [pairs.name for pairs in sets] == ["lfw", "other"]
    with pytest.raises(PairsError, match="lfw, other"):
        load_pair_sets(["lfv"], tmp_path)
    (tmp_path / "TINYFACE").mkdir()
    with pytest.raises(PairsError, match=r"TINYFACE is a folder.*facetrain eval MODEL --target"):
        load_pair_sets(["tinyface"], tmp_path)
    with pytest.raises(PairsError, match="same name"):
        load_pair_sets(["lfw", str(tmp_path / "lfw.bin")], tmp_path)
