import csv
import json

import numpy as np
import pytest

from facetrain.errors import DataError
from facetrain.verify.metrics.cross_groups import cross_groups
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.group_summary import RATES, summarize_groups, without_chance
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.scored_pairs import ScoredPairs, pair_result
from facetrain.verify.metrics.slices import add_slices, slice_groups
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.formatting import format_evaluation, format_number, format_slice_threshold
from facetrain.verify.output.metrics_csv import metrics_csv
from facetrain.verify.sets.slice_table import pair_values, read_slice_table
from tests.support.scored_people import people


def write(path, names, rows):
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def read(tmp_path, names, rows, pairs):
    """Read a table of slices for impostor pairs."""
    return read_slice_table(write(tmp_path / "t.csv", names, rows), np.zeros(pairs, bool))


def test_all_groups_share_one_threshold():
    pairs = people(np.random.default_rng(0), 60)
    value = np.random.default_rng(1).choice(["dark", "light"], len(pairs.same_P))
    groups, _ = slice_groups(pairs, {"light": value}, 0.6, draws=Draws(100))
    assert [group.value for group in groups] == ["dark", "light"]
    for group in groups:
        score, same = pairs.score_P[value == group.value], pairs.same_P[value == group.value]
        assert group.metrics["fmr"] == pytest.approx(np.mean(score[~same] >= 0.6))
        assert group.metrics["fnmr"] == pytest.approx(np.mean(score[same] < 0.6))
        assert group.metrics["accuracy"] == pytest.approx(np.mean((score >= 0.6) == same))
        assert (group.metrics["pairs"], group.metrics["genuine"]) == (len(same), same.sum())


def test_the_summary_of_groups_is_what_a_plain_loop_over_them_finds():
    pairs = people(np.random.default_rng(0), 80)
    value = np.random.default_rng(1).choice(["a", "b", "c", "a / b"], len(pairs.same_P))
    value = np.where(pairs.same_P & (value == "a / b"), "a", value)
    groups, (summary,) = slice_groups(pairs, {"group": value}, 0.6, draws=Draws(100))
    errors, rates = [], {"fmr": [], "fnmr": []}
    for name in "abc":
        score, same = pairs.score_P[value == name], pairs.same_P[value == name]
        errors.append(np.mean((score >= 0.6) != same))
        rates["fmr"].append(np.mean(score[~same] >= 0.6))
        rates["fnmr"].append(np.mean(score[same] < 0.6))
    expected = {
        "accuracy_mean": 1 - np.mean(errors),
        "accuracy_spread": np.std(errors, ddof=1),
        "skewed_error_ratio": max(errors) / min(errors),
    }
    for name, rate in rates.items():
        expected[f"{name}_worst_to_mean"] = max(rate) / np.prod(rate) ** (1 / 3)
        expected[f"{name}_worst_to_best"] = max(rate) / min(rate)
        gaps = sum(abs(one - other) for one in rate for other in rate)
        expected[f"{name}_gini"] = gaps / (2 * 9 * np.mean(rate)) * 3 / 2
    assert summary.metrics == pytest.approx(expected) and len(groups) == 4
    assert summary.interval.keys() == expected.keys()
    for name, (low, high) in summary.interval.items():
        assert low <= summary.metrics[name] <= high


def test_a_ratio_that_is_1_in_every_draw_has_no_binomial_limit():
    pairs = people(np.random.default_rng(0), 40)
    value = np.random.default_rng(1).choice(["a", "b"], len(pairs.same_P))
    # No genuine pair is accepted, so that the FNMR of both groups is 1.
    _, (summary,) = slice_groups(pairs, {"group": value}, 1.1, draws=Draws(50))
    assert summary.interval["fnmr_worst_to_best"] == (1, 1)
    assert summary.interval["fnmr_gini"] == (0, 0)


@pytest.mark.parametrize("harder", [0.0, 0.4])
def test_the_intervals_of_differences_contain_equal_groups_if_the_groups_are_equal(harder):
    equal = {"accuracy_spread": 0, "skewed_error_ratio": 1, "fnmr_worst_to_best": 1, "fnmr_gini": 0}
    excluded, sets = dict.fromkeys(equal, 0), 10
    for seed in range(sets):
        random = np.random.default_rng(seed)
        pairs = people(random, 60)
        group = random.choice(["a", "b", "c", "d"], len(pairs.same_P))
        pairs.score_P[(group == "d") & pairs.same_P] -= harder
        pairs.score_P[(group == "d") & ~pairs.same_P] += harder
        _, (summary,) = slice_groups(pairs, {"group": group}, 0.6, draws=Draws(100))
        for name, value in equal.items():
            low, high = summary.interval[name]
            excluded[name] += not low <= value <= high
    # The quantiles of the draws alone exclude them in all sets.
    assert min(excluded.values()) == sets if harder else max(excluded.values()) == 0, excluded


def test_the_spread_of_draws_is_on_average_that_of_the_groups_among_all_people():
    random, spread, chance = np.random.default_rng(0), 0.03, 0.02
    squares = []
    for _ in range(200):
        rate_V = 0.5 + random.normal(0, spread, 8) + random.normal(0, chance, 8)  # chance of the set
        drawn_RV = rate_V + random.normal(0, chance, (50, 8))
        squares.append(without_chance(drawn_RV, rate_V).var(1, ddof=1).mean())
    assert np.mean(squares) == pytest.approx(spread**2, rel=0.1)
    without_a_group_RV = np.vstack([drawn_RV, np.append(rate_V[1:], np.nan)])
    np.testing.assert_array_equal(
        without_chance(without_a_group_RV, rate_V), without_chance(drawn_RV, rate_V)
    )


def test_published_accuracies_give_the_published_spread():
    # ArcFace (ResNet-34) on RFW: Wang and Deng, CVPR 2020: mean 94.64, standard deviation 1.11, error ratio 1.65.
    accuracy = np.array([[0.9618, 0.9467, 0.9372, 0.9398]])
    found = summarize_groups(dict.fromkeys(("accuracy", "fmr", "fnmr"), accuracy))
    assert found["accuracy_mean"][0] == pytest.approx(0.9464, abs=1e-4)
    assert found["accuracy_spread"][0] == pytest.approx(0.0111, abs=1e-4)
    assert found["skewed_error_ratio"][0] == pytest.approx(1.65, abs=0.01)


def test_equal_rates_do_not_differ_by_a_rounding():
    found = summarize_groups(dict.fromkeys(RATES, np.full((1, 3), 0.1)))
    assert found["accuracy_spread"] == found["fmr_gini"] == 0 and found["fmr_worst_to_mean"] == 1


def test_without_errors_in_one_group_there_is_no_ratio():
    rates = {"accuracy": [1.0, 0.9], "fmr": [0, 0.1], "fnmr": [0, 0.1]}
    found = summarize_groups({name: np.array([rate]) for name, rate in rates.items()})
    assert np.isnan(found["skewed_error_ratio"][0]) and np.isnan(found["fmr_worst_to_mean"][0])


def test_a_group_without_impostors_has_no_false_match_rate():
    pairs = people(np.random.default_rng(0), 30)
    kinds = {"kind": np.where(pairs.same_P, "same", "other")}
    groups, summaries = slice_groups(pairs, kinds, 0.5, draws=Draws(20))
    other, same = groups
    assert not summaries, "no two groups with genuine and impostor pairs"
    assert (other.metrics["fnmr"], same.metrics["fmr"]) == (None, None)
    assert "fmr" in other.interval and "fmr" not in same.interval
    json.dumps([group.as_json() for group in groups], allow_nan=False)


def test_a_pair_of_images_has_their_common_value_or_both_and_the_quality_of_the_worse_one(tmp_path):
    found = read(
        tmp_path, ["sex", "quality"], [("f", 3), ("f", 1), ("m", 2), ("f", 5), ("f", 4), ("m", 6)], 3
    )
    assert found.columns.keys() == {"sex"} and found.columns["sex"].tolist() == ["f", "f / m", "f / m"]
    assert found.quality.tolist() == [1, 2, 4]


def test_a_table_of_images_gives_the_subjects(tmp_path):
    found = read(tmp_path, ["subject", "sex"], [[70 + n % 13, "f"] for n in range(40)], 20)
    assert found.subject.tolist() == [n % 13 for n in range(40)] and found.columns.keys() == {"sex"}
    with pytest.raises(DataError, match="40 images"):
        read(tmp_path, ["subject"], [[n] for n in range(20)], 20)


def test_subjects_that_contradict_the_labels_are_refused_with_the_line(tmp_path):
    table = write(tmp_path / "t.csv", ["subject"], [[name] for name in "abccde"])
    assert read_slice_table(table, np.array([False, True, False])).subject.tolist() == [0, 1, 2, 2, 3, 4]
    message = "t.csv, line 4: the column subject contradicts the label of pair 1, which shows two people; "
    with pytest.raises(DataError, match=message):
        read_slice_table(table, np.zeros(3, bool))


def test_images_without_a_name_are_not_taken_for_one_person(tmp_path):
    rows = [[name, "f"] for name in ("a", "b", "c", "")]
    with pytest.raises(DataError, match="line 5: the column subject is empty; name every person"):
        read(tmp_path, ["subject", "sex"], rows, 2)


@pytest.mark.parametrize("values", [500, 501])
def test_a_column_of_up_to_500_values_is_a_slice(tmp_path, capsys, values):
    found = read(tmp_path, ["x", "y"], [[number, "a"] for number in range(values)], values)
    assert found.columns.keys() == ({"x", "y"} if values == 500 else {"y"})
    assert ("the column x has" in capsys.readouterr().err) == (values == 501)


@pytest.mark.parametrize("rows", [1, 4, 7])
def test_a_table_that_does_not_fit_is_refused(tmp_path, rows):
    with pytest.raises(DataError, match=rf"\b{rows} rows.*\b3 pairs.*\b6 images"):
        read(tmp_path, ["x"], [["a"]] * rows, 3)
    with pytest.raises(DataError, match="No such file"):
        read_slice_table(tmp_path / "none.csv", np.zeros(3, bool))


def test_very_many_pairs_of_values_are_one_slice_and_the_values_themselves_stay(tmp_path, capsys):
    ages = np.random.default_rng(0).integers(0, 60, 8000)
    found = read(tmp_path, ["age", "sex"], [[age, "fm"[age % 2]] for age in ages], 4000)
    alike = {str(first) for first, second in zip(ages[0::2], ages[1::2], strict=True) if first == second}
    assert set(found.columns["age"]) == {*alike, "two values"} and len(alike) > 30
    assert set(found.columns["sex"]) == {"f", "m", "f / m"} and not capsys.readouterr().err


def test_values_of_two_groups_are_no_part_of_the_spread():
    pairs = people(np.random.default_rng(0), 80)
    sides = tuple(
        np.random.default_rng(n).choice(["1", "2", "3"], len(pairs.same_P)).astype(object) for n in (1, 2)
    )
    value_P = pair_values(*sides)
    result = pair_result(pairs, protocol="verification", draws=Draws(20))
    add_slices(result, pairs, {"age": value_P}, {}, sides={"age": sides}, fmr=0.1, draws=Draws(20))
    accepted = pairs.score_P[~pairs.same_P] >= result.as_json()["thresholds"]["slices"]
    (line,) = format_slice_threshold(result)
    assert f"FMR {accepted.mean():.3%} of all impostor pairs" in line
    assert line.endswith(f"rests on {accepted.sum()} false accepts, fewer than 30") and accepted.sum() > 1
    right = sum(group.metrics["accuracy"] * group.metrics["pairs"] for group in result.groups)
    is_right_P = (pairs.score_P >= result.threshold["slices"]) == pairs.same_P  # one pair has the threshold
    assert right == pytest.approx(is_right_P.sum())
    alone = np.isin(value_P, ["1", "2", "3"])
    assert len(result.groups) == 6 and pairs.same_P[~alone].any(), "of images, not of people"
    rates = {
        name: np.array([[group.metrics[name] for group in result.groups if len(group.value) == 1]])
        for name in RATES
    }
    expected = {
        name: None if np.isnan(value[0]) else value[0] for name, value in summarize_groups(rates).items()
    }
    (summary,) = result.group_summaries
    assert {name: summary.metrics[name] for name in expected} == pytest.approx(expected)


def test_pairs_with_an_empty_value_are_in_no_group(tmp_path, capsys):
    pairs = people(np.random.default_rng(0), 60)
    group = np.random.default_rng(1).choice(["a", "b"], 2 * len(pairs.same_P))
    group[[0, 7, 20]] = ""
    rows = [[group_, "", "" if n < 3 else n] for n, group_ in enumerate(group)]
    found = read(tmp_path, ["skin", "camera", "image"], rows, len(pairs.same_P))
    printed = capsys.readouterr().err
    assert (
        f"the column skin is empty in 3 of {len(rows):,} rows" in printed and printed.count("empty in") == 2
    )
    known = np.delete(np.arange(len(pairs.same_P)), [0, 3, 10])
    results = []
    for scored, taken in ((pairs, np.arange(len(pairs.same_P))), (pairs.take(known), known)):
        result = pair_result(pairs, protocol="verification", draws=Draws(0))
        columns = {name: value_P[taken] for name, value_P in found.columns.items()}
        sides = {name: tuple(side[taken] for side in both) for name, both in found.sides.items()}
        add_slices(result, scored, columns, {}, sides=sides, fmr=0.1, draws=Draws(20))
        results.append(result)
    one, other = results
    assert [group.value for group in one.groups] == ["a", "a / b", "b"] and one.groups == other.groups
    assert one.group_summaries == other.group_summaries
    assert [matrix.as_json() for matrix in one.cross_groups] == [
        matrix.as_json() for matrix in other.cross_groups
    ]


def test_a_column_of_ids_is_ignored_and_said(tmp_path, capsys):
    found = read(tmp_path, ["file", "sex"], [[f"{n}.jpg", "fm"[n % 2]] for n in range(1200)], 600)
    assert found.columns.keys() == found.sides.keys() == {"sex"}
    assert "the column file has 1,200 different values" in capsys.readouterr().err


def test_the_cross_group_matrix_is_what_a_loop_over_the_pairs_finds():
    pairs = people(np.random.default_rng(0), 60)
    group_N = np.random.default_rng(1).choice(["a", "b", "c"], len(pairs.subject_N)).astype(object)
    sides = group_N[pairs.first_P], group_N[pairs.second_P]
    found = cross_groups(pairs.score_P, pairs.same_P, sides, 0.5, "group")
    for row, one in enumerate("abc"):
        for column, other in enumerate("abc"):
            scores = [
                score
                for score, same, *both in zip(pairs.score_P, pairs.same_P, *sides, strict=True)
                if not same and sorted(both) == sorted((one, other))
            ]
            assert found.impostors_VV[row, column] == len(scores)
            assert found.fmr_VV[row, column] == pytest.approx(np.mean(np.array(scores) >= 0.5))
    content = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert content["groups"] == ["a", "b", "c"] and len(content["fmr"]) == 3


@pytest.mark.parametrize(("groups", "has_matrix"), [(1, False), (2, True), (50, True), (51, False)])
def test_a_column_has_a_matrix_if_it_groups_people(groups, has_matrix):
    side = np.array([str(group) for group in range(groups)], object)
    found = cross_groups(np.ones(groups), np.zeros(groups, bool), (side, side), 0.5, "x")
    assert (found is not None) == has_matrix


def test_a_false_match_rate_that_is_not_0_is_not_shown_as_0():
    assert [format_number("fmr", rate) for rate in (0, 4e-6, 9.9e-5, 2e-4)] == [
        "0.000%",
        "4.0e-06",
        "9.9e-05",
        "0.020%",
    ]


def test_a_rate_close_to_0_or_1_is_not_shown_as_0_or_100_percent():
    shown = {
        0.0: "0.00%", 0.25: "25.00%", 0.9984: "99.84%", 0.99917: "99.917%", 1 - 1e-5: "99.9990%",
        1 - 6e-8: "99.9999940%", 1.0: "100.00%", 1 - 1e-15: "100.00%", 1e-6: "0.00010%", -0.00012: "-0.012%",
    }  # fmt: skip
    assert {rate: format_number("accuracy", rate) for rate in shown} == shown


@pytest.mark.parametrize("metric", ["accuracy", "fmr", "auc", "fmr_gini", "xnorm"])
def test_a_difference_that_rounds_to_zero_has_no_sign(metric):
    assert "-" not in format_number(metric, -0.0)
    assert metric == "fmr" or "-" not in format_number(metric, -1e-10)


def test_a_cell_without_pairs_has_no_rate():
    sides = np.array(["a", "a"], object), np.array(["b", "a"], object)
    found = cross_groups(np.ones(2), np.zeros(2, bool), sides, 1, "x")  # the threshold itself is accepted
    assert np.isnan(found.fmr_VV[1, 1]) and found.as_json()["fmr"] == [[1.0, 1.0], [1.0, None]]


def test_error_rates_and_the_lowest_rate_that_a_set_supports_follow_from_the_curve():
    pairs = people(np.random.default_rng(0), 3000)
    result = pair_result(pairs, protocol="verification", draws=Draws(10))
    content = result.as_json()
    for digit in (1, 2, 3):
        tar, fnmr = f"tar@1e-0{digit}", f"fnmr@1e-0{digit}"
        assert content[fnmr] == 1 - content[tar]
        assert content["intervals"][fnmr] == tuple(1 - end for end in reversed(content["intervals"][tar]))
    assert content["fnmr@1e-06"] is None
    impostors = int((~pairs.same_P).sum())
    assert content["fmr_limits"] == {"lowest": 1 / impostors, "rule_of_30": 30 / impostors}
    results = ModelResults("x", {"set": result}, {}, is_leader=True)
    printed = "\n".join(format_evaluation(results))
    assert "fnmr@1e-02 " in printed and "lowest FMR" in printed and "1.1e-04" in printed
    rows = list(csv.DictReader(metrics_csv(results).splitlines()))
    by_metric = {row["metric"]: row for row in rows}
    assert float(by_metric["fnmr@1e-02"]["value"]) == content["fnmr@1e-02"]
    for name in ("tar@1e-06", "fnmr@1e-06"):
        assert by_metric[name]["value"] == "" and "needs 1,000,000 " in by_metric[name]["needs"]
        assert content["needs"][name] == by_metric[name]["needs"]
    for name in ("tar@1e-03", "fnmr@1e-03"):
        assert content["remarks"][name] == by_metric[name]["remark"] == result.remark("tar@1e-03") != ""
    assert content["remarks"].keys() == {"tar@1e-03", "fnmr@1e-03"}


@pytest.mark.parametrize(
    ("impostors", "rate", "known"),
    [
        (40, 0.75, "known to ± 30 % from 7.5e-01 on"),
        (30, 1.0, "too few to know a rate to ± 30 %"),
        (29, None, "too few to know a rate to ± 30 %"),
    ],
)
def test_fewer_than_30_impostor_pairs_show_no_rate_to_30_percent(impostors, rate, known):
    same_P = np.arange(40 + impostors) < 40
    score_P, image_P = np.random.default_rng(0).normal(size=len(same_P)), np.arange(len(same_P))
    pairs = ScoredPairs(score_P, same_P, image_P, image_P, image_P)
    result = pair_result(pairs, protocol="verification", draws=Draws(0))
    assert result.as_json()["fmr_limits"]["rule_of_30"] == rate
    printed = "\n".join(format_evaluation(ModelResults("x", {"set": result}, {}, is_leader=True)))
    assert f"one of {impostors} impostor pairs; {known}" in printed


def test_a_result_is_valid_json_with_a_short_curve():
    pairs = people(np.random.default_rng(0), 3000)
    result = pair_result(pairs, protocol="verification", draws=Draws(10))
    found = json.loads(json.dumps(result.as_json(), allow_nan=False))
    curve = found["curve"]
    assert len(curve["far"]) == len(curve["tar"]) == len(curve["threshold"]) <= 512
    assert curve["far"] == sorted(curve["far"]) and (curve["far"][-1], curve["tar"][-1]) == (1, 1)
    # The thinned curve keeps the low rates, so its area is that of all points.
    assert np.trapezoid(curve["tar"], curve["far"]) == pytest.approx(found["auc"], abs=1e-3)
    assert found["tar@1e-06"] is None and "needs 1,000,000" in found["needs"]["tar@1e-06"]
    # Of 9,000 impostor pairs. The scores have few digits: the threshold accepts fewer than the limit allows.
    accepts = (pairs.score_P[~pairs.same_P] >= result.threshold["1e-03"]).sum()
    assert accepts == 8 and [result.remark(f"tar@1e-0{digit}") for digit in (1, 2, 3)] == [
        "", "", "uncertain: rests on 8 false accepts, fewer than 30",
    ]  # fmt: skip
    assert Result("x", {}).as_json()["curve"] is None
