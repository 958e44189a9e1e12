from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from facetrain.data.dataset import ImageSubset
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import write_subjects
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError, ModelError, RunError, UsageError
from facetrain.models.embedding_model import open_model
from facetrain.models.export.export import export
from facetrain.models.export.formats import ExportOptions
from facetrain.verify import calibration, training_images
from facetrain.verify.calibrate_model import calibrate_model, read_known_people
from facetrain.verify.calibration import calibrate, pick_threshold, sampled_images, stored_thresholds
from facetrain.verify.metrics.bootstrap import draw_subjects, interval
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.training_images import (
    find_training_images,
    refuse_training_images,
    sets_of_training_images,
    warn_of_training_images,
)
from tests.support.datasets import encoded_image, images_of, write_records
from tests.support.faces import face
from tests.support.models import write_model


def faces(random, people, images=4, spread=0.6):
    """Unit embeddings of people, some of whom look alike, and the person of each."""
    center = random.normal(size=(people, 1, 16))
    center += random.normal(size=(people // 4 + 1, 1, 16)).repeat(4, 0)[:people]
    unit = (center + spread * random.normal(size=(people, images, 16))).reshape(-1, 16)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    return unit.astype(np.float32), np.repeat(np.arange(people), images)


def scores_of(unit, label):
    first, second = np.triu_indices(len(unit), 1)
    score, same = (unit @ unit.T)[first, second], label[first] == label[second]
    return score[same], score[~same]


def test_thresholds_and_rates_are_those_of_all_pairs():
    unit, label = faces(np.random.default_rng(0), 60)
    genuine, impostor = scores_of(unit, label)
    found = calibrate(unit, label, [0.1, 1e-2, 1e-3], data="faces", draws=Draws(50))
    for one in found:
        accepted = int(len(impostor) * one.fmr)
        # Blocks of another size round the last bits of a product differently.
        assert one.cosine == pytest.approx(np.sort(impostor)[::-1][accepted - 1], abs=1e-6)
        assert one.false_accepts == accepted
        assert np.mean(impostor >= one.cosine - 1e-6) == pytest.approx(one.fmr, abs=1 / len(impostor))
        assert one.fnmr == pytest.approx(np.mean(genuine < one.cosine), abs=1 / len(genuine))
        assert one.fmr_interval[0] < one.fmr < one.fmr_interval[1]
        assert one.fnmr_interval[0] <= one.fnmr <= one.fnmr_interval[1]
        assert (one.impostors, one.subjects) == (len(impostor), 60)


def test_the_intervals_are_those_of_the_rates_of_all_pairs_in_every_draw():
    unit, label = faces(np.random.default_rng(3), 15, spread=1.0)
    (found,) = calibrate(unit, label, [0.05], data="faces", draws=Draws(40))
    first, second = np.triu_indices(len(unit), 1)
    score, same = (unit @ unit.T)[first, second], label[first] == label[second]
    impostor, is_rejected = score[~same], score < found.cosine
    fmr_of_set, fmr_of_draw, fnmr = [], [], []
    for drawn in next(draw_subjects(15, 40, pairs=15)).astype(np.int64):
        weight = drawn[label[first]] * np.where(same, 1, drawn[label[second]])
        of_impostors = weight[~same]
        shares = [
            (of_impostors[impostor >= cosine].sum() / of_impostors.sum(), cosine) for cosine in impostor
        ]
        threshold = min(cosine for share, cosine in shares if share <= 0.05)
        rejected = impostor[impostor < threshold].max()
        # Pairs that the draw lacks are accepted up to the first one that it has no room for.
        fmr_of_set.append(np.mean(impostor > rejected))
        fmr_of_draw.append(of_impostors[impostor >= found.cosine].sum() / of_impostors.sum())
        fnmr.append(weight[same & is_rejected].sum() / weight[same].sum())
    measured = found.false_accepts / len(impostor)
    lows, highs = zip(
        *(interval(np.array(rates), 15, measured) for rates in (fmr_of_set, fmr_of_draw)), strict=True
    )
    assert found.fmr_interval == pytest.approx((min(lows), max(highs)))
    assert found.fnmr_interval == interval(np.array(fnmr), 15, is_rejected[same].mean())


def test_the_promised_rate_is_inside_the_interval_that_other_people_give():
    random = np.random.default_rng(0)
    trials, inside = 40, 0
    for trial in range(trials):
        unit, label = faces(random, 120)
        (one,) = calibrate(unit, label, [1e-2], data="faces", draws=Draws(100, trial))
        # As many people, because every person has three others who look alike; their mean over many samples.
        held_out = [scores_of(*faces(random, 120, images=1))[1] for _ in range(20)]
        low, high = one.fmr_interval
        inside += low <= np.mean(np.concatenate(held_out) >= one.cosine) <= high
    assert inside >= 0.8 * trials


def test_some_of_the_pairs_give_the_interval_of_all(monkeypatch):
    unit, label = faces(np.random.default_rng(0), 40, images=20)
    # In this order, every 39th pair is of the same few people.
    order = np.arange(len(label)).reshape(40, -1).T.ravel()
    found = []
    for most in (1_000_000, 8_000):
        monkeypatch.setattr(calibration, "_MOST_DRAWN", most)
        found += calibrate(unit[order], label[order], [0.3], data="x", draws=Draws(100))
    every, some = found
    assert some.fmr_interval == pytest.approx(every.fmr_interval, rel=0.15)
    assert (some.cosine, some.false_accepts) == (every.cosine, every.false_accepts)


def test_equal_scores_are_accepted_together_or_not_at_all():
    unit = np.eye(4, dtype=np.float32)[[0, 0, 0, 1, 2, 3]]
    # Impostor pairs: three with cosine 1, twelve with cosine 0. At most two of fifteen may be accepted.
    (one,) = calibrate(unit, range(6), [2.5 / 15], data="x", draws=Draws(10))
    assert one.cosine > 1 and one.fnmr is None and one.fnmr_interval is None
    assert one.false_accepts == 0 == one.fmr_interval[0]
    (one,) = calibrate(unit, range(6), [3 / 15], data="x", draws=Draws(10))
    assert (one.cosine, one.false_accepts) == (1, 3)
    # With a genuine pair of the same cosine, which is accepted too.
    (one,) = calibrate(unit[[*range(6), 5]], [*range(6), 5], [3 / 20], data="x", draws=Draws(10))
    assert (one.cosine, one.fnmr) == (1, 0)


def test_the_images_of_a_person_may_lie_apart():
    unit, label = faces(np.random.default_rng(0), 30)
    apart = np.arange(len(label)).reshape(30, -1).T.ravel()
    one, other = (
        calibrate(unit[order], label[order], [0.01], data="x", draws=Draws(40))[0]
        for order in (np.arange(len(label)), apart)
    )
    assert one.fnmr > 0 and (one.fnmr, one.fnmr_interval) == (other.fnmr, other.fnmr_interval)
    assert one.fmr_interval == pytest.approx(other.fmr_interval)


def test_the_interval_of_the_fnmr_rests_on_the_people_with_two_images():
    unit = np.eye(60, dtype=np.float32)[[*range(60), *range(5)]]
    (one,) = calibrate(unit, [*range(60), *range(5)], [0.01], data="x", draws=Draws(50))
    assert one.fnmr == 0 and one.fnmr_interval == pytest.approx((0, 1 - 0.025 ** (1 / 5)))


def test_draws_of_one_person_do_not_count_for_the_interval():
    unit, label = faces(np.random.default_rng(0), 5, images=8)
    (one,) = calibrate(unit, label, [0.05], data="few", draws=Draws(2000))
    low, high = one.fmr_interval
    assert 0 <= low <= one.fmr <= high < 1


def test_a_rate_whose_product_is_a_whole_number_only_after_rounding_allows_that_many():
    # As 0.029 · 1,000, which is 28.999999999999996.
    unit, label = faces(np.random.default_rng(0), 50, images=2)
    impostors = len(scores_of(unit, label)[1])
    rate = next(k / impostors for k in range(1, impostors) if int(impostors * (k / impostors)) < k)
    (found,) = calibrate(unit, label, [rate], data="x", draws=Draws(20))
    accepted = (scores_of(unit, label)[1] >= found.cosine).sum()
    assert accepted == round(rate * impostors)


def test_a_rate_that_the_data_cannot_show_is_refused():
    unit, label = faces(np.random.default_rng(0), 10, images=2)
    with pytest.raises(DataError, match="1e-05 needs 100,000 impostor pairs; 20 images .* have 180"):
        calibrate(unit, label, [1e-5], data="few")
    assert calibration.reachable_fmrs(label) == []
    assert calibration.reachable_fmrs(np.arange(100)) == [1e-3]


def test_fewer_than_five_people_give_no_threshold():
    unit, label = faces(np.random.default_rng(0), 4, images=8)
    with pytest.raises(DataError, match=r"few: 4 people: .* at least 5"):
        calibrate(unit, label, [0.1], data="few")


def test_of_many_images_whole_people_are_drawn():
    label = np.random.default_rng(0).integers(0, 50, 1000)
    chosen = sampled_images(label, limit=300)
    assert 250 < len(chosen) <= 300 and (np.diff(chosen) > 0).all()
    for person in np.unique(label[chosen]):
        assert (label[chosen] == person).sum() == (label == person).sum()
    assert (sampled_images(label) == np.arange(1000)).all()


def test_a_person_with_very_many_images_does_not_end_the_draw():
    labels = np.append(np.zeros(90, int), np.arange(1, 61))
    for seed in range(5):
        chosen = labels[sampled_images(labels, seed=seed, limit=50)]
        assert len(set(chosen.tolist())) == len(chosen) == 50 and 0 not in chosen


def test_stored_thresholds_are_read_and_picked_by_their_rate():
    unit, label = faces(np.random.default_rng(0), 60)
    found = calibrate(unit, label, [1e-3, 1e-2], data="faces", draws=Draws(10))
    metadata = {"thresholds": [asdict(one) for one in found]}
    stored = stored_thresholds(metadata, Path("m"))
    assert stored == [found[1], found[0]]
    assert pick_threshold(stored, None, Path("m")).fmr == 1e-3
    assert pick_threshold(stored, 0.01, Path("m")).fmr == 1e-2
    assert pick_threshold([], None, Path("m")) is None
    # 1e-3 rejects half of the pairs of one person, 1e-2 does not.
    strict = [replace(stored[0], fnmr=0.4), replace(stored[1], fnmr=0.5)]
    assert pick_threshold(strict, None, Path("m")).fmr == 1e-2
    loose = [replace(stored[0], fmr=0.1, fnmr=0.6), *(replace(each, fnmr=0.7) for each in stored)]
    assert pick_threshold(loose, None, Path("m")).fmr == 0.1
    unknown = [replace(each, fnmr=None, fnmr_interval=None) for each in stored]
    assert pick_threshold(unknown, None, Path("m")).fmr == 1e-3
    with pytest.raises(UsageError, match=r"FMR of 0\.011.*0\.01, 0\.001"):
        pick_threshold(stored, 0.011, Path("m"))
    with pytest.raises(UsageError, match="facetrain calibrate"):
        pick_threshold([], 0.5, Path("m"))
    for damage in ({"thresholds": [{"fmr": 1}]}, {"thresholds": 3}, {"thresholds": [None]}):
        with pytest.raises(ModelError, match="thresholds are damaged"):
            stored_thresholds(damage, Path("m"))
    (read,) = stored_thresholds({"thresholds": [asdict(unknown[0])]}, Path("m"))
    assert read == unknown[0]


def test_too_few_people_and_embeddings_of_zeros_give_no_threshold(tmp_path):
    model, faces = tmp_path / "m.safetensors", tmp_path / "faces"
    network = write_model(model)
    for number in range(10):
        (faces / f"{number // 2}").mkdir(parents=True, exist_ok=True)
        (faces / f"{number // 2}" / f"{number}.png").write_bytes(face(number, size=32))
    options = {"fmrs": [0.5], "inference": Inference("cpu")}
    calibrate_model(model, str(faces), tmp_path, **options)
    with pytest.raises(DataError, match="1e-06 needs 1,000,000 impostor pairs"):
        calibrate_model(model, str(faces), tmp_path, fmrs=[1e-6], progress=lambda *_: pytest.fail("embedded"))
    before = model.read_bytes()
    for weight in network.state_dict().values():
        weight.zero_()
    write_model(tmp_path / "zeros.safetensors", network=network)
    with pytest.raises(ModelError, match=r"image 0\b"):
        calibrate_model(tmp_path / "zeros.safetensors", str(faces), tmp_path, **options)
    assert model.read_bytes() == before
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"--output FILE\.safetensors"):
        calibrate_model(tmp_path / "run", str(faces), tmp_path)


def test_a_model_that_was_replaced_during_its_calibration_is_kept(tmp_path):
    model, newer, faces = tmp_path / "m.safetensors", tmp_path / "newer.safetensors", tmp_path / "faces"
    write_model(model)
    write_model(newer)
    for number in range(10):
        (faces / f"{number // 2}").mkdir(parents=True, exist_ok=True)
        (faces / f"{number // 2}" / f"{number}.png").write_bytes(face(number, size=32))
    written = newer.read_bytes()

    def replace_model(done, total):
        if newer.exists():
            newer.replace(model)

    measure = partial(calibrate_model, model, str(faces), tmp_path, fmrs=[0.5], inference=Inference("cpu"))
    with pytest.raises(RunError, match=r"m\.safetensors: was replaced meanwhile"):
        measure(progress=replace_model)
    assert model.read_bytes() == written
    # A copy has the weights that were measured.
    write_model(newer)
    measure(progress=replace_model, output=tmp_path / "copy.safetensors")
    assert (tmp_path / "copy.safetensors").exists() and not newer.exists()


def test_thresholds_are_not_stored_in_the_cache_of_downloads(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tmp_path / "facetrain" / "downloads" / "key" / "version" / "m.safetensors"
    model.parent.mkdir(parents=True)
    write_model(model)
    measure = partial(calibrate_model, model, str(tmp_path / "none"), tmp_path)
    with pytest.raises(UsageError, match=r"m\.safetensors: is a download.*--output FILE\.safetensors"):
        measure()
    with pytest.raises(DataError, match="none"):
        measure(output=tmp_path / "copy.safetensors")


@pytest.mark.parametrize("external", [False, True])
def test_thresholds_are_stored_in_the_metadata_of_an_onnx_file(tmp_path, external):
    onnx = pytest.importorskip("onnx")
    write_model(tmp_path / "m.safetensors")
    opened, path = open_model(tmp_path / "m.safetensors", torch.device("cpu")), tmp_path / "m.onnx"
    # The exporter for old opsets is the fast one.
    export(opened, "onnx", path, ExportOptions(opset=12))
    if external:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights", size_threshold=0)
    for number in range(10):
        (tmp_path / "faces" / f"{number // 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "faces" / f"{number // 2}" / f"{number}.png").write_bytes(face(number, size=32))
    (tmp_path / "other").mkdir()
    before = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    measure = partial(
        calibrate_model, path, str(tmp_path / "faces"), tmp_path, fmrs=[0.5, 0.5], inference=Inference("cpu")
    )
    if external:
        with pytest.raises(UsageError, match="beside it; give --output in the folder"):
            measure(output=tmp_path / "other" / "m.onnx")
    else:
        written, _ = measure(output=tmp_path / "other" / "m.onnx")
        assert stored_thresholds(open_model(written, torch.device("cpu")).metadata, written)
    with pytest.raises(UsageError, match=r"m\.safetensors: the model is written as \.onnx"):
        measure(output=tmp_path / "m.safetensors")
    assert "thresholds" not in open_model(path, torch.device("cpu")).metadata
    written, thresholds = measure()
    assert len(thresholds) == 1
    again = open_model(path, torch.device("cpu"))
    assert written == path and stored_thresholds(again.metadata, path) == thresholds
    kept = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert before.items() < kept.items()


def test_a_name_prefers_the_set_to_a_folder_of_photos_of_the_same_name(tmp_path, monkeypatch):
    people = [face(number, size=32) for number in range(4)]
    (tmp_path / "sets").mkdir()
    write_bin(tmp_path / "sets" / "lfw.bin", people, [True, False])
    write_subjects(tmp_path / "sets" / "lfw.bin", ["a", "a", "b", "c"])
    (tmp_path / "lfw" / "d").mkdir(parents=True)
    (tmp_path / "lfw" / "d" / "0.png").write_bytes(face(5, size=32))
    monkeypatch.chdir(tmp_path)
    images, labels = read_known_people("lfw", tmp_path / "sets")
    assert (list(images), labels.tolist()) == (people, [0, 0, 1, 2])
    assert len(read_known_people("./lfw", tmp_path / "sets")[0]) == 1


def test_copies_of_an_image_do_not_count_as_pairs(tmp_path):
    model = tmp_path / "m.safetensors"
    write_model(model)
    found = []
    for copies, name in ((1, "once"), (3, "thrice")):
        for number in range(12):
            for copy in range(copies):
                path = tmp_path / name / "faces" / f"{number // 2}" / f"{number}_{copy}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(face(number // 2, number, size=32))
        options = {"fmrs": [0.1], "inference": Inference("cpu")}
        found.append(calibrate_model(model, str(tmp_path / name / "faces"), tmp_path, **options)[1])
    assert found[0] == found[1]


@pytest.mark.parametrize("form", ["folder", "records", "mixture"])
@pytest.mark.parametrize(
    ("shared", "outcome"), [(10, "refused"), (6, "refused"), (1, "warned"), (0, "accepted")]
)
def test_people_of_the_training_data_are_refused(tmp_path, capsys, form, shared, outcome):
    train = tmp_path / "train"
    if form == "records":
        write_records(train, [n // 2 for n in range(10)])
        known = [image for _, image in images_of(open_dataset(train))]
    else:
        known = [encoded_image(100 + n) for n in range(10)]
        for number, image in enumerate(known):
            (train / f"{number // 2}").mkdir(parents=True, exist_ok=True)
            (train / f"{number // 2}" / f"{number}.jpg").write_bytes(image)
    if form == "mixture":
        write_records(tmp_path / "other", range(3))
        train = tmp_path / "Mix.YAML"
        train.write_text("datasets: [{path: other}, {path: train}]")
    images = known[:shared] + [encoded_image(200 + n) for n in range(10 - shared)]
    description = {"trained_on": ["/nowhere", str(train)]}
    if outcome == "refused":
        with pytest.raises(DataError, match=f"people: {shared} of 10 .*{train}"):
            refuse_training_images(images, "people", Path("m"), description)
    else:
        refuse_training_images(images, "people", Path("m"), description)
        assert ("1 of 10 examined images" in capsys.readouterr().err) == (outcome == "warned")


def image_of(size, number=0):
    return bytes([number]) * size


@pytest.mark.parametrize("flag", [0, 1, 2])
def test_training_images_are_found_in_a_record_file_by_their_sizes(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.setattr(training_images, "_MOST_READ", 8)  # two of each size: the last one is unknown
    monkeypatch.setattr(training_images, "_CHUNK", 7)
    sizes = [*range(100, 900, 20), *[1000] * 20]
    with RecordWriter(tmp_path / "train.rec") as writer:
        for key, size in enumerate(sizes):
            labels = (float(key // 2),) * max(flag, 1)
            writer.write(key, RecordHeader(flag, labels, key), image_of(size, key))
    description = {"trained_on": [str(tmp_path)]}
    known = [image_of(sizes[key], key) for key in (30, 33, 37, 41)]
    with pytest.raises(DataError, match="people: 3 of 3 "):
        refuse_training_images(known, "people", Path("m"), description)
    refuse_training_images([image_of(1000, 99)], "people", Path("m"), description)
    assert "people: only 0 of a sample of 1 images were compared" in capsys.readouterr().err
    odd = ImageSubset(open_dataset(tmp_path), np.arange(1, len(sizes), 2))
    assert str(find_training_images(known, odd, 8)) == "2 of 3 examined images", "30 is not in the selection"


def test_the_sample_has_sizes_that_few_training_images_have(tmp_path):
    sizes = [100] * 40 + [*range(200, 520, 20)]
    with RecordWriter(tmp_path / "train.rec") as writer:
        for key, size in enumerate(sizes):
            writer.write(key, RecordHeader.of_image(0, key), image_of(size, key))
    images = [image_of(100, 200 + n) for n in range(48)]
    images[2::3] = [image_of(sizes[40 + n], 40 + n) for n in range(16)]
    assert str(find_training_images(images, open_dataset(tmp_path), 32)) == "16 of 16 examined images"


def test_sets_that_are_only_warned_of_share_the_reads_of_the_training_data(tmp_path, monkeypatch):
    with RecordWriter(tmp_path / "train.rec") as writer:
        for key in range(8):
            writer.write(key, RecordHeader.of_image(0, key), image_of(100, key))
    train, images = open_dataset(tmp_path), [image_of(100, 0), image_of(100, 1)]
    sets = [PairSet(name, images, np.array([False])) for name in "ab"]
    # To look for one of these images, all eight are read; the other one has the same size.
    for most, found in {
        16: ["a: 2 of 2", "b: 2 of 2"],
        8: ["a: 2 of 2", "b: not compared with all images of t, of which too many would have to be read"],
        7: ["a, b: not compared with all images of t, of which too many would have to be read"],
    }.items():
        monkeypatch.setattr(training_images, "_MOST_READ", most)
        assert [one.partition(" examined")[0] for one in sets_of_training_images(sets, train, "t")] == found


def test_sets_are_compared_with_the_readable_datasets_of_a_mixture(tmp_path):
    for name in "ab":
        write_records(tmp_path / name, [0, 0, 1, 1])
    (tmp_path / "mix.yaml").write_text("datasets: [{path: a}, {path: b}]")
    images = [image for _, image in images_of(open_dataset(tmp_path / "b"))]
    sets = [PairSet("own", images, np.array([True, False]))]
    train = open_dataset(tmp_path / "mix.yaml")
    (tmp_path / "a" / "train.rec").unlink()  # its catalog is open, as that of another user's file can be
    (remark,) = sets_of_training_images(sets, train, "mix")
    assert remark.startswith("own: 4 of 4 examined images are in mix, dataset 2,")


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            "/nowhere",
            "m: was trained on /nowhere: no such folder or file; that its people are not in people is not",
        ),
        ("/" + "n" * 300, "n: File name too long; that its"),
        (
            "s3://bucket/faces",
            "m: was trained on s3://bucket/faces, which is not downloaded for this; that its",
        ),
    ],
)
def test_a_calibration_says_which_training_data_cannot_be_read(train, said, capsys):
    warn_of_training_images(["no set is opened"], [{"trained_on": [train]}])
    assert capsys.readouterr().err == ""
    refuse_training_images([b"image"], "people", Path("m"), {"trained_on": [train]})
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("description", [{}, {"trained_on": "x"}, {"trained_on": [1]}])
def test_a_calibration_says_that_the_training_data_are_unknown(description, capsys):
    warn_of_training_images(["no set is opened"], [description])
    assert capsys.readouterr().err == ""
    refuse_training_images([b"image"], "people", Path("m"), description)
    assert (
        "m: what it was trained on is unknown; that its people are not in people" in capsys.readouterr().err
    )


def test_a_mixture_whose_data_may_be_in_a_store_is_not_opened(tmp_path, monkeypatch, capsys):
    (tmp_path / "mix.yaml").write_text("datasets: [{path: 's3://bucket/part'}]")
    monkeypatch.setattr(training_images, "open_dataset", None)
    refuse_training_images([b"image"], "people", Path("m"), {"trained_on": [f"{tmp_path}/mix.yaml"]})
    assert "m: was trained on s3://bucket/part, which is not downloaded" in capsys.readouterr().err
