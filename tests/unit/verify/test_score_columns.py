"""Score files with a column for each of the two people of a pair, and with the scores of several systems."""

from itertools import pairwise

import numpy as np
import pytest

from facetrain.embeddings.embedding_files import Embeddings, save_embeddings
from facetrain.errors import DataError
from facetrain.verify.evaluate import evaluate_scores
from facetrain.verify.options import EvaluationOptions
from facetrain.verify.score_files import read_scored_pairs, read_scores
from tests.support.score_files import columns_of, write
from tests.unit.verify.test_bootstrap import people

FAST = EvaluationOptions(bootstrap=50)


def test_groups_of_both_people_are_compared_for_each_of_several_systems(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    first, second = pairs.sides
    columns = columns_of(pairs)
    columns |= {"ours": columns.pop("score"), "theirs": ["0.5"] * len(first)}
    for side, person in ((1, first), (2, second)):
        columns[f"gender_{side}"] = ["FM"[each % 2] for each in person]
    write(tmp_path / "systems.csv", columns)
    found = read_scores(tmp_path / "systems.csv:ours")
    assert found.scored.score_P.tolist() == pairs.score_P.tolist() and found.scored.subjects == 60
    ours, theirs = (tmp_path / f"systems.csv:{name}" for name in ("ours", "theirs"))
    evaluation = evaluate_scores(ours, against=theirs, options=FAST)
    result = evaluation.results["systems"]
    assert evaluation.differences["systems"]["auc"].second == 0.5
    by_group = {group.value: group.metrics for group in result.groups if group.column == "gender"}
    assert by_group["F / M"]["genuine"] == 0 and by_group["F / M"]["fnmr"] is None
    # Pairs across groups have no genuine pairs, and are no group of people in the summary.
    summary = next(each for each in result.group_summaries if each.column == "gender")
    accuracy = [by_group[group]["accuracy"] for group in "FM"]
    assert summary.metrics["accuracy_mean"] == pytest.approx(np.mean(accuracy))
    with pytest.raises(DataError, match="give the column to use as .*; the columns are "):
        read_scores(tmp_path / "systems.csv:absent")


def test_embeddings_of_a_list_file_are_found_by_the_path_inside_its_folder(tmp_path):
    pairs = people(np.random.default_rng(1), 20)
    first, second = pairs.sides
    columns = {"genuine": columns_of(pairs)["genuine"]}
    for name, person in (("first", first), ("second", second)):
        columns[name] = [f"women/{each}/{each}.jpg" for each in person]
    path = write(tmp_path / "pairs.csv", columns)
    names = [f"data/faces/women/{person}/{person}.jpg" for person in range(20)]
    save_embeddings(tmp_path / "paths.npz", Embeddings(np.eye(20, dtype=np.float32), names, np.arange(20)))
    found = read_scored_pairs(tmp_path / "paths.npz", path)
    assert found.scored.score_P.tolist() == (first == second).astype(float).tolist()


def test_a_score_file_has_pairwise_groups_and_other_score_columns(tmp_path):
    columns = {
        "ours": ["0.9", "0.1"], "score": ["0.5", "0.5"], "genuine": [1, 0],
        "age_1": ["young", "young"], "age_2": ["young", "old"], "camera_1": ["a", "b"],
    }  # fmt: skip
    found = read_scores(write(tmp_path / "a.csv", columns).with_name("a.csv:ours"))
    assert found.scored.score_P.tolist() == [0.9, 0.1]
    assert found.columns.keys() == {"age", "camera_1"}
    assert found.columns["age"].tolist() == ["young", "old / young"]
    assert found.columns["camera_1"].tolist() == ["a", "b"]


def test_a_distance_that_is_selected_by_its_name_stays_a_distance(tmp_path):
    columns = {"score": ["0.9", "0.2"], "distance": ["0.25", "1.5"], "genuine": [1, 0]}
    path = write(tmp_path / "a.csv", columns)
    with pytest.raises(DataError, match=r"or a column distance, or give .* as .*a.csv:COLUMN"):
        read_scores(path)
    assert read_scores(tmp_path / "a.csv:score").scored.score_P.tolist() == [0.9, 0.2]
    found = read_scores(tmp_path / "a.csv:distance")
    assert found.scored.score_P.tolist() == [-0.25, -1.5] and found.scored.scale.low == -1.5
    assert not found.columns


def test_the_quality_of_a_pair_is_the_lower_one_of_both_images(tmp_path):
    columns = {"score": [1, 2], "genuine": [1, 0], "quality_1": ["0.3", "0.2"], "quality_2": ["0.1", "5"]}
    found = read_scores(write(tmp_path / "a.csv", columns))
    assert found.quality.tolist() == [0.1, 0.2] and not found.columns
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
    with pytest.raises(DataError, match="has the columns age, age_1 and age_2, .*; rename or"):
        read_scores(path)
