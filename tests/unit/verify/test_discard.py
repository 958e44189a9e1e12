import json

import numpy as np
import pytest

from facetrain.verify.metrics.discard import discard_curve
from facetrain.verify.metrics.result import Result
from facetrain.verify.model_results import ModelResults
from facetrain.verify.output.formatting import format_evaluation


def test_the_curve_is_what_a_plain_loop_over_the_shares_finds():
    random = np.random.default_rng(0)
    score, same = random.normal(size=200), random.random(200) < 0.6
    quality = np.round(random.normal(size=200) + score, 1)  # rounded, so that some are equal
    curve = discard_curve(score, same, quality, 0.0, quality="q")
    kept_scores = [score[same & (quality >= lowest)] for lowest in np.unique(quality[same])]
    assert curve.fnmr == pytest.approx([np.mean(kept < 0) for kept in kept_scores])
    assert curve.share == pytest.approx([1 - len(kept) / same.sum() for kept in kept_scores])
    assert curve.min_quality.tolist() == np.unique(quality[same]).tolist()
    assert curve.share[0] == 0 and curve.fnmr[0] == np.mean(score[same] < 0)
    assert curve.rejected == curve.as_json()["rejected"] == np.sum(score[same] < 0)


@pytest.mark.parametrize(
    ("rejected", "remark"),
    [(1, "uncertain: rests on 1 rejected pair, fewer than 30"), (29, "29 rejected"), (30, "")],
)
def test_a_ratio_that_rests_on_few_rejected_pairs_is_said_to_be_uncertain(rejected, remark):
    same = np.ones(100, bool)
    curve = discard_curve(np.arange(100) - rejected, same, np.arange(100.0), 0, quality="q")
    result = Result("verification", {}, discards=[curve])
    (line,) = (
        line for line in format_evaluation(ModelResults("", {"x": result}, {}, True)) if "discarding" in line
    )
    assert ("uncertain" in line) == bool(remark) and remark in line


def test_a_perfect_measure_has_a_small_area_and_a_random_one_the_area_of_random_discarding():
    random = np.random.default_rng(0)
    score = random.normal(size=20_000) + 1.3
    same = np.ones(len(score), bool)
    perfect = discard_curve(score, same, score, 0.0, quality="q")
    blind = discard_curve(score, same, random.random(len(score)), 0.0, quality="q")
    # With a share e of errors, all discarded first, the area is about e² / 2 of 0.5 e.
    assert perfect.area_ratio == pytest.approx(perfect.fnmr[0], rel=0.1)
    assert blind.area_ratio == pytest.approx(1, abs=0.06)
    assert discard_curve(score, ~same, score, 0.0, quality="q") is None
    without_errors = discard_curve(score, same, score, -100.0, quality="q")
    assert without_errors.area_ratio is None
    points = json.loads(json.dumps(perfect.as_json(), allow_nan=False))
    assert points["share"][-1] == perfect.share[-1] > 0.5
    assert len(points["share"]) == len(points["fnmr"]) == len(points["min_quality"]) <= 101


def test_all_images_of_one_quality_give_one_point():
    curve = discard_curve(np.array([0.0, 1.0]), np.array([True, True]), np.zeros(2), 0.5, quality="q")
    assert (curve.share.tolist(), curve.fnmr.tolist(), curve.area_ratio) == ([0], [0.5], 1)
