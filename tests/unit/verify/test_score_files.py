"""Score files: their metrics, slices and comparison, and the messages for wrong ones."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from facetrain.errors import DataError
from facetrain.verify.evaluate import evaluate_scores
from facetrain.verify.metrics.score_scale import COSINE, scale_of
from facetrain.verify.output.formatting import format_evaluation, format_score
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.protocols import scores_result
from facetrain.verify.score_files import read_scores, scores_of_same_pairs, scores_of_set
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.sets.slice_table import NO_SLICES
from tests.support.scored_people import people

FAST = EvaluationOptions(bootstrap=50)


@pytest.fixture(scope="module")
def pairs():
    return people(np.random.default_rng(0), 60)


def write(path, columns):
    """Write columns of equal length as a table with a header line; return the path."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def columns_of(pairs, **more):
    """Return the columns of scored pairs with the two people of each, and further ones."""
    first, second = pairs.sides
    score = [repr(float(score)) for score in pairs.score_P]
    genuine = pairs.same_P.astype(int)
    return {"score": score, "genuine": genuine, "subject_1": first, "subject_2": second, **more}


def evaluated(path, columns, **options):
    """Return the result of a score file with these columns."""
    (result,) = evaluate_scores(write(path, columns), options=replace(FAST, **options)).results.values()
    return result


def test_a_score_file_gives_the_same_numbers_as_the_scores_themselves(tmp_path, pairs):
    found = evaluated(tmp_path / "system.csv", columns_of(pairs))
    # Subject ids follow the order of the file, so the draws of the bootstrap differ and the metrics do not.
    expected = scores_result(pairs, NO_SLICES, FAST)
    assert found.metrics == expected.metrics and found.threshold == expected.threshold
    assert found.subjects == len(np.unique(np.concatenate(pairs.sides)))
    assert found.metrics.keys() >= {"accuracy", "threshold", "auc", "eer", "tar@1e-01"}
    assert found.scale == COSINE


@pytest.mark.parametrize(("highest", "is_cosine"), [(1 + 2**-23, True), (1.001, False)])
def test_a_cosine_that_float32_rounds_above_one_is_a_cosine(pairs, highest, is_cosine):
    score_P = pairs.score_P.copy()
    score_P[np.argmax(score_P)] = highest
    assert (scale_of(score_P, pairs.same_P) == COSINE) is is_cosine


def test_the_scale_of_the_scores_does_not_change_the_rates(tmp_path, pairs):
    one = evaluated(tmp_path / "cosines.csv", columns_of(pairs))
    columns = columns_of(pairs, score=[repr(float(50 + 50 * score)) for score in pairs.score_P])
    other = evaluated(tmp_path / "percent.csv", columns)
    for name in ("auc", "eer", "tar@1e-01"):
        assert one.metrics[name] == other.metrics[name]
        assert one.interval[name] == pytest.approx(other.interval[name])
    # The thresholds are at ranks instead of in equal steps from −1 to 1.
    assert other.metrics["accuracy"] == pytest.approx(one.metrics["accuracy"], abs=0.02)
    assert other.threshold["eer"] == pytest.approx(50 + 50 * one.threshold["eer"])
    assert other.threshold["accuracy"] == pytest.approx(50 + 50 * one.threshold["accuracy"], abs=2)
    assert "threshold" not in other.metrics, "it is a squared distance of unit vectors"
    assert other.histogram.edge[0] == pairs.score_P.min() * 50 + 50
    assert other.histogram.genuine.sum() == pairs.same_P.sum()


def test_neither_skewed_scores_nor_an_outlier_change_the_accuracy(tmp_path):
    genuine = np.arange(4000) % 2 == 0
    score = np.where(genuine, 6, -6) + 3 * np.random.default_rng(0).normal(size=4000)
    columns = {"genuine": genuine.astype(int)}
    found, skewed, outlier = (
        evaluated(tmp_path / "a.csv", columns | {"score": [repr(one) for one in values.tolist()]})
        for values in (score, np.exp(score), np.where(np.arange(4000) == 8, -99_999, score))
    )
    best = max(np.mean((score >= threshold) == genuine) for threshold in score)
    assert best - 0.004 < found.metrics["accuracy"] == skewed.metrics["accuracy"]
    assert outlier.metrics["accuracy"] == pytest.approx(found.metrics["accuracy"], abs=4 / 4000)


@pytest.mark.parametrize("gap", [20, 0.001])
def test_scores_that_a_threshold_separates_have_accuracy_1(tmp_path, gap):
    genuine = np.arange(200) % 2 == 0
    score = np.random.default_rng(0).uniform(0, 50, 200)
    score[genuine] += gap + score[~genuine].max() - score[genuine].min()
    columns = {"score": [repr(one) for one in score.tolist()], "genuine": genuine.astype(int)}
    result = evaluated(tmp_path / "scores.csv", columns)
    assert result.metrics["accuracy"] == 1 and result.interval["accuracy"][1] == 1
    assert score[~genuine].max() < result.threshold["accuracy"] <= score[genuine].min()
    assert result.histogram.genuine.sum() == result.histogram.impostor.sum() == 100


@pytest.mark.parametrize("digits", [0, 2, 3])
def test_the_threshold_of_the_folds_accepts_what_they_accept(tmp_path, digits):
    random = np.random.default_rng(digits)
    genuine = np.arange(400) % 2 == 0
    score = np.round(np.where(genuine, 0.6, 0.3) + 0.1 * random.normal(size=400), digits or 3)
    score = score if digits else (1000 * score).round()
    columns = {"score": score, "genuine": genuine.astype(int)}
    result = evaluated(tmp_path / "scores.csv", columns)
    accepted = result.scale.distance(score) < result.folds.threshold_F.mean()
    assert np.array_equal(score >= result.threshold["accuracy"], accepted)


def test_negated_distances_below_1_are_not_taken_for_cosines(tmp_path):
    genuine = np.arange(200) % 2
    distance = np.where(genuine, 0.0064, 0.0072) + 0.0003 * np.random.default_rng(0).normal(size=200)
    result = evaluated(tmp_path / "small.csv", {"score": -distance, "genuine": genuine})
    assert result.scale.high == -distance.min() and "threshold" not in result.metrics
    assert result.metrics["accuracy"] > 0.85, "the thresholds lie between the distances"


def test_two_systems_are_compared_pair_by_pair(tmp_path, pairs):
    first = write(tmp_path / "one.csv", columns_of(pairs))
    rows = columns_of(replace(pairs, score_P=np.clip(pairs.score_P + 0.2 * pairs.same_P, -1, 1)))
    found = evaluate_scores(first, against=write(tmp_path / "other.csv", rows), options=FAST)
    difference = found.differences["one"]["auc"]
    assert difference.second > difference.first and difference.interval[1] < 0
    assert found.other_results["one"].metrics["auc"] == difference.second
    # Two rows of one kind exchanged.
    one, other = np.flatnonzero(pairs.same_P)[:2]
    order = np.arange(len(pairs.same_P))
    order[[one, other]] = other, one
    exchanged = columns_of(pairs.take(order))
    with pytest.raises(DataError, match=rf"other\.csv: the people differ .*one\.csv, first in pair {one}\b"):
        evaluate_scores(first, against=write(tmp_path / "other.csv", exchanged), options=FAST)
    del rows["subject_1"], rows["subject_2"]
    rows["genuine"][3] = 1 - rows["genuine"][3]
    with pytest.raises(DataError, match=r"other\.csv: genuine .*one\.csv .*pair 3\b"):
        evaluate_scores(first, against=write(tmp_path / "other.csv", rows), options=FAST)


@pytest.mark.parametrize("score", [[1e17] * 4, [0.9, 0.8, 0.1, -np.finfo(np.float64).max]])
def test_scores_of_any_size_have_thresholds(tmp_path, score):
    path = write(tmp_path / "a.csv", {"score": [repr(float(one)) for one in score], "genuine": [1, 1, 0, 0]})
    scored = read_scores(path).scored
    distance = scored.scale.distance(scored.score_P)
    assert (distance >= 0).all() and (distance <= 4).all() and (np.diff(distance) >= 0).all()
    assert scored.scale.score(4.0) == scored.scale.low


def test_slices_at_an_fmr_that_the_impostor_pairs_cannot_show_are_left_out(tmp_path, pairs):
    columns = columns_of(pairs, skin=["dark", "light"] * (len(pairs.same_P) // 2))
    columns["quality"] = np.arange(len(pairs.same_P))
    path, impostors = write(tmp_path / "system.csv", columns), np.count_nonzero(~pairs.same_P)
    found = evaluate_scores(path, options=replace(FAST, slice_fmr=1e-9))
    result = found.results["system"]
    assert not result.groups and not result.discards and result.metrics["slices@1e-09"] is None
    other = evaluated(path, columns, slice_fmr=1e-4)
    assert {"slices@1e-04", "tar@1e-04"} <= other.needs.keys()
    assert "slices@1.5e-09" in evaluated(path, columns, slice_fmr=1.5e-9).needs
    lines = [line for line in format_evaluation(found) if f"impostor pairs; there are {impostors:,}" in line]
    assert len(lines) == 1 and lines[0].endswith("slices@1e-09"), (
        "one line for all rates that the set cannot show"
    )
    result = evaluated(path, columns, slice_fmr=1 / impostors)
    assert len(result.groups) == 2 and len(result.discards) == 1
    result = evaluated(tmp_path / "plain.csv", columns_of(pairs), slice_fmr=1e-5)
    assert not {name for name in (*result.metrics, *result.needs) if name.startswith("slices@")}


@pytest.mark.parametrize("genuine", [0, 1])
def test_pairs_of_one_kind_have_no_auc_no_accuracy_and_no_slices(tmp_path, genuine):
    columns = {
        "score": np.arange(40),
        "genuine": [genuine] * 40,
        "sex": ["f", "m"] * 20,
        "quality": range(40),
    }
    path = write(tmp_path / "system.csv", columns)
    found = evaluate_scores(path, options=FAST)
    result, reason = found.results["system"], "needs genuine and impostor pairs; all pairs are of one kind"
    assert f"  auc              {reason}; also left out: accuracy, slices" in format_evaluation(found)
    assert result.needs == dict.fromkeys(("auc", "accuracy", "slices"), reason)
    assert not result.available_metrics.keys() - {"pairs", "genuine", "impostors"}
    assert (
        not result.groups
        and not result.discards
        and json.loads(json.dumps(result.as_json()))["folds"] is None
    )
    result = evaluated(path, columns, slice_fmr=0.1)
    assert not result.groups and result.metrics["slices@1e-01"] is None
    assert result.needs == dict.fromkeys(("auc", "accuracy", "slices@1e-01"), reason)


def test_thresholds_of_likelihood_ratios_are_shown_with_their_digits(tmp_path):
    ratios = [repr(1e-9 * (1 + n % 10 + 5 * (n % 2))) for n in range(40)]
    columns = {"score": ratios, "genuine": [n % 2 for n in range(40)], "sex": ["f", "m"] * 20}
    found = evaluate_scores(write(tmp_path / "s.csv", columns), options=FAST)
    (result,) = found.results.values()
    assert f"{result.threshold['slices']:.6g}".endswith("e-09")
    assert f"slices at score >= {result.threshold['slices']:.6g}: " in "\n".join(format_evaluation(found))
    assert format_score(result, 1.23456789e-7) == "1.23457e-07"
    assert format_score(replace(result, scale=COSINE), 0.123456) == "0.1235"


def test_a_quality_column_gives_a_discard_curve_and_no_slice(tmp_path, pairs):
    columns = columns_of(pairs, quality=[repr(float(score)) for score in pairs.score_P])
    result = evaluated(tmp_path / "system.csv", columns)
    (curve,) = result.discards
    assert curve.quality == "quality" and curve.area_ratio < 0.5 and not result.groups


TWO = {"score": [1, 2], "genuine": [1, 0]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"score": [1], "same": [1]}, "no column genuine"),
        ({"genuine": [1], "name": ["a"]}, r"needs a column score, .* the columns are genuine, name"),
        ({"score": [1, "?"], "genuine": [1, 0]}, r"line 3: score is '\?', not a finite number; 1 of 2 rows have no"),
        ({"score": [1, "1_0"], "genuine": [1, 0]}, r"line 3: score is '1_0', not a finite number"),
        ({"score": [1, 2], "genuine": [1, "maybe"]}, "line 3: genuine is 'maybe'"),
        (TWO | {"subject_1": ["a", "b"]}, "has only one of the columns subject_1 and subject_2"),
        (TWO | {"subject_1": "ab", "subject_2": "ab"}, "line 3: genuine is 0, but the people are 'b' and 'b'"),
        (TWO | {"subject_1": ["a", "b"], "subject_2": ["a", ""]}, "line 3: subject_2 is empty; name every person"),
        (TWO | {"quality": ["1", "good"]}, "line 3: quality is 'good', not a finite number"),
        (TWO | {"sex": "ab", "sex_1": "ab", "sex_2": "ab"}, "the columns sex, sex_1 and sex_2; rename the first"),
        ({"score": [], "genuine": []}, "no rows below the header line"),
        ({"score": [], "genuine": [], "age_1": [], "age_2": []}, "no rows below the header line"),
    ],
)  # fmt: skip
def test_a_wrong_score_file_is_refused_with_its_row_and_column(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        read_scores(write(tmp_path / "system.csv", columns))


def test_columns_without_a_partner_are_slices_of_their_own(tmp_path):
    sides = {"age_1": "xy", "age_2": "xz", "skin_1": "ab", "_1": "ab", "_2": "cd"}
    found = read_scores(write(tmp_path / "s.csv", {"score": [1, 2], "genuine": ["True", "FALSE"]} | sides))
    assert found.slices.columns.keys() == {"age", "skin_1", "_1", "_2"} and found.slices.sides.keys() == {
        "age"
    }
    assert found.scored.same_P.tolist() == [True, False]


def test_a_second_system_has_the_scale_of_its_own_scores(tmp_path):
    table, other = (
        read_scores(write(tmp_path / f"{high}.csv", {"score": [high, 0], "genuine": [1, 0]}))
        for high in (1, 99)
    )
    found = scores_of_same_pairs(table, other)
    assert found.scale == other.scored.scale != table.scored.scale


def test_scores_whose_difference_no_number_can_hold_are_refused(tmp_path):
    path = write(tmp_path / "s.csv", {"score": [1e308, -1e308], "genuine": [1, 0]})
    with pytest.raises(DataError, match=r"s\.csv: column score"):
        read_scores(path)


def test_scores_that_do_not_fit_a_set_are_refused(tmp_path):
    target = PairSet("pairs", [b"%d" % n for n in range(8)], np.array([True, False, True, False]))
    for count in (2, 6):
        path = write(
            tmp_path / "count.csv", {"score": [1, 0] * (count // 2), "genuine": [1, 0] * (count // 2)}
        )
        with pytest.raises(DataError, match=f"{count} pairs, but pairs has 4"):
            scores_of_set(path, target)
    path = write(tmp_path / "turned.csv", {"score": [1, 0, 1, 0], "genuine": [0, 1, 0, 1]})
    with pytest.raises(DataError, match=r"\b4 pairs.*pair 0\b"):
        scores_of_set(path, target)
    # A file with names for the numbers of the people, and one with its genuine rows exchanged.
    unknown, target = target, replace(target, subject=np.array([0, 0, 1, 2, 2, 2, 0, 3]))
    columns = {"score": [1, 0, 1, 0], "genuine": [1, 0, 1, 0]}
    columns |= {"subject_1": ["d", "c", "a", "d"], "subject_2": ["d", "a", "a", "b"]}
    path = write(tmp_path / "named.csv", columns)
    assert scores_of_set(path, target).subject_N is target.subject
    assert len(scores_of_set(path, unknown).subject_N) == 8
    columns |= {"subject_1": ["a", "c", "d", "d"], "subject_2": ["a", "a", "d", "b"]}
    with pytest.raises(
        DataError, match=r"other\.csv: the people differ from those of pairs, first in pair 1\b"
    ):
        scores_of_set(write(tmp_path / "other.csv", columns), target)
