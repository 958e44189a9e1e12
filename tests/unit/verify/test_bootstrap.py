from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from scipy.stats import norm, t

from facetrain.distinct import dense_ids
from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.bootstrap import WeightedCurve, draw_subjects, interval
from facetrain.verify.metrics.curve_metrics import CURVE_METRICS, auc, equal_error_rate, tar_at_far
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.fold_accuracy import FoldSearch
from facetrain.verify.metrics.roc import roc
from facetrain.verify.metrics.scored_pairs import (
    ScoredPairs,
    add_fold_accuracy,
    bootstrap_fold_accuracy,
    pair_result,
)
from facetrain.verify.metrics.slices import slice_groups
from facetrain.verify.model_comparison import compare_results
from facetrain.verify.pair_protocol import score_pairs, verification_result
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.sets.subjects import connected_subjects
from tests.support.scored_people import people


def some_pairs(seed=0, pairs=300, subjects=40, decimals=1):
    random = np.random.default_rng(seed)
    same = random.random(pairs) < 0.5
    first = random.integers(0, subjects, pairs)
    second = np.where(same, first, (first + random.integers(1, subjects, pairs)) % subjects)
    # Rounded, so that scores tie within a kind and between both.
    return np.round(random.normal(0.5 * same, 0.4), decimals), same, first, second


def repeated(drawn_S, first, second):
    """Return the indices of the pairs, each as often as the draw counts it."""
    drawn_S = drawn_S.astype(int)
    times = drawn_S[first] * np.where(first == second, 1, drawn_S[second])
    return np.repeat(np.arange(len(first)), times)


@pytest.mark.parametrize("decimals", [1, 8])
def test_the_metrics_of_a_draw_equal_those_of_the_pairs_repeated_one_by_one(decimals):
    score, same, first, second = some_pairs(decimals=decimals)
    curve = WeightedCurve(score, same, first, second)
    for drawn_RS in draw_subjects(40, 20, pairs=0):
        far, tar = curve.rates(drawn_RS)
        for metric in CURVE_METRICS:
            if metric.far < 0.1:
                continue
            for value, drawn_S in zip(metric.formula(far, tar), drawn_RS, strict=True):
                written = repeated(drawn_S, first, second)
                assert value == pytest.approx(metric.of(roc(score[written], same[written])))


def test_the_fold_accuracy_of_a_draw_equals_that_of_loops_over_repeated_pairs():
    score, same, first, second = some_pairs(decimals=8)
    distance = 2 - 2 * score
    search = FoldSearch(distance, same, 10, first, second)
    (drawn_RS,) = draw_subjects(40, 10, pairs=0)
    accuracy, threshold = search.accuracy(drawn_RS)
    fold = np.repeat(np.arange(10), 30)
    for row, drawn_S in enumerate(drawn_RS):
        written = repeated(drawn_S, first, second)
        for number in range(10):
            train, test = written[fold[written] != number], written[fold[written] == number]
            right = [np.count_nonzero((distance[train] < t) == same[train]) for t in np.arange(0, 4, 0.01)]
            best = np.arange(0, 4, 0.01)[int(np.argmax(right))]
            assert threshold[row, number] == best
            assert accuracy[row, number] == pytest.approx(np.mean((distance[test] < best) == same[test]))


def test_a_draw_without_pairs_of_one_kind_has_no_rates():
    score, same = np.array([0.9, 0.8, 0.7]), np.array([True, True, False])
    first, second = np.array([0, 1, 2]), np.array([0, 1, 3])
    curve = bootstrap.WeightedCurve(score, same, first, second)
    # Both kinds; no impostor pair; no genuine pair; nothing at all.
    drawn = np.array([[1, 1, 1, 1], [2, 2, 0, 0], [0, 0, 2, 2], [0, 0, 4, 0]], np.uint16)
    rates = curve.rates(drawn)
    for metric in (auc(*rates), tar_at_far(*rates, far=0.1)):
        np.testing.assert_array_equal(metric, [1, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(equal_error_rate(*rates), [0, np.nan, np.nan, np.nan])


def test_a_draw_without_pairs_has_no_fold_accuracy():
    # Five impostor pairs of ten people, all rejected: many draws have both people of none of them.
    pair = np.arange(5)
    pairs = ScoredPairs(np.full(5, -0.5), np.zeros(5, bool), 2 * pair, 2 * pair + 1, np.arange(10))
    _, replicates = bootstrap_fold_accuracy(pairs, draws=Draws(200))
    accuracy_R = replicates["accuracy"]
    assert np.isnan(accuracy_R).any() and np.nanmin(accuracy_R) == 1
    assert np.isnan(replicates["threshold"]).tolist() == np.isnan(accuracy_R).tolist()
    assert interval(accuracy_R, pairs.subjects, 1.0) == pytest.approx((0.025 ** (1 / 10), 1))


def test_draws_do_not_depend_on_the_number_in_memory_at_once():
    whole = np.concatenate(list(draw_subjects(30, 25, pairs=10)))
    pieces = list(draw_subjects(30, 25, pairs=bootstrap._MAX_WEIGHTS // 4))
    assert max(map(len, pieces)) == 4
    np.testing.assert_array_equal(whole, np.concatenate(pieces))
    assert (whole.sum(1) == 30).all()
    assert not np.array_equal(whole, np.concatenate(list(draw_subjects(30, 25, pairs=10, seed=1))))


@pytest.mark.parametrize("subjects", [5, 20, 1000, 10**6])
def test_the_quantiles_are_those_of_the_t_distribution_and_the_excluded_level_is_their_inverse(subjects):
    low, high = bootstrap.interval_quantiles(subjects)
    expected = norm.cdf(-t.ppf(0.975, subjects - 1) * np.sqrt(subjects / (subjects - 1)))
    assert low == pytest.approx(expected, rel=1e-9) and high == 1 - low
    assert bootstrap.excluded_level(low, subjects) == pytest.approx(0.05, rel=1e-9)
    assert (
        bootstrap.excluded_level(low * 0.999, subjects)
        < 0.05
        < bootstrap.excluded_level(low * 1.001, subjects)
    )
    assert bootstrap.excluded_level(0.5, subjects) == bootstrap.excluded_level(0.9, subjects) == 1


def test_95_percent_of_the_intervals_of_twenty_people_contain_the_value_of_the_population():
    # Rates of single people are as different as normal variables; percentiles alone contain it in 92 % of the sets.
    random, trials, people = np.random.default_rng(0), 1500, 20
    (drawn_RS,) = draw_subjects(people, 400, pairs=0)
    rate_TS = random.normal(0.5, 0.1, (trials, people))
    replicate_TR = rate_TS @ drawn_RS.T / people
    contained = percentiles = 0
    for replicate_R, rate_S in zip(replicate_TR, rate_TS, strict=True):
        low, high = interval(replicate_R, people, rate_S.mean())
        contained += low <= 0.5 <= high
        low, high = np.quantile(replicate_R, [0.025, 0.975])
        percentiles += low <= 0.5 <= high
    # Four standard errors of a share of 95 %.
    assert abs(contained / trials - 0.95) < 4 * np.sqrt(0.95 * 0.05 / trials)
    assert percentiles / trials < 0.93


@pytest.mark.long
@pytest.mark.parametrize(("subjects", "trials"), [(20, 600), (100, 400), (1000, 150)])
def test_the_intervals_of_sets_of_any_size_contain_the_value_of_the_population(subjects, trials):
    # Measured in docs/log/log.md. Intervals may be too wide, because the vertex bootstrap overestimates
    # the variance of pairs of two people, but not too narrow: four standard errors below 95 %.
    random = np.random.default_rng(7)
    truth = pair_result(people(random, 20_000), protocol="x", draws=Draws(0)).metrics
    contained = dict.fromkeys(("auc", "eer", "tar@1e-01"), 0)
    for trial in range(trials):
        found = pair_result(people(random, subjects), protocol="x", draws=Draws(500, trial))
        for name in contained:
            low, high = found.interval[name]
            contained[name] += low <= truth[name] <= high
    assert min(contained.values()) / trials > 0.95 - 4 * np.sqrt(0.95 * 0.05 / trials), contained


def test_an_interval_without_any_error_ends_at_the_binomial_limit_and_includes_its_estimate():
    low, high = interval(np.ones(100), 50, 1.0)
    assert high == 1 and 1 - low == pytest.approx(1 - 0.025 ** (1 / 50))
    assert interval(np.zeros(100), 50, 0.0)[1] == pytest.approx(1 - low)
    assert interval(np.array([np.nan]), 5, 0.5) is None
    assert interval(np.ones(100), 50, 1.0, is_share=False) == (1, 1)
    assert interval(np.linspace(0.4, 0.5, 101), 5, 0.3) == (0.3, pytest.approx(0.4999, abs=1e-5))


@pytest.mark.parametrize("subjects", [1, 2, 4])
def test_fewer_than_five_people_have_no_interval(subjects):
    replicate_R = np.random.default_rng(0).random(100)
    assert interval(replicate_R, subjects, 0.5) is None and interval(replicate_R, 5, 0.5)
    assert interval(np.ones(100), subjects, 1.0) is None


def test_the_intervals_rest_on_the_people_of_the_kind_of_pairs_that_fewer_people_have():
    # Ten people have a genuine pair, two hundred others an impostor pair; there is no error.
    same = np.arange(110) < 10
    first, second = np.arange(110), np.where(same, np.arange(110), np.arange(110) + 100)
    pairs = ScoredPairs(np.where(same, 0.9, 0.1), same, first, second, np.arange(210))
    genuine, impostors = 0.025 ** (1 / 10), 0.025 ** (1 / 200)
    result = pair_result(pairs, protocol="x", draws=Draws(50))
    add_fold_accuracy(result, pairs, draws=Draws(50))
    for name in ("tar@1e-01", "auc", "accuracy"):
        assert result.interval[name] == pytest.approx((genuine, 1))
    assert result.interval["eer"] == pytest.approx((0, 1 - genuine))
    other = pair_result(replace(pairs, score_P=-pairs.score_P, same_P=~same), protocol="x", draws=Draws(50))
    assert other.interval["tar@1e-01"] == pytest.approx((genuine, 1)), "impostor pairs of ten people"
    ((group,), _) = slice_groups(pairs, {"all": np.array(["x"] * 110)}, 0.5, draws=Draws(50))
    assert group.interval["fnmr"] == pytest.approx((0, 1 - genuine))
    assert group.interval["fmr"] == pytest.approx((0, 1 - impostors))


def test_the_spread_of_groups_rests_on_the_group_with_the_fewest_people():
    # All pairs of two images of each of twelve people.
    first, second = np.triu_indices(24, 1)
    score, subject = np.random.default_rng(0).random(len(first)), np.arange(24) // 2
    pairs = ScoredPairs(score, subject[first] == subject[second], first, second, subject)
    for fewest in (4, 5):
        value_P = np.where(subject[second] < fewest, "few", "many")
        groups, (summary,) = slice_groups(pairs, {"group": value_P}, 0.5, draws=Draws(50))
        assert ("fnmr" in groups[0].interval) == ("accuracy_spread" in summary.interval) == (fewest == 5)


def simulated_set(seed):
    """A small set with people who are in several pairs, and the embeddings of a model of any quality."""
    random = np.random.default_rng(seed)
    subjects, count = int(random.choice([8, 20, 60, 200])), int(random.choice([40, 100, 300]))
    _, same, first, second = some_pairs(seed, count, subjects)
    _, subject = np.unique(np.stack([first, second], 1).ravel(), return_inverse=True)
    quality = random.choice([0, 0.1, 0.5, 1, 3, 20])
    center = quality * random.normal(size=(subject.max() + 1, 16))
    pairs = PairSet("simulated", [], same, subject)
    return pairs, *(center[subject] + random.normal(size=(2, 2 * count, 16)))


@pytest.mark.parametrize("seed", range(12))
def test_every_interval_contains_its_estimate(seed):
    pairs, one, other = simulated_set(seed)
    table = {"half": np.where(np.arange(len(pairs.same)) % 2, "a", "b")}
    results = []
    for embedding in (one, other):
        result = verification_result(embedding, embedding, pairs, draws=Draws(100))
        scored = score_pairs(2 * embedding, pairs.same, pairs.subject)
        assert {"accuracy", "auc", "eer", "threshold", "xnorm"} <= set(result.interval)
        groups, _ = slice_groups(scored, table, 0.3, draws=Draws(100))
        for found in (result, *groups):
            for name, (low, high) in found.interval.items():
                assert low <= found.metrics[name] <= high, name
        results.append(result)
    for name, difference in compare_results(*results).items():
        low, high = difference.interval
        assert low <= difference.first - difference.second <= high, name


def test_equal_images_and_genuine_pairs_connect_the_images_of_a_subject():
    image = dense_ids([b"a", b"b", b"b", b"c", b"d", b"e", b"a", b"d"])
    assert image.tolist() == [0, 1, 1, 2, 3, 4, 0, 3]
    same = np.array([True, True, False, False])
    subject = connected_subjects(image[0::2], image[1::2], same, 5)[image]
    a, b, b2, c, d, e, a2, d2 = subject.tolist()
    assert a == b == b2 == c == a2 and d == d2 and len({a, d, e}) == 3


def test_subjects_are_connected_components_also_of_long_chains():
    random, count = np.random.default_rng(0), 200_000
    chain = random.permutation(count // 2)  # of one half of the images, and pairs of the other half
    first, second = (
        np.append(side, random.integers(count // 2, count, count // 5)) for side in (chain[:-1], chain[1:])
    )
    graph = coo_matrix((np.ones(len(first)), (first, second)), (count, count))
    expected = connected_components(graph, directed=False)[1]
    found = connected_subjects(first, second, np.ones(len(first), bool), count)
    both = np.unique(np.stack([found, expected]), axis=1)
    assert both.shape[1] == found.max() + 1 == expected.max() + 1
