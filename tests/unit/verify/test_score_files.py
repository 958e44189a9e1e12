import csv
import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from facetrain.errors import DataError, UsageError
from facetrain.verify.embedding_files import Embeddings, save_embeddings
from facetrain.verify.evaluate import evaluate_scores
from facetrain.verify.fold_accuracy import fold_order
from facetrain.verify.formatting import format_evaluation
from facetrain.verify.pair_set import PairSet
from facetrain.verify.protocols import Options, results_from_embeddings, scores_result
from facetrain.verify.score_files import read_scored_pairs, read_scores, scores_of_set
from facetrain.verify.score_scale import COSINE
from tests.unit.verify.test_bootstrap import people

FAST = Options(replicates=50)


def write(path, columns):
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def columns_of(pairs, **more):
    first, second = pairs.sides
    return {
        "score": [repr(float(score)) for score in pairs.score_P],
        "genuine": pairs.same_P.astype(int),
        "subject_1": first,
        "subject_2": second,
        **more,
    }


def test_a_score_file_gives_the_same_numbers_as_the_scores_themselves(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    path = write(tmp_path / "system.csv", columns_of(pairs))
    found = evaluate_scores(path, options=FAST).results["system"]
    # Subject ids follow the order of the file, so the draws of the bootstrap differ and the metrics do not.
    expected = scores_result(pairs, {}, FAST)
    assert found.metrics == expected.metrics and found.threshold == expected.threshold
    assert found.subjects == len(np.unique(np.concatenate(pairs.sides)))
    assert found.metrics.keys() >= {"accuracy", "threshold", "auc", "eer", "tar@1e-01"}
    assert found.scale == COSINE


def test_the_scale_of_the_scores_does_not_change_the_rates(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    cosines = evaluate_scores(write(tmp_path / "cosines.csv", columns_of(pairs)), options=FAST)
    columns = columns_of(pairs, score=[repr(float(50 + 50 * score)) for score in pairs.score_P])
    percent = evaluate_scores(write(tmp_path / "percent.csv", columns), options=FAST)
    columns = columns_of(pairs) | {"distance": [repr(float(2 - 2 * score)) for score in pairs.score_P]}
    del columns["score"]
    distance = evaluate_scores(write(tmp_path / "distance.csv", columns), options=FAST)
    one, other, third = (next(iter(each.results.values())) for each in (cosines, percent, distance))
    for name in ("auc", "eer", "tar@1e-01"):
        assert one.metrics[name] == other.metrics[name] == third.metrics[name]
        assert one.interval[name] == pytest.approx(other.interval[name])
    # The grid of 400 thresholds lies between the lowest and the highest score instead of −1 and 1.
    assert other.metrics["accuracy"] == pytest.approx(one.metrics["accuracy"], abs=0.02)
    assert other.threshold["eer"] == pytest.approx(50 + 50 * one.threshold["eer"])
    assert other.threshold["accuracy"] == pytest.approx(50 + 50 * one.threshold["accuracy"], abs=2)
    assert "threshold" not in other.metrics, "it is a squared distance of unit vectors"
    assert other.histogram.edge[0] == pairs.score_P.min() * 50 + 50
    assert other.histogram.genuine.sum() == pairs.same_P.sum()


@pytest.mark.parametrize("column", ["distance", "score"])
def test_distances_below_1_are_not_taken_for_cosines(tmp_path, column):
    genuine = np.arange(200) % 2
    distance = np.where(genuine, 0.0064, 0.0072) + 0.0003 * np.random.default_rng(0).normal(size=200)
    values = distance if column == "distance" else -distance
    path = write(tmp_path / "small.csv", {column: values, "genuine": genuine})
    result = evaluate_scores(path, options=FAST).results["small"]
    assert result.scale.high == -distance.min() and "threshold" not in result.metrics
    assert result.metrics["accuracy"] > 0.85, "the thresholds lie between the distances"


def test_embeddings_with_a_pair_list_are_scored_by_their_cosines(tmp_path):
    random = np.random.default_rng(0)
    label = np.repeat(np.arange(20), 3)
    embedding = (random.normal(size=(20, 8))[label] + random.normal(size=(60, 8))).astype(np.float32)
    names = [f"{one}/{n}.jpg" for n, one in enumerate(label)]
    save_embeddings(tmp_path / "system.npz", Embeddings(embedding, names, label))
    first, second = random.integers(0, 60, (2, 400))
    pairs = {"first": [names[n] for n in first], "second": [names[n] for n in second]}
    path = write(tmp_path / "pairs.csv", pairs | {"genuine": (label[first] == label[second]).astype(int)})
    table = read_scored_pairs(tmp_path / "system.npz", path)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    np.testing.assert_allclose(table.scored.score_P, (unit[first] * unit[second]).sum(1), atol=1e-6)
    assert table.scored.subjects == 20 and (table.scored.subject_N == label).all()
    found = evaluate_scores(tmp_path / "system.npz", pair_list=path, options=FAST)
    assert found.results["system"].metrics["pairs"] == 400
    with pytest.raises(UsageError, match="need a list of the pairs"):
        evaluate_scores(tmp_path / "system.npz", options=FAST)


def test_people_of_the_file_who_are_in_no_pair_do_not_narrow_the_intervals(tmp_path):
    random = np.random.default_rng(0)
    label = np.repeat(np.arange(20), 2)
    embedding = random.normal(size=(20, 8))[label] + 0.1 * random.normal(size=(40, 8))
    first, second = np.arange(40), np.concatenate([np.arange(40) ^ 1, (np.arange(40) + 2) % 40])
    pairs = {"first": [*first, *first], "second": second, "genuine": [1] * 40 + [0] * 40}
    path = write(tmp_path / "pairs.csv", pairs)
    found = []
    for others in (0, 500):
        people = np.concatenate([random.permutation(others) + 20, label])
        unit = np.concatenate([random.normal(size=(others, 8)), embedding])
        names = [f"other {n}" for n in range(others)] + [str(n) for n in range(40)]
        save_embeddings(tmp_path / "a.npz", Embeddings(unit, names, people))
        found.append(evaluate_scores(tmp_path / "a.npz", pair_list=path, options=FAST).results["a"])
    few, many = found
    assert few.subjects == many.subjects == 20 and few.metrics["eer"] == 0
    assert few.interval == many.interval and few.interval["eer"][1] > 0.1


def test_an_embedding_of_zeros_has_the_lowest_score_with_every_image(tmp_path):
    unit = np.eye(4)[[0, 0, 1, 1, 2, 2]]
    unit[[3, 5]] = 0
    names = [str(n) for n in range(6)]
    save_embeddings(tmp_path / "a.npz", Embeddings(unit, names, np.full(6, -1)))
    pairs = {"first": [0, 2, 3], "second": [1, 3, 5], "genuine": [1, 1, 0]}
    path = write(tmp_path / "pairs.csv", pairs)
    assert read_scored_pairs(tmp_path / "a.npz", path).scored.score_P.tolist() == [1, -1, -1]
    target = PairSet("pairs", [bytes([n]) for n in range(6)], np.array([True, True, False]))
    assert scores_of_set(tmp_path / "a.npz", target).score_P.tolist() == [1, -1, -1]
    found = evaluate_scores(tmp_path / "a.npz", pair_list=path, against=tmp_path / "a.npz", options=FAST)
    warning = "  warning: embeddings of zeros: 2; their score is −1 with every other image"
    assert list(format_evaluation(found)).count(warning) == 2, "one for each system"
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_the_embeddings_of_a_set_give_the_accuracy_of_the_set(tmp_path, is_sorted):
    random = np.random.default_rng(0)
    same = np.arange(200) < 100 if is_sorted else np.arange(200) % 2 == 0
    plain = random.normal(size=(400, 8)).astype(np.float32)
    plain[1::2][same] += 2 * plain[0::2][same]
    target = PairSet("pairs", [bytes([n % 256, n // 256]) for n in range(400)], same)
    save_embeddings(tmp_path / "a.npz", Embeddings(plain, [""] * 400, np.full(400, -1)))
    found = scores_result(scores_of_set(tmp_path / "a.npz", target), {}, FAST, folds_of_set=True)
    (expected,) = results_from_embeddings(target, (plain, plain), FAST).values()
    shared = found.metrics.keys() & expected.metrics.keys()
    assert {name: found.metrics[name] for name in shared} == pytest.approx(
        {name: expected.metrics[name] for name in shared}, abs=1e-6
    )
    assert "accuracy" in shared and found.interval["auc"] == pytest.approx(expected.interval["auc"])


def test_two_systems_are_compared_pair_by_pair_in_any_order(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    names = [f"pair {n}" for n in range(len(pairs.same_P))]
    first = write(tmp_path / "one.csv", columns_of(pairs, pair=names))
    order = np.random.default_rng(1).permutation(len(names))
    better = replace(pairs, score_P=np.clip(pairs.score_P + 0.2 * pairs.same_P, -1, 1))
    rows = {name: [values[n] for n in order] for name, values in columns_of(better, pair=names).items()}
    found = evaluate_scores(first, against=write(tmp_path / "other.csv", rows), options=FAST)
    difference = found.differences["one"]["auc"]
    assert difference.second > difference.first and difference.interval[1] < 0
    assert found.other_results["one"].metrics["auc"] == difference.second
    assert found.results["one"].hardest_genuine[0].name.startswith("pair ")
    rows["pair"][3] = "another"
    with pytest.raises(DataError, match="is missing; two systems are compared on the same pairs"):
        evaluate_scores(first, against=write(tmp_path / "other.csv", rows), options=FAST)
    rows["pair"][3], rows["genuine"][3] = names[order[3]], 1 - rows["genuine"][3]
    del rows["subject_1"], rows["subject_2"]
    with pytest.raises(DataError, match="genuine differs from the labels"):
        evaluate_scores(first, against=write(tmp_path / "other.csv", rows), options=FAST)


def test_other_columns_are_slices(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    group = np.random.default_rng(1).choice(["dark", "light"], len(pairs.same_P))
    found = evaluate_scores(write(tmp_path / "system.csv", columns_of(pairs, skin=group)), options=FAST)
    result = found.results["system"]
    assert [one.value for one in result.groups] == ["dark", "light"]
    (summary,) = result.group_summaries
    assert summary.column == "skin" and summary.metrics["fnmr_worst_to_best"] >= 1


def test_slices_at_an_fmr_that_the_impostor_pairs_cannot_show_are_left_out(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    columns = columns_of(pairs, skin=["dark", "light"] * (len(pairs.same_P) // 2))
    columns["quality"] = np.arange(len(pairs.same_P))
    path, impostors = write(tmp_path / "system.csv", columns), np.count_nonzero(~pairs.same_P)
    found = evaluate_scores(path, options=replace(FAST, slice_fmr=1e-9))
    result = found.results["system"]
    assert not result.groups and not result.discards and result.metrics["slices@1e-09"] is None
    other = evaluate_scores(path, options=replace(FAST, slice_fmr=1e-4)).results["system"]
    assert {"slices@1e-04", "tar@1e-04"} <= other.needs.keys()
    needs = f"  slices@1e-09     needs 1,000,000,000 impostor pairs; there are {impostors:,}"
    assert needs in format_evaluation(found)
    result = evaluate_scores(path, options=replace(FAST, slice_fmr=1 / impostors)).results["system"]
    assert len(result.groups) == 2 and len(result.discards) == 1
    path = write(tmp_path / "plain.csv", columns_of(pairs))
    result = evaluate_scores(path, options=replace(FAST, slice_fmr=1e-5)).results["plain"]
    assert not {name for name in (*result.metrics, *result.needs) if name.startswith("slices@")}


def test_a_quality_column_gives_a_discard_curve_and_no_slice(tmp_path):
    pairs = people(np.random.default_rng(0), 60)
    columns = columns_of(pairs, quality=[repr(float(score)) for score in pairs.score_P])
    result = evaluate_scores(write(tmp_path / "system.csv", columns), options=FAST).results["system"]
    (curve,) = result.discards
    assert curve.quality == "quality" and curve.area_ratio < 0.5 and not result.groups
    columns["quality"][4] = "good"
    with pytest.raises(DataError, match="row 6: quality is 'good', not a finite number"):
        evaluate_scores(write(tmp_path / "system.csv", columns), options=FAST)


def test_sorted_pairs_are_dealt_to_the_folds():
    same = np.arange(103) < 50
    order = fold_order(same)
    assert sorted(order) == list(range(103))
    assert all(part.any() and not part.all() for part in np.array_split(same[order], 10))
    mixed = np.arange(103) % 2 == 0
    assert (fold_order(mixed) == np.arange(103)).all()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"score": [1], "same": [1]}, "no column genuine"),
        ({"genuine": [1], "pair": ["a"]}, "either a column score or a column distance"),
        ({"score": [1], "distance": [1], "genuine": [1]}, "either a column score or a column distance"),
        ({"score": [1, "?"], "genuine": [1, 0]}, r"row 3: score is '\?', not a finite number"),
        ({"score": [1, "nan"], "genuine": [1, 0]}, "row 3: score is 'nan'"),
        ({"score": [1, 2], "genuine": [1, "maybe"]}, "row 3: genuine is 'maybe'"),
        ({"score": [1, 2], "genuine": [1, 0], "pair": ["a", "a"]}, "'a' occurs more than once"),
        ({"score": [1, 2], "genuine": [1, 0], "subject_1": ["a", "b"]}, "has a column subject_1 only"),
        (
            {"score": [1, 2], "genuine": [1, 0], "subject_1": ["a", "b"], "subject_2": ["a", "b"]},
            "row 3: genuine is 0, but the people are 'b' and 'b'",
        ),
        ({"score": [], "genuine": []}, "no rows"),
    ],
)
def test_a_wrong_score_file_is_refused_with_its_row_and_column(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        read_scores(write(tmp_path / "system.csv", columns))


def test_a_pair_that_occurs_twice_in_a_long_file_is_found_in_one_pass(tmp_path):
    # Comparing each pair with all others would take minutes.
    pairs = 100_000
    columns = {"score": [0.5] * pairs, "genuine": [0] * pairs, "pair": [*range(pairs - 1), pairs - 2]}
    with pytest.raises(DataError, match="'99998' occurs more than once"):
        read_scores(write(tmp_path / "system.csv", columns))


def test_a_long_pair_list_has_the_cosines_of_all_its_pairs(tmp_path):
    unit = np.random.default_rng(0).normal(size=(9, 4))
    save_embeddings(tmp_path / "a.npz", Embeddings(unit, [str(n) for n in range(9)], np.arange(9)))
    first, second = np.arange(20_000) % 9, np.arange(20_000) * 7 % 9
    columns = {"first": first, "second": second, "genuine": (first == second).astype(int)}
    table = read_scored_pairs(tmp_path / "a.npz", write(tmp_path / "pairs.csv", columns))
    unit = np.float32(unit) / np.linalg.norm(np.float32(unit), axis=1, keepdims=True)
    assert table.scored.score_P == pytest.approx((unit[first] * unit[second]).sum(1), abs=1e-6)


def test_a_table_of_too_many_columns_is_refused_in_a_short_line(tmp_path):
    (tmp_path / "a.csv").write_text("," * 5000)
    with pytest.raises(DataError, match=r"a\.csv: has 5,001 columns; the limit is 1,000$"):
        read_scores(tmp_path / "a.csv")


def test_a_pair_list_that_names_a_missing_or_ambiguous_image_is_refused(tmp_path):
    save_embeddings(tmp_path / "a.npz", Embeddings(np.eye(3), ["x", "y", "y"], np.arange(3)))
    for first, message in (
        ("z", "row 2: the image 'z' has no embedding"),
        ("y", "'y' has more than one embedding"),
    ):
        path = write(tmp_path / "pairs.csv", {"first": [first], "second": ["x"], "genuine": [0]})
        with pytest.raises(DataError, match=message):
            read_scored_pairs(tmp_path / "a.npz", path)


def test_scores_that_do_not_fit_a_set_are_refused(tmp_path):
    target = PairSet("pairs", [b"%d" % n for n in range(8)], np.array([True, False, True, False]))
    path = write(tmp_path / "few.csv", {"score": [1, 0], "genuine": [1, 0]})
    with pytest.raises(DataError, match="2 pairs, but pairs has 4"):
        scores_of_set(path, target)
    path = write(tmp_path / "turned.csv", {"score": [1, 0, 1, 0], "genuine": [0, 1, 0, 1]})
    with pytest.raises(DataError, match="differs from the labels of pairs in 4 pairs, first in pair 0"):
        scores_of_set(path, target)
    save_embeddings(tmp_path / "a.npz", Embeddings(np.eye(3), ["x", "y", "z"], np.arange(3)))
    with pytest.raises(DataError, match="3 embeddings; pairs has 8 images"):
        scores_of_set(tmp_path / "a.npz", target)


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


@pytest.mark.parametrize("groups", ["", ",age_1,age_2"])
def test_a_score_file_without_rows_is_refused(tmp_path, groups):
    (tmp_path / "s.csv").write_text(f"pair,score,genuine{groups}\n")
    with pytest.raises(DataError, match="no rows below the header line"):
        read_scores(tmp_path / "s.csv")
