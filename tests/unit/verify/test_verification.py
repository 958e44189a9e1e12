from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from scipy.optimize import brentq
from sklearn.metrics import roc_auc_score, roc_curve

from facetrain.data.pair_folds import fold_order
from facetrain.embeddings.normalization import l2_normalize
from facetrain.verify.metrics.curve_metrics import auc, equal_error_rate, tar_at_far, value_of
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.fold_accuracy import THRESHOLDS, fold_accuracy, grid_roc, squared_distances
from facetrain.verify.metrics.result import thin_curve
from facetrain.verify.metrics.roc import can_measure, eer_threshold, least_impostors, roc, threshold_at
from facetrain.verify.metrics.scored_pairs import ScoredPairs, hardest_pairs, histogram
from facetrain.verify.pair_protocol import rising_metrics, score_pairs, verification_result
from facetrain.verify.sets.pair_set import PairSet


def scores(pairs=300, seed=0, decimals=2):
    random = np.random.default_rng(seed)
    same = random.random(pairs) < 0.5
    # Rounded: some scores are equal, and some are exactly on a threshold of the grid.
    return np.round(random.normal(2.2 - 0.8 * same, 0.5).clip(0, 4), decimals), same


def result_of(embedding, same):
    pairs = PairSet("set", [], same, subject=np.arange(2 * len(same)))
    return verification_result(embedding, embedding, pairs, draws=Draws(0))


def metrics_of(embedding, same):
    return result_of(embedding, same).available_metrics


def test_pairs_are_discarded_by_the_length_of_the_sum_of_image_and_mirror_image():
    plain, mirrored = np.random.default_rng(0).normal(size=(2, 80, 4))
    same = np.arange(40) % 2 == 0
    pairs = PairSet("set", [], same, subject=np.arange(80))
    (curve,) = verification_result(plain, mirrored, pairs, draws=Draws(0)).discards
    length = np.sqrt(((plain + mirrored) ** 2).sum(1)).reshape(40, 2).min(1)
    np.testing.assert_allclose(curve.min_quality, np.sort(length[same]))


def accuracy_by_double_loop(distance, same, folds=10):
    parts = np.array_split(np.arange(len(same)), folds)
    accuracy, thresholds = [], []
    for part in parts:
        train = np.setdiff1d(np.arange(len(same)), part)
        right = [np.mean((distance[train] < t) == same[train]) for t in THRESHOLDS]
        best = THRESHOLDS[int(np.argmax(right))]
        thresholds.append(best)
        accuracy.append(np.mean((distance[part] < best) == same[part]))
    return accuracy, thresholds


@pytest.mark.parametrize(("pairs", "seed"), [(300, 0), (600, 1), (123, 2), (10, 3)])
def test_the_cumulative_search_equals_the_loop_over_folds_and_thresholds(pairs, seed):
    distance, same = scores(pairs, seed)
    accuracy, thresholds = accuracy_by_double_loop(distance, same)
    found = fold_accuracy(distance, same)
    np.testing.assert_array_equal(found.accuracy_F, accuracy)
    np.testing.assert_array_equal(found.threshold_F, thresholds)
    assert found.std == pytest.approx(np.sqrt(np.mean((accuracy - np.mean(accuracy)) ** 2)))


@pytest.mark.parametrize("genuine", [10, 50, 95])
def test_the_accuracy_of_a_set_does_not_suffer_from_an_order_by_kind(genuine):
    same = np.arange(105) < genuine
    order = fold_order(same)
    assert sorted(order) == list(range(105))
    assert all(part.any() and not part.all() for part in np.array_split(same[order], 10))
    embedding = np.random.default_rng(0).normal(size=(210, 4)) * 0.3 + [1, 0, 0, 0]
    embedding[1::2][~same] += [0, 1, 0, 0]
    images = order.repeat(2) * 2 + np.tile([0, 1], 105)
    given, ordered = result_of(embedding, same), result_of(embedding[images], same[order])
    assert given.available_metrics == pytest.approx(ordered.available_metrics)
    np.testing.assert_allclose(given.grid.tpr_T, ordered.grid.tpr_T)


def test_the_hardest_pairs_are_those_with_the_lowest_genuine_and_the_highest_impostor_scores():
    distance, same = scores(decimals=9)
    pairs = ScoredPairs(-distance, same, *np.arange(600).reshape(2, 300), np.arange(600))
    genuine, impostors = ([pair.pair for pair in kind] for kind in hardest_pairs(pairs))
    order, count = np.argsort(distance), len(genuine)
    assert 0 < count == len(impostors) < 100, "the hardest of each kind, and not all"
    assert genuine == order[same[order]][: -count - 1 : -1].tolist()
    assert impostors == order[~same[order]][:count].tolist()


def test_float32_embeddings_are_compared_in_float64():
    embedding, same = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32), np.ones(40, bool)
    single, double = (score_pairs(each, same, np.arange(80)) for each in (embedding, np.float64(embedding)))
    np.testing.assert_array_equal(single.score_P, double.score_P)


def test_distances_of_float16_embeddings_of_any_length_are_exact():
    # In float16, the square of 300 is infinite.
    np.testing.assert_allclose(squared_distances(np.array([[300, 0], [0, 300]], np.float16)), [2])


@pytest.mark.parametrize("pairs", [0, 1, 512, 1025])
def test_distances_in_blocks_are_those_of_all_pairs_at_once(pairs):
    embedding = np.random.default_rng(0).normal(size=(2 * pairs, 7)).astype(np.float32)
    unit = l2_normalize(embedding.astype(np.float64))
    assert np.array_equal(squared_distances(embedding), np.square(unit[0::2] - unit[1::2]).sum(1))


@pytest.mark.parametrize("shape", [(3, 2), (1, 2), (4,)])
def test_rows_that_are_no_pairs_have_no_distances(shape):
    with pytest.raises(ValueError, match="two rows for each pair"):
        squared_distances(np.ones(shape))


@pytest.mark.parametrize(
    "same", [np.arange(103) % 2 == 0, np.arange(103) < 9, np.ones(103, bool), np.arange(1200) % 600 < 300]
)
def test_pairs_keep_their_folds_if_these_have_both_kinds_or_cannot_or_are_of_published_folds(same):
    assert (fold_order(same) == np.arange(len(same))).all()


def test_fewer_pairs_than_folds_is_an_error():
    with pytest.raises(ValueError, match="9 pairs.*10 folds"):
        fold_accuracy(np.ones(9), np.ones(9, bool))


@pytest.mark.parametrize("of", [roc, fold_accuracy, grid_roc])
@pytest.mark.parametrize(
    ("value", "same", "fault"),
    [
        (np.ones(12), np.arange(12) % 2, "dtype int64; give bool"),
        (np.ones(12), np.ones(13, bool), r"\(12,\) and labels of shape \(13,\)"),
        (np.ones((12, 1)), np.ones((12, 1), bool), r"\(12, 1\)"),
        (np.full(12, np.nan), np.ones(12, bool), "NaN"),
        (np.arange(12, dtype=np.uint8), np.arange(12) % 2 == 0, "dtype uint8; give floating"),
    ],
)
def test_pairs_that_would_give_wrong_rates_in_silence_are_refused(of, value, same, fault):
    with pytest.raises(ValueError, match=fault):
        of(value, same)


@pytest.mark.parametrize("decimals", [1, 8])
def test_the_roc_and_its_area_agree_with_scikit_learn(decimals):
    distance, same = scores(500, decimals=decimals)
    curve = roc(-distance, same)
    far, tar, _ = roc_curve(same, -distance, drop_intermediate=False)
    np.testing.assert_allclose(curve.far, far)
    np.testing.assert_allclose(curve.tar, tar)
    assert value_of(curve, auc) == pytest.approx(roc_auc_score(same, -distance))


def test_tar_at_a_far_below_one_impostor_pair_is_not_available():
    _, same = scores(400)
    metrics = metrics_of(np.random.default_rng(0).normal(size=(800, 4)), same)
    assert "tar@1e-02" in metrics and "tar@1e-03" not in metrics


@pytest.mark.parametrize("far", [1e-1, 3e-1, 3e-3, 3e-4, 7e-5, *(10.0**-n for n in range(2, 12))])
def test_the_number_of_impostors_that_a_rate_is_said_to_need_is_the_smallest_that_suffices(far):
    needed = least_impostors(far)
    assert can_measure(needed, far) and not can_measure(needed - 1, far)
    assert needed * Fraction(repr(far)) >= 1 > (needed - 1) * Fraction(repr(far))


@pytest.mark.parametrize("decimals", [2, 9])
def test_the_thinned_curve_has_the_rates_of_the_table(decimals):
    distance, same = scores(30_000, decimals=decimals)
    curve = roc(-distance, same)
    points = thin_curve(curve)
    assert len(points["far"]) <= 512
    for far in (1e-1, 1e-2, 1e-3, 1e-4):
        last = np.searchsorted(points["far"], far, side="right") - 1
        assert points["tar"][last] == value_of(curve, partial(tar_at_far, far=far))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("decimals", [1, 3])
def test_the_equal_error_rate_agrees_with_scipys_root(seed, decimals):
    distance, same = scores(300, seed, decimals)
    far, tar, _ = roc_curve(same, -distance, drop_intermediate=False)
    root = brentq(lambda rate: 1 - rate - np.interp(rate, far, tar), 0, 1, xtol=1e-12)
    assert value_of(roc(-distance, same), equal_error_rate) == pytest.approx(root, abs=1e-9)
    assert value_of(roc(np.array([1.0, 0.0]), np.array([True, False])), equal_error_rate) == 0


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_agree_with_a_search_over_all_scores(seed):
    distance, same = scores(300, seed)
    score, tried = -distance, np.unique(-distance)[::-1]
    accepts = np.array([np.mean(score[~same] >= t) for t in tried])
    rejects = np.array([np.mean(score[same] < t) for t in tried])
    curve = roc(score, same)
    assert eer_threshold(curve) == tried[accepts >= rejects][0]
    for far in (0.3, 1e-1, 1e-2):
        assert threshold_at(curve, far) == tried[accepts <= far][-1]
        assert value_of(curve, partial(tar_at_far, far=far)) == pytest.approx(1 - rejects[accepts <= far][-1])
    best = score.max() + 1
    none = roc(np.append(score, best), np.append(same, False))
    assert threshold_at(none, 1e-3) > best, "an impostor pair with the highest score leaves no accepted pair"


@pytest.mark.parametrize("errors", range(1, 10))
def test_the_threshold_of_the_equal_error_is_where_as_many_are_accepted_as_rejected(errors):
    # So many impostor pairs are the highest of 10, and as many genuine pairs remain below the tenth score.
    same = np.array([False] * errors + [True] * 10 + [False] * (10 - errors))
    assert eer_threshold(roc(np.arange(20.0, 0, -1), same)) == 11


def test_equal_infinite_scores_are_one_point_of_the_roc():
    score, same = np.array([1, 0.5, -np.inf, -np.inf, np.inf, np.inf]), np.array([True, False] * 3)
    for order in (np.arange(6), np.arange(6)[::-1]):
        curve = roc(score[order], same[order])
        assert curve.threshold.tolist() == [np.inf, np.inf, 1, 0.5, -np.inf]
        assert value_of(curve, auc) == pytest.approx(roc_auc_score(same, np.clip(score, -9, 9)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_threshold_above_equal_scores_accepts_none_of_them_in_their_dtype(dtype):
    score, same = np.array([0.7, 0.7, 0.7, 0.2], dtype), np.array([False, False, True, True])
    threshold = threshold_at(roc(score, same), 0.5)
    assert not (score >= threshold).any() and threshold == np.nextafter(score[0], dtype(1))


@pytest.mark.parametrize("kind", [True, False])
@pytest.mark.parametrize("pairs", [1, 20])
def test_pairs_of_one_kind_have_no_accuracy_and_no_curve(pairs, kind):
    metrics = metrics_of(np.ones((2 * pairs, 4)), np.full(pairs, kind))
    assert not any(name.startswith(("accuracy", "auc", "threshold")) for name in metrics)


def test_embeddings_of_zeros_have_an_accuracy_of_one_half():
    assert metrics_of(np.zeros((40, 4)), np.arange(20) % 2 == 0)["accuracy"] == 0.5


def test_the_histogram_counts_cosines_that_rounding_has_brought_outside_of_their_range():
    score, same = np.array([1 + 1e-7, -1 - 1e-7, 0.5, 0.25]), np.array([True, False, True, False])
    index = np.arange(4)
    counted = histogram(ScoredPairs(score, same, 2 * index, 2 * index + 1, np.arange(8)))
    assert counted.genuine.sum() == 2 and counted.impostor.sum() == 2


@pytest.mark.parametrize("impostors", [0, 9, 10, 1_000])
def test_the_rising_metrics_are_those_that_separated_pairs_bring_to_one(impostors):
    same = np.arange(10 + impostors) < 10
    embedding = np.zeros((2 * len(same), 2))
    embedding[0::2, 0] = 1
    embedding[1::2] = np.where(same[:, None], (1, 0), (0, 1))
    names = [name for name, value in metrics_of(embedding, same).items() if value == 1]
    assert sorted(rising_metrics(same)) == sorted(set(names) - {"xnorm"})
