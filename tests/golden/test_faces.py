"""Overlap and cleaning tools on real faces with a published model."""

import json
import shutil

import pytest

from facetrain.data.formats.bin import write_bin
from facetrain.data.open_dataset import open_dataset
from tests.support.command import output_of
from tests.support.shared import shared_path

KINDS = ("mixed_identity", "duplicate_identity", "mislabeled_image")


@pytest.fixture(scope="module")
def people():
    folders = sorted(path for path in shared_path("real/lfw_train").iterdir() if path.is_dir())
    return [sorted(folder.glob("*.jpg")) for folder in folders if len(list(folder.glob("*.jpg"))) >= 5][:48]


@pytest.fixture(scope="module")
def model():
    return shared_path("real/y1/model-symbol.json")


def copied(images, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for image in images:
        shutil.copyfile(image, folder / image.name)


@pytest.mark.slow
def test_overlap_finds_the_identities_shared_with_the_test_set(people, model, tmp_path):
    for number, images in enumerate(people[:40]):
        copied(images[:3], tmp_path / "train" / f"{number:02d}")
    shared = (1, 8, 13)
    tested = [image for number in shared for image in people[number][3:5]]
    tested += [image for images in people[40:48] for image in images[:2]]
    pairs = [path.read_bytes() for path in tested]
    write_bin(tmp_path / "test.bin", pairs, [True] * (len(pairs) // 2))
    found = json.loads(
        output_of(
            "data", "overlap", model, tmp_path / "train", tmp_path / "test.bin",
            "--output", tmp_path / "drop.txt", "--json", "--device", "cpu",
        )
    )  # fmt: skip
    assert sorted(one["identity"] for one in found["overlapping"]) == list(shared)
    for one in found["overlapping"]:
        assert one["test_images"] == 2 and one["test_image"] // 2 == shared.index(one["identity"])
        assert one["image"] // 3 == one["identity"] and one["similarity"] > found["threshold"]
    assert sorted(map(int, (tmp_path / "drop.txt").read_text().split())) == list(shared)
    (tmp_path / "mix.yaml").write_text("datasets: [{path: train, without: drop.txt}]")
    again = ("overlap", model, tmp_path / "mix.yaml", tmp_path / "test.bin", "--device", "cpu")
    assert "0 identities of" in output_of("data", *again)


@pytest.mark.slow
def test_clean_finds_wrong_labels_and_writes_a_dataset_without_them(people, model, tmp_path):
    for number, images in enumerate(people[:40]):
        copied(images[:5], tmp_path / "data" / f"{number:02d}")
    copied([people[0][0]], tmp_path / "data" / "05")  # under the label of another person
    (tmp_path / "data" / "00" / people[0][0].name).unlink()
    copied(people[3][:2], tmp_path / "data" / "40")  # one person, two identities
    for image in people[3][:2]:
        (tmp_path / "data" / "03" / image.name).unlink()
    copied(people[44][:4], tmp_path / "data" / "09")  # two people, one identity
    report, cleaned = tmp_path / "report.json", tmp_path / "cleaned"
    output_of("data", "clean", model, tmp_path / "data", "--report", report, "--device", "cpu")
    content = json.loads(report.read_text())
    faults = content["decisions"]
    kinds = {kind: [one for one in faults if one["kind"] == kind] for kind in KINDS}
    assert [one["identity"] for one in kinds["mixed_identity"]] == [9]
    assert [(one["identity"], one["other"]) for one in kinds["duplicate_identity"]] == [(3, 40)]
    assert [(one["identity"], one["other"]) for one in kinds["mislabeled_image"]] == [(5, 0)]
    assert kinds["mislabeled_image"][0]["names"][0].endswith(f"05/{people[0][0].name}")
    for one in faults:
        one["apply"] = True  # also the pair of identities
    report.write_text(json.dumps(content))
    applied = ("--apply", report, "--output", cleaned, "--yes")
    assert f"{cleaned}: " in output_of("data", "clean", tmp_path / "data", *applied)
    source, before = open_dataset(cleaned), {path.read_bytes(): path for path in tmp_path.glob("data/*/*")}
    assert source.num_classes == 41  # the 40 people, and the second person of identity 9
    names = [before[source.read(number)].name.rpartition("_")[0] for number in range(source.num_images)]
    people_of = {}
    for name, label in zip(names, source.labels.tolist(), strict=True):
        people_of.setdefault(label, set()).add(name)
    assert all(len(persons) == 1 for persons in people_of.values())
