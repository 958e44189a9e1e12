from dataclasses import asdict

import numpy as np
import pytest

from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.identification import Search, identification_result
from facetrain.verify.metrics.scored_pairs import ScoredPairs, pair_result


def result_with(impostors, genuine=200, replicates=20):
    random = np.random.default_rng(0)
    count = impostors + genuine
    same = np.arange(count) < genuine
    score = np.where(same, random.normal(0.6, 0.2, count), random.normal(0, 0.1, count)).clip(-1, 1)
    image = np.arange(2 * count)
    pairs = ScoredPairs(score, same, image[0::2], image[1::2], image % 97)
    return score, same, pair_result(pairs, protocol="verification", draws=Draws(replicates))


def test_the_fnmr_is_the_share_of_genuine_pairs_below_the_threshold_of_the_fmr():
    score, same, result = result_with(30_000)
    points = result.operating_points
    assert [point.name for point in points] == ["fnmr@1e-03", "fnmr@1e-04", "fnmr@1e-05", "fnmr@1e-06"]
    for point in points[:2]:
        accepted = score >= point.threshold
        assert accepted[~same].sum() == 30_000 * point.limit
        assert point.rate == pytest.approx(1 - accepted[same].mean(), abs=1e-12)
        low, high = point.interval
        assert low <= point.rate <= high and result.as_json()["operating_points"][0] == asdict(points[0])


@pytest.mark.parametrize(
    ("impostors", "remark"),
    [
        (2_999, "needs 3,000 impostor pairs (rule of 3); there are 2,999"),
        (3_000, "rests on 3 false positives, fewer than 30 (rule of 30)"),
        (30_000, ""),
    ],
)
def test_a_rate_needs_impostor_pairs_by_the_rule_of_three_and_warns_by_the_rule_of_thirty(impostors, remark):
    point = result_with(impostors, replicates=0)[2].operating_points[0]
    assert point.remark == remark and (point.rate is None) == (impostors < 3_000)


def test_a_search_has_the_fnir_at_an_fpir():
    mated = np.arange(400) < 100
    mate = np.where(mated, np.linspace(0.2, 0.9, 400), -np.inf)
    other = np.linspace(0, 0.5, 400)
    searched = Search(np.arange(400), mated, np.zeros(400, int), mate, other)
    result = identification_result([searched], subjects=400, draws=Draws(0))
    first, second = result.operating_points
    assert (first.name, first.remark) == ("fnir@1e-01", "")
    assert first.rate == pytest.approx(1 - result.metrics["tpir@1e-01"])
    assert second.remark == "rests on 3 false positives, fewer than 30 (rule of 30)"
