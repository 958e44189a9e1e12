"""Sets of pairs and TinyFace on small sets in the official layouts, and what holds for the protocols of all sets."""

import lzma
import shutil
from dataclasses import replace
from itertools import pairwise

import cv2
import numpy as np
import pytest
import torch

from facetrain.data.formats.bin import write_bin
from facetrain.errors import ModelError, PairsError
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.protocols import evaluate_set
from facetrain.verify.sets.open_sets import open_set
from tests.support.faces import embedder, face
from tests.support.protocols import evaluated, write_ijb, write_tinyface


@pytest.mark.parametrize("ending", [".bin", ".xz", ".bin.xz"])
def test_a_name_prefers_the_bin_set_to_a_folder_of_the_same_name(tmp_path, monkeypatch, ending):
    write_bin(tmp_path / "lfw.bin", [face(n) for n in range(4)], [True, False])
    if ending != ".bin":
        (tmp_path / f"lfw{ending}").write_bytes(lzma.compress((tmp_path / "lfw.bin").read_bytes()))
        (tmp_path / "lfw.bin").unlink()
    (tmp_path / "lfw").mkdir()
    monkeypatch.chdir(tmp_path)
    assert open_set("lfw", tmp_path).images
    with pytest.raises(PairsError, match=r"^lfw: .*facetrain data pairs"):
        open_set("./lfw/", tmp_path / "lfw")


def test_a_folder_in_upper_case_is_found_by_the_name_of_its_set(tmp_path):
    write_tinyface(tmp_path / "TINYFACE", people=2)
    assert open_set("tinyface", tmp_path).name == "tinyface"


@pytest.mark.parametrize("write", [write_ijb, write_tinyface])
def test_a_set_in_the_current_folder_has_the_name_of_the_folder(tmp_path, monkeypatch, write):
    folder = write(tmp_path / "Some")
    monkeypatch.chdir(folder)
    assert open_set(".", tmp_path).name == "some"
    monkeypatch.chdir(next(path for path in folder.iterdir() if path.is_dir()))
    assert open_set("..", tmp_path).name == "some"


@pytest.mark.parametrize("root", ["", "Testing_Set", "tinyface/Testing_Set"])
def test_tinyface_is_found_in_the_folders_of_its_archive_and_below_a_hidden_one(tmp_path, root):
    folder = tmp_path / ".data" / "set"
    probe = write_tinyface(folder / root, people=2, distractors=1) / "Probe" / "1_2.png"
    probe.rename(probe.with_suffix(".PNG"))
    found = open_set(str(folder), tmp_path)
    assert (len(found.probes), len(found.gallery)) == (4, 5)
    shutil.rmtree(probe.parent)
    probe.parent.mkdir()
    with pytest.raises(PairsError, match="Probe: the folder has no images"):
        open_set(str(folder), tmp_path)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("write", [write_ijb, write_tinyface])
def test_the_mirror_images_of_all_images_or_of_none_are_embedded(tmp_path, write, flip):
    write(tmp_path / "set")
    seen = []

    def network(image_BCHW):
        seen.append(image_BCHW)
        return image_BCHW.mean((2, 3))

    options = EvaluationOptions(bootstrap=0, flip=flip)
    evaluate_set(open_set("set", tmp_path), replace(embedder(), network=network), options)
    if flip:
        assert all(torch.equal(one.flip(3), other) for one, other in zip(seen[::2], seen[1::2], strict=True))
    else:
        assert not any(torch.equal(one.flip(3), other) for one, other in pairwise(seen))


def test_hidden_files_are_no_images_of_a_set(tmp_path):
    folder = write_tinyface(tmp_path / "set")
    before = evaluated("set", tmp_path)
    for path in [*folder.rglob("*.png"), *folder.rglob("*.jpg")]:
        path.with_name(f"._{path.name}").write_bytes(b"attributes that macOS keeps beside an image")
    after = evaluated("set", tmp_path)
    assert [one.metrics for one in after.values()] == [one.metrics for one in before.values()]


@pytest.mark.parametrize("gallery_factors", [None, (1, 0.4, 2)])
def test_tinyface_ranks_equal_a_sort_of_the_gallery(tmp_path, gallery_factors):
    folder = write_tinyface(tmp_path / "tinyface")
    gallery_model = gallery_factors and embedder(factors=gallery_factors)
    found = evaluated("tinyface", tmp_path, gallery=gallery_model)["tinyface"]
    seen = {}
    for path in sorted(folder.rglob("*.png")):
        color = (cv2.imread(str(path))[0, 0, ::-1].astype(float) - 127.5) / 127.5
        color *= (gallery_factors or 1) if path.parent.name != "Probe" else 1
        seen[path] = color / np.linalg.norm(color)
    gallery = [p for p in seen if p.parent.name != "Probe"]
    ranks = []
    for probe in (p for p in seen if p.parent.name == "Probe"):
        order = sorted(gallery, key=lambda p: -float(seen[p] @ seen[probe]))
        is_mate = [p.parent.name == "Gallery_Match" and p.name[0] == probe.name[0] for p in order]
        ranks.append(is_mate.index(True))
    for rank in (1, 5, 10, 20):
        assert found.metrics[f"rank{rank}"] == pytest.approx(np.mean(np.array(ranks) < rank))
    assert [found.metrics[size] for size in ("probes", "mated", "entries")] == [12, 12, 42]
    assert found.subjects == 6
    assert found.metrics["tpir@1e-01"] is None and found.curve is None


@pytest.mark.parametrize("number", ["²", "x", "", "1" * 200])
def test_a_file_name_of_tinyface_without_a_subject_number_is_refused(tmp_path, number):
    folder = write_tinyface(tmp_path / "tinyface")
    (folder / "Probe" / "1_2.png").rename(folder / "Probe" / f"{number}_2.png")
    with pytest.raises(PairsError, match=r"_2\.png: .*7_2\.jpg"):
        open_set("tinyface", tmp_path)


def test_a_set_of_pairs_has_both_curves_folds_intervals_and_hardest_pairs(tmp_path):
    random = np.random.default_rng(0)
    same = random.random(200) < 0.5
    images = []
    for number, one in enumerate(same):
        other = number % 30 if one else 31 + number % 29
        images += [face(number % 30, 2 * number), face(other, 2 * number + 1)]
    write_bin(tmp_path / "set.bin", images, same.tolist())
    found = evaluated("set", tmp_path)["set"]
    assert len(found.folds.accuracy_F) == 10 and len(found.grid.tpr_T) == 400
    assert found.histogram.genuine.sum() == same.sum() and found.histogram.impostor.sum() == (~same).sum()
    lowest = found.hardest_genuine[0]
    assert same[lowest.pair] and (lowest.first, lowest.second) == (2 * lowest.pair, 2 * lowest.pair + 1)
    scores = [pair.score for pair in found.hardest_genuine]
    assert scores == sorted(scores)
    scores = [pair.score for pair in found.hardest_impostors]
    assert scores == sorted(scores, reverse=True) and not same[found.hardest_impostors[0].pair]
    accepted = found.threshold["1e-01"]
    assert found.curve.far[found.curve.threshold >= accepted].max() <= 0.1
    # Counts are exact, and the bootstrap is biased for the deviation of the folds.
    without = {"pairs", "genuine", "impostors", "accuracy_std"}
    assert found.interval.keys() == found.available_metrics.keys() - without
    low, high = found.interval["xnorm"]
    assert low < found.metrics["xnorm"] < high


def test_the_gallery_model_embeds_the_second_image_of_each_pair(tmp_path):
    factors, same = np.array([1, 0.4, 2]), [number % 2 == 0 for number in range(20)]
    people = [(number, number if one else number + 1) for number, one in enumerate(same)]
    images = [
        face(person, 2 * number + side)
        for number, pair in enumerate(people)
        for side, person in enumerate(pair)
    ]
    write_bin(tmp_path / "set.bin", images, same)
    found = evaluated("set", tmp_path, gallery=embedder(factors=tuple(factors)))["set"]
    expected, lengths = {}, []
    for number in range(20):
        first, second = (
            (cv2.imdecode(np.frombuffer(image, np.uint8), 1)[0, 0, ::-1].astype(float) - 127.5) / 127.5
            for image in images[2 * number : 2 * number + 2]
        )
        expected[number] = (
            first @ (second * factors) / np.linalg.norm(first) / np.linalg.norm(second * factors)
        )
        lengths.append(np.linalg.norm(first))
    scores = {pair.pair: pair.score for pair in [*found.hardest_genuine, *found.hardest_impostors]}
    assert scores == pytest.approx(expected)
    # The lengths of both models' embeddings have one mean, as they are compared as the quality of the images.
    assert found.metrics["xnorm"] == pytest.approx(np.mean(lengths))


def test_an_image_that_the_gallery_model_cannot_embed_is_named(tmp_path):
    write_bin(tmp_path / "set.bin", [face(n) for n in range(8)], [True, False] * 2)
    with pytest.raises(ModelError, match=r"^set second .*image 0\b"):
        evaluated("set", tmp_path, gallery=embedder(factors=(float("nan"), 1, 1)))


@pytest.mark.parametrize("factor", [float("nan"), 0.0])
def test_an_embedding_that_is_not_finite_or_zero_is_an_error(tmp_path, factor):
    write_ijb(tmp_path / "ijbc")
    broken = replace(embedder(), network=lambda image: image.mean((2, 3)) * factor)
    with pytest.raises(ModelError, match=r"^ijbc: .*image 0\b"):
        evaluate_set(open_set("ijbc", tmp_path), broken, EvaluationOptions())
