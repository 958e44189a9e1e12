"""Score files with a column for each of the two people of a pair, among them the published table of BFW."""

from itertools import pairwise

import numpy as np
import pytest

from facetrain.embeddings.embedding_files import Embeddings, save_embeddings
from facetrain.errors import DataError
from facetrain.verify.evaluate import evaluate_scores
from facetrain.verify.options import EvaluationOptions
from facetrain.verify.sets.score_files import read_scored_pairs, read_scores
from tests.support.score_files import columns_of, write
from tests.unit.verify.test_bootstrap import people

FAST = EvaluationOptions(bootstrap=50)

BFW = {"genuine": "label", "subject_1": "id1", "subject_2": "id2"}


def write_bfw(path, pairs, **systems):
    """Write pairs in the columns of BFW's published table; people alternate between two groups."""
    columns = columns_of(pairs)
    first, second = pairs.sides
    sides = (("1", first), ("2", second))
    table = {"": range(len(first)), "fold": np.arange(len(first)) % 5 + 1}
    table |= {f"p{side}": [f"women/{person}/{person}.jpg" for person in people] for side, people in sides}
    table |= {new: columns[old] for old, new in BFW.items()}
    for name, values in (
        ("att", ("asian_females", "white_males")),
        ("g", "FM"),
        ("e", "AW"),
        ("a", ("AF", "WM")),
    ):
        table |= {f"{name}{side}": [values[person % 2] for person in people] for side, people in sides}
    return write(path, table | systems)


def test_a_table_of_bfw_has_groups_of_pairs_and_one_score_for_each_system(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    scores = [repr(float(score)) for score in pairs.score_P]
    path = write_bfw(tmp_path / "bfw.csv", pairs, vgg16=["0.5"] * len(scores), resnet50=scores)
    found = read_scores(tmp_path / "bfw.csv:resnet50")
    assert found.path == path and found.scored.score_P.tolist() == pairs.score_P.tolist()
    assert found.scored.same_P.tolist() == pairs.same_P.tolist() and found.scored.subjects == 60
    assert found.columns.keys() == {"subgroup", "gender", "ethnicity"}
    first, second = pairs.sides
    same_group = first % 2 == second % 2
    assert (found.columns["gender"][~same_group] == "F / M").all()
    assert (found.columns["gender"][same_group & (first % 2 == 0)] == "F").all()
    evaluation = evaluate_scores(
        tmp_path / "bfw.csv:resnet50", against=tmp_path / "bfw.csv:vgg16", options=FAST
    )
    result = evaluation.results["bfw"]
    assert evaluation.differences["bfw"]["auc"].second == 0.5
    by_group = {group.value: group.metrics for group in result.groups if group.column == "gender"}
    assert by_group["F / M"]["genuine"] == 0 and by_group["F / M"]["fnmr"] is None
    # Pairs across groups have no genuine pairs, and are no group of people in the summary.
    summary = next(one for one in result.group_summaries if one.column == "gender")
    accuracy = [by_group[group]["accuracy"] for group in "FM"]
    assert summary.metrics["accuracy_mean"] == pytest.approx(np.mean(accuracy))
    with pytest.raises(DataError, match="select one as .*bfw.csv:COLUMN, where COLUMN is vgg16 or resnet50"):
        read_scores(path)
    with pytest.raises(DataError, match="no column 'absent'; the columns are "):
        read_scores(tmp_path / "bfw.csv:absent")


def test_a_table_of_bfw_is_a_pair_list_for_embeddings_by_image_path(tmp_path):
    pairs = people(np.random.default_rng(1), 20)
    path = write_bfw(tmp_path / "bfw.csv", pairs, senet50=["nan"] * len(pairs.same_P))
    names = [f"women/{person}/{person}.jpg" for person in range(20)]
    unit = np.eye(20, dtype=np.float32)
    save_embeddings(tmp_path / "bfw.npz", Embeddings(unit, names, np.arange(20)))
    table = read_scored_pairs(tmp_path / "bfw.npz", path)
    first, second = pairs.sides
    assert table.scored.score_P.tolist() == (first == second).astype(float).tolist()
    assert table.columns.keys() == {"subgroup", "gender", "ethnicity"}
    names = [f"data/bfw/{name}" for name in names]
    save_embeddings(tmp_path / "paths.npz", Embeddings(unit, names, np.arange(20)))
    found = read_scored_pairs(tmp_path / "paths.npz", path)
    assert found.scored.score_P.tolist() == table.scored.score_P.tolist()


def test_a_score_file_has_pairwise_groups_and_other_score_columns(tmp_path):
    columns = {
        "ours": ["0.9", "0.1"], "score": ["0.5", "0.5"], "genuine": [1, 0],
        "age_1": ["young", "young"], "age_2": ["young", "old"], "camera_1": ["a", "b"],
    }  # fmt: skip
    found = read_scores(write(tmp_path / "a.csv", columns).with_name("a.csv:ours"))
    assert found.scored.score_P.tolist() == [0.9, 0.1]
    assert {name: values.tolist() for name, values in found.columns.items()} == {
        "age": ["young", "old / young"],
        "camera_1": ["a", "b"],
    }


def test_a_distance_that_is_selected_by_its_name_stays_a_distance(tmp_path):
    columns = {"score": ["0.9", "0.2"], "distance": ["0.25", "1.5"], "genuine": [1, 0]}
    path = write(tmp_path / "a.csv", columns)
    with pytest.raises(
        DataError, match=r"either a column score or a column distance; give .* as .*a.csv:COLUMN"
    ):
        read_scores(path)
    assert read_scores(tmp_path / "a.csv:score").scored.score_P.tolist() == [0.9, 0.2]
    found = read_scores(tmp_path / "a.csv:distance")
    assert found.scored.score_P.tolist() == [-0.25, -1.5] and found.scored.scale.low == -1.5
    assert not found.columns
    pairs = people(np.random.default_rng(0), 60)
    write_bfw(tmp_path / "bfw.csv", pairs, distance=[repr(1 - float(score)) for score in pairs.score_P])
    bfw = read_scores(tmp_path / "bfw.csv:distance").scored
    np.testing.assert_allclose(bfw.score_P, pairs.score_P - 1, atol=1e-12)


def test_the_quality_of_a_pair_is_the_lower_one_of_both_images(tmp_path):
    columns = {"score": [1, 2], "genuine": [1, 0], "quality_1": ["0.3", "0.2"], "quality_2": ["0.1", "5"]}
    found = read_scores(write(tmp_path / "a.csv", columns))
    assert found.quality.tolist() == [0.1, 0.2] and not found.columns
    with pytest.raises(DataError, match="row 3: quality_2 is 'good', not a finite number"):
        read_scores(write(tmp_path / "a.csv", columns | {"quality_2": ["0.1", "good"]}))
    with pytest.raises(DataError, match="has the columns quality, quality_1 and quality_2"):
        read_scores(write(tmp_path / "a.csv", columns | {"quality": [1, 1]}))


@pytest.mark.parametrize("name", ["score", "distance", "genuine", "pair", "first", "second"])
def test_a_column_with_a_meaning_is_not_made_of_two_others(tmp_path, name):
    columns = {"distance": [1, 2], "genuine": [1, 0], f"{name}_1": ["a", "a"], f"{name}_2": ["b", "b"]}
    found = read_scores(write(tmp_path / "a.csv", columns))
    assert found.scored.score_P.tolist() == [-1, -2] and found.pair == ["0", "1"]
    assert found.columns.keys() == {f"{name}_1", f"{name}_2"}


def test_numbers_of_both_people_become_the_quartiles_of_both_columns_together(tmp_path):
    random = np.random.default_rng(0)
    first, second = random.integers(0, 50, 200), random.integers(50, 100, 200)
    columns = {"score": [0.5] * 200, "genuine": [1, 0] * 100, "age_1": first, "age_2": second}
    found = read_scores(write(tmp_path / "a.csv", columns)).columns
    edge = np.quantile([first, second], [0, 0.25, 0.5, 0.75, 1])
    names = [f"{low:g} to {high:g}" for low, high in pairwise(edge)]
    assert found.keys() == {"age"}
    assert set(found["age"]) == {" / ".join(sorted((low, high))) for low in names[:2] for high in names[2:]}
    path = write(tmp_path / "a.csv", columns | {"age": first})
    with pytest.raises(
        DataError, match="has the columns age, age_1 and age_2, .*; rename or remove one of them"
    ):
        read_scores(path)
