import numpy as np
import pytest

from facetrain.verify.model_comparison import compare_results
from facetrain.verify.scored_pairs import pair_result
from tests.unit.verify.test_bootstrap import people


def scored(noise, seed=0, subjects=80):
    pairs = people(np.random.default_rng(seed), subjects)
    moved = pairs.score_P + noise * np.random.default_rng(seed + 1000).normal(size=len(pairs.score_P))
    return pair_result(
        type(pairs)(moved, *list(vars(pairs).values())[1:]), protocol="x", replicates=300, seed=0
    )


def test_a_model_does_not_differ_from_itself():
    for difference in compare_results(scored(0), scored(0)).values():
        assert (difference.interval, difference.p) == ((0, 0), 1)


def test_a_worse_model_differs_significantly_although_the_intervals_overlap():
    better, worse = scored(0), scored(0.15)
    found = compare_results(better, worse)["auc"]
    assert better.interval["auc"][0] < worse.interval["auc"][1]
    assert found.interval[0] > 0 and found.p < 0.05
    assert found.as_json()["difference"] == pytest.approx(better.metrics["auc"] - worse.metrics["auc"])
    back = compare_results(worse, better)["auc"]
    assert back.interval == pytest.approx((-found.interval[1], -found.interval[0])) and back.p == found.p


def test_equally_good_models_rarely_differ_significantly():
    seen = 0
    for seed in range(60):
        pairs = people(np.random.default_rng(seed), 60)
        noisy = [
            type(pairs)(
                pairs.score_P + 0.2 * np.random.default_rng((seed, model)).normal(size=len(pairs.score_P)),
                *list(vars(pairs).values())[1:],
            )
            for model in (1, 2)
        ]
        first, second = (pair_result(one, protocol="x", replicates=200) for one in noisy)
        seen += compare_results(first, second)["auc"].p < 0.05
    assert seen <= 7
