import json
from pathlib import Path

import numpy as np
import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.clean import CleanReport
from facetrain.data.tools.clean_report import describe_report, format_report, read_report
from facetrain.data.tools.contact_sheet import write_fault_sheet
from facetrain.data.tools.fault_calibration import FaultThreshold
from facetrain.data.tools.label_faults import LabelFault, apply_faults
from facetrain.data.tools.similarity import Separation
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records

FAULTS = [
    LabelFault("mixed_identity", 2, -1, 0.1, (4, 5), 4),
    LabelFault("mislabeled_image", 0, 1, 0.8, (1,), 1),
    LabelFault("outlier_image", 1, -1, 0.05, (3,), -1),
    LabelFault("duplicate_identity", 0, 3, 0.9, (), 0),
]
LABELS = [0, 0, 1, 1, 2, 2, 2, 3]


@pytest.fixture
def source(tmp_path):
    return open_dataset(write_records(tmp_path / "data", LABELS))


@pytest.fixture
def path(source, tmp_path):
    thresholds = {kind: FaultThreshold(0.5, 0.25) for kind in ("duplicate_identity", "mislabeled_image")}
    report = CleanReport(FAULTS, np.array(LABELS), Separation(0.01, 0.3), thresholds)
    file = tmp_path / "report.json"
    file.write_text(format_report(describe_report(source, report, Path("model"))), encoding="utf-8")
    return file


def labels(path, source):
    return apply_faults(source.labels, read_report(path, source)).tolist()


def edit(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_report_gives_the_same_decisions_again_and_pairs_only_on_request(source, path):
    assert labels(path, source) == [0, 1, 1, -1, 4, 4, 2, 3]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum('"apply": true' in line for line in lines) == len(FAULTS) - 1, "one decision per line"
    assert json.loads(path.read_text(encoding="utf-8"))["expected_false"] == 0.25, (
        "without pairs of identities"
    )
    edit(path, lambda content: content["decisions"][3].update(apply=True))
    assert labels(path, source) == [0, 1, 1, -1, 4, 4, 2, 0]
    edit(path, lambda content: content["decisions"][3].update(target=2))
    assert labels(path, source) == [0, 1, 1, -1, 4, 4, 0, 0]


def test_decisions_can_be_switched_off_one_by_one(source, path):
    edit(path, lambda content: content["decisions"][2].update(apply=False))
    assert labels(path, source) == [0, 1, 1, 1, 4, 4, 2, 3]
    edit(path, lambda content: content.update(decisions=[]))
    assert labels(path, source) == LABELS


def test_an_identity_and_the_group_of_another_one_can_show_one_person(tmp_path):
    for number, label in enumerate(LABELS):
        (tmp_path / "photos" / f"p{label}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / f"p{label}" / f"{number}.png").write_bytes(encoded_image(number))
    source = open_dataset(tmp_path / "photos")
    faults = [FAULTS[0], LabelFault("duplicate_identity", 0, 4, 0.9, (), 0)]
    report = CleanReport(faults, source.labels, Separation(0.01, 0.3))
    content = describe_report(source, report, Path("model"))
    assert content["decisions"][1]["other_name"] == "4"
    content["decisions"][1]["apply"] = True
    (tmp_path / "report.json").write_text(format_report(content))
    assert labels(tmp_path / "report.json", source) == [0, 0, 1, 1, 0, 0, 2, 3]
    write_fault_sheet(source, faults, tmp_path / "faults.html")
    sheet = (tmp_path / "faults.html").read_text()
    assert "2. duplicate_identity: identity 0 (p0) | identity 4, cosine 0.900" in sheet
    assert sheet.count("<img") == 3 + 4, "the group and its identity; both identities"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a report"),
        ({"fingerprint": "sha256:0"}, "another dataset"),
        ({"decisions": 3}, "not a list"),
        ({"decisions": [3]}, "decision 1 in the list: `apply`"),
        ((0, {"apply": "no"}), "true or false"),
        ((0, {"kind": "ugly"}), "kind ugly; allowed are"),
        ((0, {"kind": {}}), "kind {}; allowed are"),
        ((0, {"images": [8]}), "numbers from 0 to 7"),
        ((1, {"images": [True]}), "numbers from 0 to 7"),
        ((0, {"target": -1}), "`target` must be a number from 0"),
        ((1, {"target": 8}), "`target` must be a number from -1 to 7"),
        ((3, {"other": -1}), "`other` must be a number from 0"),
        ((3, {"identity": None}), "`identity` must be a number"),
    ],
)
def test_a_wrong_report_is_refused_with_its_place(source, path, change, message):
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(change, dict):
        content |= change
    else:
        content["decisions"][change[0]] |= change[1] | {"apply": change[1].get("apply", True)}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_report(path, source)


def test_a_report_of_other_labels_and_a_file_that_is_not_json_are_refused(path, tmp_path):
    other = open_dataset(write_records(tmp_path / "other", [*LABELS[:-1], 2]))
    with pytest.raises(DataError, match="another dataset"):
        read_report(path, other)
    for content in (b"{", b"{\xff}"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not JSON"):
            read_report(path, other)
