import json
from pathlib import Path

import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.clean_report import describe_report, format_report, read_report
from facetrain.data.tools.fault_threshold import FaultThreshold
from facetrain.data.tools.similarity import Separation
from facetrain.data.tools.wrong_labels import CleanReport, WrongLabel, corrected_labels
from facetrain.errors import DataError
from tests.support.datasets import write_records

WRONG = [WrongLabel(1, 0, 1, 0.8), WrongLabel(3, 1, -1, 0.05)]
LABELS = [0, 0, 1, 1, 2, 2, 2, 3]


@pytest.fixture
def source(tmp_path):
    return open_dataset(write_records(tmp_path / "data", LABELS))


@pytest.fixture
def path(source, tmp_path):
    report = CleanReport(WRONG, Separation(0.01), FaultThreshold(0.5, 0.25, 8))
    file = tmp_path / "report.json"
    file.write_text(format_report(describe_report(source, report, Path("model"))), encoding="utf-8")
    return file


def labels(path, source):
    return corrected_labels(source.labels, read_report(path, source)).tolist()


def edit(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_report_gives_the_same_decisions_again_as_edited(source, path):
    assert labels(path, source) == [0, 1, 1, -1, 2, 2, 2, 3]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum('"apply": true' in line for line in lines) == len(WRONG), "one decision per line"
    edit(path, lambda content: content["decisions"][1].update(apply=False))
    assert labels(path, source) == [0, 1, 1, 1, 2, 2, 2, 3]
    edit(path, lambda content: content["decisions"][0].update(target=3))
    assert labels(path, source) == [0, 3, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "x"}, "not a report"),
        ({"fingerprint": "sha256:0"}, "another dataset"),
        ({"decisions": 3}, "not a report"),
        ({"decisions": [3]}, "decision 1"),
        ((0, {"apply": "no"}), "`apply`"),
        ((0, {"image": 8}), "`image`"),
        ((1, {"image": True}), "`image`"),
        ((1, {"target": 4}), "`target`"),
    ],
)
def test_a_wrong_report_is_refused_with_its_place(source, path, change, named):
    def damage(content):
        if isinstance(change, dict):
            content |= change
        else:
            content["decisions"][change[0]] |= change[1]

    edit(path, damage)
    with pytest.raises(DataError, match=named) as caught:
        read_report(path, source)
    assert str(path) in str(caught.value)


def test_a_report_of_other_labels_and_a_file_that_is_not_json_are_refused(path, tmp_path):
    other = open_dataset(write_records(tmp_path / "other", [*LABELS[:-1], 2]))
    with pytest.raises(DataError, match="another dataset"):
        read_report(path, other)
    for content in (b"{", b"{\xff}"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not JSON"):
            read_report(path, other)
