import csv

import numpy as np
import pytest
from scipy.stats import norm, t

from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.scored_pairs import pair_result
from facetrain.verify.model_comparison import compare_results
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.formatting import format_evaluation, format_p
from facetrain.verify.output.metrics_csv import metrics_csv
from tests.support.scored_people import people


def scored(noise, seed=0, subjects=80):
    pairs = people(np.random.default_rng(seed), subjects)
    moved = pairs.score_P + noise * np.random.default_rng(seed + 1000).normal(size=len(pairs.score_P))
    return pair_result(type(pairs)(moved, *list(vars(pairs).values())[1:]), protocol="x", draws=Draws(300, 0))


def of_gaps(gap_R, difference, subjects):
    """Compare two models that differ by `gap_R` in the draws and by `difference` on the set."""
    first, second = (
        Result("x", {"auc": value}, subjects=subjects, replicates={"auc": replicate_R})
        for value, replicate_R in ((difference, gap_R), (0.0, np.zeros(len(gap_R))))
    )
    return compare_results(first, second)["auc"]


def test_two_models_that_decide_alike_may_differ_by_the_binomial_limit_on_other_people():
    found = compare_results(scored(0), scored(0))
    limit = 1 - 0.025 ** (1 / 80)
    assert {"auc", "eer", "tar@1e-01"} <= found.keys()
    for difference in found.values():
        assert (difference.first - difference.second, difference.p) == (0, 1)
        assert difference.interval == pytest.approx((-limit, limit))
    first, second = (Result("x", {"xnorm": 2.0}, subjects=80, replicates={"xnorm": np.full(9, 2.0)}),) * 2
    length = compare_results(first, second)["xnorm"].interval
    assert length == (0, 0) and not np.signbit(length).any(), "no share of pairs"


@pytest.mark.parametrize(
    ("subjects", "words"),
    [(3, "no interval and no p-value for metrics that rest on 3 subjects"), (8, "rest on 8 sub")],
)
def test_few_people_are_said_and_fewer_than_five_compare_no_models(subjects, words):
    better, worse = scored(0, subjects=subjects), scored(0.3, subjects=subjects)
    found = ModelResults("x", {"set": better}, {}, is_leader=True).compared_with("y", {"set": worse})
    assert bool(better.interval) == bool(found.differences["set"]) == (subjects >= 5)
    lines = list(format_evaluation(found))
    assert [words in line for line in lines].count(True) == 1
    untested = "set, against y: no metric to compare, of at least 5 subjects"
    assert (untested in lines) == (subjects < 5)


def test_the_table_has_the_differences_to_the_other_model():
    found = ModelResults("x", {"set": scored(0)}, {}, is_leader=True).compared_with(
        "=y", {"set": scored(0.15)}
    )
    rows = [row for row in csv.DictReader(metrics_csv(found).splitlines()) if row["column"] == "against"]
    assert [row["metric"] for row in rows] == [*found.differences["set"]]
    for row, pair in zip(rows, found.differences["set"].values(), strict=True):
        numbers = [float(row[key]) for key in ("value", "low", "high")]
        assert numbers == [pair.first - pair.second, *pair.interval]
        assert (row["set"], row["group"], row["remark"]) == ("set", "'=y", f"p {format_p(pair)}")


def test_the_table_is_utf_8_although_a_name_is_not():
    found = ModelResults("x", {"caf\udce9": scored(0)}, {}, is_leader=True).compared_with(
        "r\udce9", {"caf\udce9": scored(0.15)}
    )
    text = metrics_csv(found).encode("utf-8").decode()
    assert {row["set"] for row in csv.DictReader(text.splitlines())} == {r"caf\xe9"}
    assert r",against,r\xe9," in text


def test_a_worse_model_differs_significantly_although_the_intervals_overlap():
    better, worse = scored(0), scored(0.15)
    found = compare_results(better, worse)["auc"]
    assert better.interval["auc"][0] < worse.interval["auc"][1]
    assert found.interval[0] > 0 and found.p < 0.05
    assert found.as_json()["difference"] == pytest.approx(better.metrics["auc"] - worse.metrics["auc"])
    back = compare_results(worse, better)["auc"]
    assert back.interval == pytest.approx((-found.interval[1], -found.interval[0])) and back.p == found.p


@pytest.mark.parametrize("subjects", [5, 8, 20, 60, 1000])
def test_p_is_below_5_percent_exactly_if_the_95_percent_interval_excludes_0(subjects):
    random, seen = np.random.default_rng(subjects), []
    for draws in (1, 20, 39, 200, 1000):
        for _ in range(150):
            # Continuous, of few values as the accuracy is, and equal in all draws.
            difference, grid = random.normal(0, 2.5), random.choice([0, 0.5])
            gap_R = difference + random.choice([0, 0.1], p=[0.1, 0.9]) + random.normal(size=draws)
            if grid:
                gap_R, difference = np.round(gap_R / grid) * grid, np.round(difference / grid) * grid
            found = of_gaps(gap_R, difference, subjects)
            seen.append(found.p < 0.05)
            assert seen[-1] == (found.interval[0] > 0 or found.interval[1] < 0), (draws, found)
            assert 0 < found.p <= 1
            back = of_gaps(-gap_R, -difference, subjects)
            assert back.p == found.p
    assert 0.02 < np.mean(seen) < 0.98


@pytest.mark.parametrize("subjects", [8, 20, 100, 5000])
def test_p_is_that_of_students_t_for_normal_draws(subjects):
    draw_R = norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    for difference in (-2.5, -0.5, 0.1, 1.0, 1.9, 2.2, 2.8):
        # A standard error from the variance of the draws, which is too small by (S − 1) / S.
        expected = 2 * t.sf(abs(difference) * np.sqrt((subjects - 1) / subjects), subjects - 1)
        assert of_gaps(difference + draw_R, difference, subjects).p == pytest.approx(expected, rel=0.05)


def test_a_difference_on_the_other_side_of_0_than_all_draws_is_not_significant():
    found = of_gaps(np.linspace(1, 2, 100), -0.5, 50)
    assert found.interval[0] == -0.5 and found.interval[1] > 0 and found.p == 1


def test_a_p_value_that_the_draws_cannot_show_is_printed_as_a_bound():
    random = np.random.default_rng(0)
    clear, unclear = (of_gaps(random.normal(mean, 1, 200), mean, 100) for mean in (9, 1))
    assert clear.is_bound and not unclear.is_bound
    assert format_p(clear).startswith("< ") and clear.p <= float(format_p(clear)[2:]) < 2 * clear.p
    assert float(format_p(unclear)) == pytest.approx(unclear.p, rel=1e-2)
