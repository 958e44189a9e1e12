"""Whole protocols on small sets in the official layouts, compared with loops over their files."""

import csv

import cv2
import numpy as np
import pytest
from scipy.io import savemat
from sklearn.metrics import roc_auc_score, roc_curve

from facetrain.data.formats.bin import write_bin
from facetrain.errors import ModelError, PairsError
from facetrain.verify import exact_search
from facetrain.verify.evaluation_sets import open_evaluation_set, open_evaluation_sets
from facetrain.verify.megaface import count_closer_distractors, mate_pairs, megaface_result
from facetrain.verify.normalization import l2_normalize
from facetrain.verify.protocols import Options, evaluate_set
from facetrain.verify.roc import tar_at_far
from tests.support.faces import embedder, face
from tests.support.protocols import write_ijb, write_megaface, write_tinyface

FEW = Options(replicates=60)


def colors(folder, names, landmarks, size=16):
    """Return the embeddings of `mean_color` for the aligned faces, times two because the mirror image has the same."""
    from facetrain.data.align import align

    rows = []
    for name, points in zip(names, landmarks, strict=True):
        image = cv2.cvtColor(cv2.imread(str(folder / "loose_crop" / name)), cv2.COLOR_BGR2RGB)
        rows.append((align(image, points, size).astype(np.float64).mean((0, 1)) - 127.5) / 127.5)
    return 2 * np.array(rows)


def templates_by_loops(folder, *, detection=True):
    """Return the template embeddings by InsightFace's procedure, with loops over the lines of the lists."""
    rows = [line.split() for line in (folder / "meta/ijbc_name_5pts_score.txt").read_text().splitlines()]
    numbers = np.array([row[1:] for row in rows], float)
    seen = colors(folder, [row[0] for row in rows], numbers[:, :10].reshape(-1, 5, 2))
    if detection:
        seen *= numbers[:, 10:]
    members = {}
    for row, line in zip(seen, (folder / "meta/ijbc_face_tid_mid.txt").read_text().splitlines(), strict=True):
        _, template, medium = line.split()
        members.setdefault(int(template), {}).setdefault(medium, []).append(row)
    pooled = {t: sum(np.mean(rows, axis=0) for rows in media.values()) for t, media in members.items()}
    return {t: vector / np.linalg.norm(vector) for t, vector in pooled.items()}


@pytest.mark.parametrize("detection", [True, False])
def test_ijb_one_to_one_equals_loops_over_its_files(tmp_path, detection):
    folder = write_ijb(tmp_path / "IJBC")
    found = evaluate_set(
        open_evaluation_set("ijbc", tmp_path), embedder(), Options(replicates=60, detection=detection)
    )["ijbc"]
    unit = templates_by_loops(folder, detection=detection)
    lines = [
        map(int, line.split())
        for line in (folder / "meta/ijbc_template_pair_label.txt").read_text().splitlines()
    ]
    score, label = zip(*((unit[a] @ unit[b], same) for a, b, same in lines), strict=True)
    assert found.metrics["auc"] == pytest.approx(roc_auc_score(label, score), abs=1e-6)
    far, tar, _ = roc_curve(label, score, drop_intermediate=False)
    assert found.metrics["tar@1e-01"] == pytest.approx(tar[far <= 0.1].max())
    assert found.metrics["tar@1e-02"] == pytest.approx(tar[far <= 0.01].max())
    assert (
        found.metrics["tar@1e-03"] is None
        and "1,000 impostor pairs; there are 112" in found.needs["tar@1e-03"]
    )
    assert found.subjects == 8
    low, high = found.interval["auc"]
    assert low <= found.metrics["auc"] <= high


def template_subjects(folder):
    for name in ("gallery_G1", "gallery_G2", "probe_mixed"):
        with (folder / f"meta/ijbc_1N_{name}.csv").open() as file:
            yield {int(row["TEMPLATE_ID"]): int(row["SUBJECT_ID"]) for row in csv.DictReader(file)}


def test_ijb_one_to_many_equals_loops_over_its_files(tmp_path):
    folder = write_ijb(tmp_path / "ijbc", people=40)
    found = evaluate_set(open_evaluation_set("ijbc", tmp_path), embedder(), FEW)["ijbc_1n"]
    unit = templates_by_loops(folder)
    *galleries, probes = template_subjects(folder)
    rank1, rank5, tpir = [], [], []
    for gallery in galleries:
        ranks, mates, others = [], [], []
        for probe, subject in probes.items():
            scored = sorted(
                ((unit[probe] @ unit[t], other == subject) for t, other in gallery.items()), reverse=True
            )
            if subject in gallery.values():
                ranks.append([is_mate for _, is_mate in scored].index(True))
                mates.append(next(score for score, is_mate in scored if is_mate))
            else:
                others.append(scored[0][0])
        rank1.append(np.mean(np.array(ranks) < 1))
        rank5.append(np.mean(np.array(ranks) < 5))
        thresholds = np.array([t for t in [*mates, *others] if np.mean(np.array(others) >= t) <= 0.1])
        tpir.append(np.mean(np.array(mates) >= thresholds.min()))
    assert found.metrics["rank1"] == pytest.approx(np.mean(rank1)) and 0.2 < np.mean(rank1) < 1
    assert found.metrics["rank5"] == pytest.approx(np.mean(rank5))
    assert found.metrics["tpir@1e-01"] == pytest.approx(np.mean(tpir))
    assert found.metrics["tpir@1e-02"] is None and "there are 40" in found.needs["tpir@1e-02"]
    assert found.curve.impostors == 40 and tar_at_far(found.curve, 0.1) == pytest.approx(tpir[0])
    assert found.interval["rank1"][0] < found.metrics["rank1"] < found.interval["rank1"][1]


def test_ijb_b_has_other_file_names_and_works_without_the_one_to_many_lists(tmp_path):
    folder = write_ijb(tmp_path / "IJBB", prefix="ijbb")
    for path in folder.glob("meta/*1N*"):
        path.unlink()
    assert evaluate_set(open_evaluation_set("ijbb", tmp_path), embedder(), FEW).keys() == {"ijbb"}


def test_a_name_prefers_the_bin_set_to_a_folder_of_the_same_name(tmp_path, monkeypatch):
    write_bin(tmp_path / "lfw.bin", [face(n) for n in range(4)], [True, False])
    (tmp_path / "lfw").mkdir()
    monkeypatch.chdir(tmp_path)
    assert open_evaluation_set("lfw", tmp_path).images
    with pytest.raises(PairsError, match="unknown layout of an evaluation set"):
        open_evaluation_set("./lfw/", tmp_path / "lfw")


def with_word(text, line, word, new):
    """Replace one word of a line; lines count from 1."""
    lines = text.splitlines()
    words = lines[line - 1].split()
    words[word] = new
    return "\n".join([*lines[: line - 1], " ".join(words), *lines[line:]]) + "\n"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("template_pair_label", lambda t: t + "100 101 2\n", r"line 129: the label is 2"),
        (
            "template_pair_label",
            lambda t: t.replace("\n", "\nwhat 101 1\n", 1),
            "line 2: expected `template template label`",
        ),
        (
            "template_pair_label",
            lambda t: t + "100 9999 1\n",
            "1 templates have no image, among them template 9999",
        ),
        ("name_5pts_score", lambda t: t.replace("2.png", "x.png", 1), "differ: line 2"),
        ("name_5pts_score", lambda t: t.split("\n", 1)[1], "must list the same images in the same order"),
        (
            "face_tid_mid",
            lambda t: t.replace(" 100 ", " ", 1),
            "line 1: expected a file name .* found 2 words",
        ),
        (
            "face_tid_mid",
            lambda t: t.replace("\n", "\n\n", 1),
            "line 2: expected a file name .* found 0 words",
        ),
        (
            "face_tid_mid",
            lambda t: t.replace("2.png 100", "2.png x", 1),
            "line 2: a number cannot be read: .*'x'",
        ),
        ("face_tid_mid", lambda t: t.replace("2.png 100", "2.png nan", 1), "line 2: a number is not finite"),
        ("face_tid_mid", lambda t: t.replace("2.png 100", "2.png 1.5", 1), "line 2: .* whole numbers"),
        ("face_tid_mid", lambda t: t.replace("2.png 100", "2.png 1e30", 1), "line 2: .* too large"),
        ("name_5pts_score", lambda t: with_word(t, 3, -1, "nan"), "line 3: a number is not finite"),
        ("name_5pts_score", lambda t: with_word(t, 3, -1, "inf"), "line 3: a number is not finite"),
        ("name_5pts_score", lambda t: with_word(t, 3, 4, "nan"), "line 3: a number is not finite"),
        ("name_5pts_score", lambda t: with_word(t, 3, 4, "1e39"), "line 3: a number is not finite"),
        ("template_pair_label", lambda t: t + "100 ² 1\n", "line 129: expected `template template label`"),
        ("1N_probe_mixed", lambda t: "", "ijbc_1N_probe_mixed.csv: the list has no templates"),
        ("1N_probe_mixed", lambda t: t.split("\n")[0], "ijbc_1N_probe_mixed.csv: the list has no templates"),
        ("1N_gallery_G2", lambda t: t.split("\n")[0], "ijbc_1N_gallery_G2.csv: the list has no templates"),
        ("1N_gallery_G1", lambda t: t.replace("100,", f"{'9' * 20},", 1), "line 2: .* too large"),
        ("1N_gallery_G1", lambda t: t.replace("7000,", f"{'9' * 20},", 1), "line 2: .* too large"),
        ("1N_gallery_G1", lambda t: t.replace("100,", "x,", 1), "line 2: .* as integers.*'x'"),
        ("1N_gallery_G1", lambda t: t + "100,7000," + "x" * 200_000, "as integers.*field larger"),
        (
            "1N_gallery_G1",
            lambda t: t + "100,7001,a.png\n",
            "one subject for each template .*100 .*7000 before",
        ),
        ("1N_probe_mixed", None, None),
        ("template_pair_label", None, "no such file"),
    ],
)
def test_a_damaged_list_is_reported_with_its_line(tmp_path, file, damage, message):
    folder = write_ijb(tmp_path / "ijbc")
    (path,) = folder.glob(f"meta/ijbc_{file}.*")
    if damage:
        path.write_text(damage(path.read_text()))
    else:
        path.unlink()
    if message is None:
        assert open_evaluation_set("ijbc", tmp_path).probes is None
        return
    with pytest.raises(PairsError, match=message):
        open_evaluation_set("ijbc", tmp_path)


@pytest.mark.parametrize("write", [write_tinyface, write_megaface])
def test_hidden_files_are_no_images_of_a_set(tmp_path, write):
    folder = write(tmp_path / "set")
    before = evaluate_set(open_evaluation_set("set", tmp_path), embedder(), FEW)
    for path in [*folder.rglob("*.png"), *folder.rglob("*.jpg")]:
        path.with_name(f"._{path.name}").write_bytes(b"attributes that macOS keeps beside an image")
    after = evaluate_set(open_evaluation_set("set", tmp_path), embedder(), FEW)
    assert {name: one.metrics for name, one in after.items()} == {
        name: one.metrics for name, one in before.items()
    }


def test_tinyface_ranks_equal_a_sort_of_the_gallery(tmp_path):
    folder = write_tinyface(tmp_path / "tinyface")
    found = evaluate_set(open_evaluation_set("tinyface", tmp_path), embedder(), FEW)["tinyface"]
    seen = {}
    for path in sorted(folder.rglob("*.png")):
        color = (cv2.imread(str(path))[0, 0, ::-1].astype(float) - 127.5) / 127.5
        seen[path] = color / np.linalg.norm(color)
    gallery = [p for p in seen if p.parent.name != "Probe"]
    ranks = []
    for probe in (p for p in seen if p.parent.name == "Probe"):
        order = sorted(gallery, key=lambda p: -float(seen[p] @ seen[probe]))
        is_mate = [p.parent.name == "Gallery_Match" and p.name[0] == probe.name[0] for p in order]
        ranks.append(is_mate.index(True))
    for rank in (1, 5, 10, 20):
        assert found.metrics[f"rank{rank}"] == pytest.approx(np.mean(np.array(ranks) < rank))
    assert (found.metrics["probes"], found.metrics["mated"], found.subjects) == (12, 12, 6)
    assert found.metrics["tpir@1e-01"] is None and found.curve is None


@pytest.mark.parametrize("number", ["²", "x", "", "1" * 200])
def test_a_file_name_of_tinyface_without_a_subject_number_is_refused(tmp_path, number):
    folder = write_tinyface(tmp_path / "tinyface")
    (folder / "Probe" / "1_2.png").rename(folder / "Probe" / f"{number}_2.png")
    with pytest.raises(PairsError, match="does not begin with a subject number"):
        open_evaluation_set("tinyface", tmp_path)


def test_tinyfaces_subject_lists_replace_the_file_names(tmp_path):
    folder = write_tinyface(tmp_path / "tinyface" / "Testing_Set")
    by_name = evaluate_set(open_evaluation_set("tinyface", tmp_path), embedder(), FEW)["tinyface"]
    for part, key in (("Gallery_Match", "gallery"), ("Probe", "probe")):
        paths = sorted((folder / part).iterdir())
        names = np.array([[p.name] for p in paths], dtype=object)
        ids = np.array([[int(p.name[0])] for p in paths], dtype=np.uint16)
        stem = "gallery_match" if key == "gallery" else "probe"
        savemat(folder / f"{stem}_img_ID_pairs.mat", {f"{key}_set": names, f"{key}_ids": ids})
    assert (
        evaluate_set(open_evaluation_set("tinyface", tmp_path), embedder(), FEW)["tinyface"].metrics
        == by_name.metrics
    )
    (folder / "probe_img_ID_pairs.mat").write_bytes(b"nothing that MATLAB wrote" * 20)
    with pytest.raises(PairsError, match=r"probe_img_ID_pairs.mat: not a subject list of TinyFace"):
        open_evaluation_set("tinyface", tmp_path)


def test_megaface_rates_fall_with_the_number_of_distractors(tmp_path):
    folder = write_megaface(tmp_path / "megaface")
    found = evaluate_set(open_evaluation_set("megaface", tmp_path), embedder(), FEW)["megaface"]
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
    expected = megaface_result(unit[:20], subject, distractor, replicates=60)
    found = megaface_result(unit, np.concatenate([subject, np.arange(10, 30)]), distractor, replicates=60)
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
    assert megaface_result(unit, np.zeros(3, int), nothing, replicates=0).rejected == 6


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
    names = {"/".join(path.parts[-2:]) for path in (*target.probes.paths, *target.distractors.paths)}
    excluded = {"person0/person0_0.png", "person1/person1_2.png", "3/3.png", "4/4.png"}
    assert not names & excluded and len(names) == 15 + 120 - 4
    assert "4/11.png" in names and "3/10.png" in names
    found = evaluate_set(target, embedder(), FEW)["megaface"].metrics
    assert (found["searches"], found["distractors"], found["excluded_images"]) == (2 + 2 + 3 * 6, 118, 4)
    (folder / "megaface_noises.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PairsError, match=r"megaface_noises.txt: cannot read the noise list"):
        open_evaluation_set("megaface", tmp_path)


@pytest.mark.parametrize("block", [7, 1 << 14])
def test_counts_of_closer_distractors_equal_full_comparisons(block, monkeypatch):
    monkeypatch.setattr("facetrain.verify.megaface._BLOCK", block)
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
        expected = [
            np.count_nonzero(similarity[i] >= probes[i] @ probes[j]) for i, j in zip(*pairs, strict=True)
        ]
        np.testing.assert_array_equal(found[row], np.minimum(expected, 10))


@pytest.mark.parametrize("spread", [0, 1e-7, 1e-4, 3e-3, 0.1])
def test_distractors_that_are_nearly_the_mate_are_compared_in_float64_until_ten_are_closer(
    spread, monkeypatch
):
    random = np.random.default_rng(0)
    probes, distractors = (
        l2_normalize(np.float32(1 + spread * random.normal(size=(count, 64)))) for count in (24, 700)
    )
    distractors[::7], distractors[3] = 0, probes[1]
    pairs = mate_pairs(np.arange(24) // 3)
    unit = [exact_search.unit_rows(probes), distractors]
    cosine = np.stack([exact_search.rescore(*unit, np.full(700, i), np.arange(700)) for i in range(24)])
    cosine[:, ::7] = -np.inf
    mate = exact_search.rescore(unit[0], probes, *pairs)
    compared = []

    def rescore(*arguments):
        compared.append(len(arguments[2]))
        return exact_search.rescore(*arguments)

    monkeypatch.setattr("facetrain.verify.megaface.rescore", rescore)
    found = count_closer_distractors(probes, distractors, pairs, [10, 700])
    for row, size in enumerate((10, 700)):
        expected = np.count_nonzero(cosine[pairs[0], :size] >= mate[:, None], axis=1)
        np.testing.assert_array_equal(found[row], np.minimum(expected, 10))
    assert sum(compared) < 200 * len(mate)


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


def test_a_set_of_pairs_has_both_curves_folds_intervals_and_hardest_pairs(tmp_path):
    random = np.random.default_rng(0)
    same = random.random(200) < 0.5
    images = []
    for number, one in enumerate(same):
        images += [
            face(number % 30, 2 * number),
            face(number % 30 if one else 31 + number % 29, 2 * number + 1),
        ]
    write_bin(tmp_path / "set.bin", images, same.tolist())
    (target,) = open_evaluation_sets(["set"], tmp_path)
    found = evaluate_set(target, embedder(), FEW)["set"]
    assert len(found.folds.accuracy_F) == 10 and len(found.grid.tpr_T) == 400
    assert found.histogram.genuine.sum() == same.sum() and found.histogram.impostor.sum() == (~same).sum()
    lowest = found.hardest_genuine[0]
    assert same[lowest.pair] and (lowest.first, lowest.second) == (2 * lowest.pair, 2 * lowest.pair + 1)
    assert [pair.score for pair in found.hardest_genuine] == sorted(
        pair.score for pair in found.hardest_genuine
    )
    scores = [pair.score for pair in found.hardest_impostors]
    assert scores == sorted(scores, reverse=True) and not same[found.hardest_impostors[0].pair]
    accepted = found.threshold["1e-01"]
    assert found.curve.far[found.curve.threshold >= accepted].max() <= 0.1
    # Counts are exact, and the bootstrap is biased for the deviation of the folds.
    without = {"pairs", "genuine", "impostors", "accuracy_std"}
    assert found.interval.keys() == found.available_metrics.keys() - without
    low, high = found.interval["xnorm"]
    assert low < found.metrics["xnorm"] < high


def test_an_embedding_that_is_not_finite_is_an_error(tmp_path):
    write_ijb(tmp_path / "ijbc")
    from dataclasses import replace

    broken = replace(embedder(), network=lambda image: image.mean((2, 3)) * float("nan"))
    with pytest.raises(ModelError, match="ijbc: the embedding of image 0 is not finite"):
        evaluate_set(open_evaluation_set("ijbc", tmp_path), broken, FEW)
