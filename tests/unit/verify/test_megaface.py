"""MegaFace: a small set in the official layout, and the count of distractors that are closer than the mate."""

import numpy as np
import pytest

from facetrain.embeddings.normalization import l2_normalize
from facetrain.errors import PairsError
from facetrain.verify.megaface import count_closer_distractors, mate_pairs, megaface_result
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.sets.evaluation_sets import open_evaluation_set
from tests.support.protocols import evaluated, write_megaface


def test_megaface_rates_fall_with_the_number_of_distractors(tmp_path):
    folder = write_megaface(tmp_path / "megaface")
    found = evaluated("megaface", tmp_path)["megaface"]
    assert {"rank1", "rank10", "rank1@10", "rank1@100"} < found.metrics.keys()
    assert (found.metrics["searches"], found.metrics["distractors"]) == (30, 120)
    assert found.metrics["rank1"] <= found.metrics["rank1@100"] <= found.metrics["rank1@10"]
    (folder / "distractors").rename(folder / "elsewhere")
    with pytest.raises(PairsError, match="unknown layout of an evaluation set"):
        open_evaluation_set("megaface", tmp_path)


def test_people_with_one_image_are_no_subjects_of_megaface():
    random = np.random.default_rng(0)
    unit, distractor = (l2_normalize(random.normal(size=(count, 4))) for count in (40, 30))
    subject = np.repeat(np.arange(10), 2)
    expected = megaface_result(unit[:20], subject, distractor, draws=Draws(60))
    found = megaface_result(unit, np.concatenate([subject, np.arange(10, 30)]), distractor, draws=Draws(60))
    assert found.metrics == expected.metrics and found.interval == expected.interval
    assert found.subjects == 10


def test_probes_and_distractors_of_zeros_match_nobody_in_megaface():
    unit, nothing = np.float32([[1, 0], [-0.6, 0.8], [0, 0]]), np.zeros((5, 2), np.float32)
    found = count_closer_distractors(unit, nothing, mate_pairs(np.zeros(3, int)), [5])
    # The mates of the first two searches are images 1 and 2, of the next two 0 and 2, of the last two 0 and 1.
    assert found.tolist() == [[0, 5, 0, 5, 5, 5]]
    opposite = np.tile(np.float32([0, -1]), (5, 1))
    found = count_closer_distractors(unit, opposite, mate_pairs(np.zeros(3, int)), [3, 5])
    assert found.tolist() == [[3, 3, 0, 3, 3, 3], [5, 5, 0, 5, 5, 5]]
    assert megaface_result(unit, np.zeros(3, int), nothing, draws=Draws(0)).rejected == 6


def test_images_on_insightfaces_noise_lists_are_excluded_from_megaface(tmp_path):
    folder = write_megaface(tmp_path / "megaface")
    for path in sorted((folder / "probes").rglob("*.png")):
        path.rename(path.with_name(f"{path.parent.name}_{path.name}"))
    # As published: a comment, names with another suffix or a blank, a path after a tab; and a name without an image.
    (folder / "facescrub_noises.txt").write_text("# remark\nperson0_0.jpg\nperson1 2.png\nperson9_0.png\n")
    (folder / "megaface_noises.txt").write_text(
        "0\tdistractors/3/3.png\ndistractors/4/4.jpg\n\ndistractors/4/3.png\n"
    )
    target = open_evaluation_set("megaface", tmp_path)
    places = [each.location(n) for each in (target.probes, target.distractors) for n in range(len(each))]
    names = {"/".join(place.split("/")[-2:]) for place in places}
    excluded = {"person0/person0_0.png", "person1/person1_2.png", "3/3.png", "4/4.png"}
    assert not names & excluded and len(names) == 15 + 120 - 4
    assert "4/11.png" in names and "3/10.png" in names
    found = evaluated("megaface", tmp_path)["megaface"].metrics
    assert (found["searches"], found["distractors"], found["excluded_images"]) == (2 + 2 + 3 * 6, 118, 4)
    (folder / "megaface_noises.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PairsError, match=r"megaface_noises.txt: cannot read the noise list"):
        open_evaluation_set("megaface", tmp_path)


def test_counts_of_closer_distractors_equal_full_comparisons():
    random = np.random.default_rng(0)
    unit = random.normal(size=(240, 3)).astype(np.float32)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    probes, distractors, subject = unit[:20], unit[20:], random.integers(0, 6, 20)
    pairs = mate_pairs(subject)
    assert sorted(zip(*pairs, strict=True)) == sorted(
        (i, j) for i in range(20) for j in range(20) if i != j and subject[i] == subject[j]
    )
    found = count_closer_distractors(probes, distractors, pairs, [10, 100, 220])
    for row, size in enumerate((10, 100, 220)):
        similarity = probes @ distractors[:size].T
        for count, i, j in zip(found[row], *pairs, strict=True):
            assert count == min(np.count_nonzero(similarity[i] >= probes[i] @ probes[j]), 10)


@pytest.mark.parametrize("size", [127, 128, 512])
@pytest.mark.parametrize(("people", "distractors"), [(4, 50), (20, 300)])
def test_a_distractor_that_equals_the_mate_is_closer(size, people, distractors):
    pairs = mate_pairs(np.arange(people).repeat(2))
    for seed in range(6):
        unit = np.random.default_rng(seed).normal(size=size).astype(np.float32)
        unit /= np.linalg.norm(unit)
        probe, distractor = (np.tile(unit, (count, 1)) for count in (2 * people, distractors))
        distractor.flags.writeable = False
        assert (count_closer_distractors(probe, distractor, pairs, [distractors]) == 10).all()
