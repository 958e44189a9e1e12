"""IJB-B and IJB-C on a small set in the official layout, compared with loops over its files."""

import csv
from functools import partial

import cv2
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from facetrain.data.images.decode import decode_rgb
from facetrain.errors import PairsError
from facetrain.verify.metrics.curve_metrics import tar_at_far, value_of
from facetrain.verify.metrics.result import HardPair, Result
from facetrain.verify.output.hardest_pairs import hardest_pairs_of
from facetrain.verify.sets import ijb
from facetrain.verify.sets.ijb import read_pair_list
from facetrain.verify.sets.open_sets import open_set
from tests.support.faces import embedder
from tests.support.protocols import evaluated, write_ijb


def colors(folder, names, landmarks, size=16):
    """Return the embeddings of `mean_color` for the aligned faces, times two because the mirror image has the same."""
    from facetrain.data.images.align import align

    rows = []
    for name, points in zip(names, landmarks, strict=True):
        image = cv2.cvtColor(cv2.imread(str(folder / "loose_crop" / name)), cv2.COLOR_BGR2RGB)
        rows.append((align(image, points, size).astype(np.float64).mean((0, 1)) - 127.5) / 127.5)
    return 2 * np.array(rows)


def templates_by_loops(folder, factors=(1, 1, 1)):
    """Return the template embeddings by InsightFace's procedure, with loops over the lines of the lists.

    Each channel of the images' colors is multiplied by its factor.
    """
    rows = [line.split() for line in (folder / "meta/ijbc_name_5pts_score.txt").read_text().splitlines()]
    numbers = np.array([row[1:] for row in rows], float)
    seen = (
        colors(folder, [row[0] for row in rows], numbers[:, :10].reshape(-1, 5, 2))
        * numbers[:, 10:]
        * factors
    )
    members = {}
    for row, line in zip(seen, (folder / "meta/ijbc_face_tid_mid.txt").read_text().splitlines(), strict=True):
        _, template, medium = line.split()
        members.setdefault(int(template), {}).setdefault(medium, []).append(row)
    pooled = {t: sum(np.mean(rows, axis=0) for rows in media.values()) for t, media in members.items()}
    return {t: vector / np.linalg.norm(vector) for t, vector in pooled.items()}


OTHER = (1, 0.4, 2)
"""Factors of the colors of the second model."""


@pytest.mark.parametrize("gallery", [None, OTHER])
def test_ijb_one_to_one_equals_loops_over_its_files(tmp_path, gallery):
    folder = write_ijb(tmp_path / "IJBC")
    found = evaluated("ijbc", tmp_path, gallery=gallery and embedder(factors=gallery))["ijbc"]
    unit, second = templates_by_loops(folder), templates_by_loops(folder, gallery or (1, 1, 1))
    lines = np.loadtxt(folder / "meta/ijbc_template_pair_label.txt", int)
    score, label = zip(*((unit[a] @ second[b], same) for a, b, same in lines), strict=True)
    assert found.metrics["auc"] == pytest.approx(roc_auc_score(label, score), abs=1e-6)
    far, tar, _ = roc_curve(label, score, drop_intermediate=False)
    assert found.metrics["tar@1e-01"] == pytest.approx(tar[far <= 0.1].max())
    assert found.metrics["tar@1e-02"] == pytest.approx(tar[far <= 0.01].max())
    assert found.metrics["tar@1e-03"] is None
    assert "1,000 impostor pairs; there are 112" in found.needs["tar@1e-03"]
    assert found.subjects == 8
    low, high = found.interval["auc"]
    assert low <= found.metrics["auc"] <= high


def template_subjects(folder):
    for name in ("gallery_G1", "gallery_G2", "probe_mixed"):
        with (folder / f"meta/ijbc_1N_{name}.csv").open() as file:
            yield {int(row["TEMPLATE_ID"]): int(row["SUBJECT_ID"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize("gallery", [None, OTHER])
def test_ijb_one_to_many_equals_loops_over_its_files(tmp_path, gallery):
    folder = write_ijb(tmp_path / "ijbc", people=40)
    path = folder / "meta/ijbc_1N_gallery_G1.csv"
    header, *lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([header, *reversed(lines), "\n"]))  # in another order, and with an empty line
    found = evaluated("ijbc", tmp_path, gallery=gallery and embedder(factors=gallery))["ijbc_1n"]
    unit, entry = templates_by_loops(folder), templates_by_loops(folder, gallery or (1, 1, 1))
    *galleries, probes = template_subjects(folder)
    rank1, rank5, tpir = [], [], []
    for gallery in galleries:
        ranks, mates, others = [], [], []
        for probe, subject in probes.items():
            scored = [(unit[probe] @ entry[t], other == subject) for t, other in gallery.items()]
            scored.sort(reverse=True)
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
    assert found.curve is None and list(found.curves) == ["G1", "G2"]
    for curve, expected in zip(found.curves.values(), tpir, strict=True):
        assert curve.impostors == 40
        assert value_of(curve, partial(tar_at_far, far=0.1)) == pytest.approx(expected)
    assert found.interval["rank1"][0] < found.metrics["rank1"] < found.interval["rank1"][1]


def test_the_subjects_are_the_people_who_are_compared_and_the_search_lists_connect_their_templates(tmp_path):
    folder = write_ijb(tmp_path / "ijbc")
    pairs, probes = (
        folder / f"meta/ijbc_{name}" for name in ("template_pair_label.txt", "1N_probe_mixed.csv")
    )
    # Of eight people, the last is in the galleries alone, and the others have no genuine pair of their third template.
    lines = [line.split() for line in pairs.read_text().splitlines()]
    kept = [
        line
        for line in lines
        if not {"107", "115", "123"} & {*line[:2]} and (line[2] == "0" or int(line[1]) < 116)
    ]
    pairs.write_text("".join(" ".join(line) + "\n" for line in kept))
    probes.write_text("".join(line for line in probes.read_text().splitlines(True) if ",7007," not in line))
    found = evaluated("ijbc", tmp_path)
    assert (found["ijbc"].subjects, found["ijbc_1n"].subjects) == (7, 7)
    for path in folder.glob("meta/*1N*"):
        path.unlink()
    assert evaluated("ijbc", tmp_path)["ijbc"].subjects == 14, "each third template is a person of its own"


def test_ijb_b_has_other_file_names_and_works_without_the_one_to_many_lists(tmp_path):
    folder = write_ijb(tmp_path / "IJBB", prefix="ijbb")
    for path in folder.glob("meta/*1N_gallery*"):
        path.unlink()
    assert evaluated("ijbb", tmp_path).keys() == {"ijbb"}


PAIR = "line {}: expected `template template label`"
LINE = "line {}: expected a file name and .* numbers"


def with_word(line, word, new):
    """Return a function that replaces one word of a line of a text; lines count from 1."""

    def damage(text):
        lines = text.splitlines()
        words = lines[line - 1].split()
        words[word] = new
        return "\n".join([*lines[: line - 1], " ".join(words), *lines[line:]]) + "\n"

    return damage


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("template_pair_label", lambda t: t + "100 101 2\n", PAIR.format(129)),
        ("template_pair_label", lambda t: t + "100 101\n", PAIR.format(129)),
        ("template_pair_label", lambda t: t.replace("\n", "\nwhat 101 1\n", 1), PAIR.format(2)),
        ("template_pair_label", lambda t: t + "100 9999 1\n", "1 template has no image, among them template 9999"),
        ("name_5pts_score", lambda t: t.replace("2.png", "x.png", 1), "differ: line 2"),
        ("name_5pts_score", lambda t: t[: t.rstrip().rindex("\n") + 1], r"differ: line \d+$"),
        ("name_5pts_score", lambda t: t.split("\n", 1)[1], "must list the same images in the same order"),
        ("face_tid_mid", lambda t: t.replace(" 100 ", " ", 1), LINE.format(1)),
        ("face_tid_mid", lambda t: t.replace("\n", "\n\n", 1), LINE.format(2)),
        *(("face_tid_mid", with_word(2, 1, word), LINE.format(2)) for word in ("x", "nan", "1_0", "1e30", "9" * 20)),
        *(("name_5pts_score", with_word(3, 4, word), LINE.format(3)) for word in ("nan", "1e39")),
        ("1N_probe_mixed", lambda t: t.split("\n")[0], "ijbc_1N_probe_mixed.csv: the list has no templates"),
        ("1N_gallery_G1", lambda t: t.replace("100,", f"{'9' * 20},", 1), "line 2: .* too (large|big)"),
        ("1N_gallery_G1", lambda t: t.replace("100,", "x,", 1), "line 2: .* as integers.*'x'"),
        ("1N_gallery_G1", lambda t: t.replace("100,", "10_0,", 1), "line 2: .* as integers.*'10_0'"),
        ("1N_gallery_G1", lambda t: t.replace("7000,", '7000,"', 1), "G1.csv, line 2: unexpected end of data; close"),
        ("1N_gallery_G1", lambda t: t + "9999,7001,a.png\n", "G1.csv: 1 template has no image, .* template 9999"),
        ("1N_gallery_G1", lambda t: t + "100,7001,a.png\n", "one subject for each template .*100 .*7000 before"),
        ("1N_gallery_G1", lambda t: t.split("\n", 1)[1], "G1.csv, line 1: is a template, .* TEMPLATE_ID"),
        ("1N_probe_mixed", None, None),
        ("template_pair_label", None, "no such file"),
    ],
)  # fmt: skip
def test_a_damaged_list_is_reported_with_its_line(tmp_path, file, damage, message):
    folder = write_ijb(tmp_path / "ijbc")
    (path,) = folder.glob(f"meta/ijbc_{file}.*")
    if damage:
        path.write_text(damage(path.read_text()))
    else:
        path.unlink()
    if message is None:
        assert open_set("ijbc", tmp_path).probes is None
        return
    with pytest.raises(PairsError, match=message):
        open_set("ijbc", tmp_path)


@pytest.mark.parametrize("missing", [["2.png", "3.png"], None])
def test_missing_images_are_reported_before_any_is_embedded(tmp_path, missing):
    images = write_ijb(tmp_path / "ijbc") / "loose_crop"
    for name in missing or []:
        (images / name).unlink()
    if missing is None:
        images.rename(tmp_path / "elsewhere")
    message = "2 images are missing: 2.png, 3.png;" if missing else "No such file.*unpack the images"
    with pytest.raises(PairsError, match=f"loose_crop: {message}"):
        open_set("ijbc", tmp_path)


def test_a_hidden_file_of_macos_is_no_list(tmp_path):
    hidden = write_ijb(tmp_path / "ijbc") / "meta" / "._ijbc_face_tid_mid.txt"
    hidden.write_bytes(b"\xff\x00")
    assert open_set("ijbc", tmp_path).names[0] == "1.png"


def test_a_pair_list_that_another_user_may_read_alone_is_refused_with_its_path(tmp_path, monkeypatch):
    path = tmp_path / "pairs.txt"
    path.write_text("1 2 1\n")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "fromfile", refuse)
    monkeypatch.setattr(type(path), "read_text", refuse)
    with pytest.raises(PairsError, match=r"pairs\.txt: Permission denied"):
        read_pair_list(path)


def test_the_hardest_pairs_show_the_first_image_of_each_template_and_list_the_files_once(
    tmp_path, monkeypatch
):
    write_ijb(tmp_path / "ijbc")
    target = open_set("ijbc", tmp_path)
    files, listed = target.encoded, []
    monkeypatch.setattr(ijb, "lazy_files", lambda paths: listed.append(paths) or files)
    result = Result("ijb", {}, subjects=0)
    result.hardest_genuine = [HardPair(pair, pair, pair + 1, 0.5) for pair in range(3)]
    shown = hardest_pairs_of(result, target).genuine
    assert len(listed) == 1 and [pair.pair for pair in shown] == [0, 1, 2]
    first = target.template.tolist().index(sorted(set(target.template.tolist()))[1])
    expected = target.crop(decode_rgb(files[first], location="ijbc"), first, 112)
    for image in (shown[0].images[1], shown[1].images[0]):
        assert np.abs(decode_rgb(image, location="page").astype(int) - expected).mean() < 2
