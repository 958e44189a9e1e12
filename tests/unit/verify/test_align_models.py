"""Measurement of a map between two models."""

import numpy as np

from facetrain.embeddings.normalization import l2_normalize
from facetrain.verify.align_models import _accuracy


def test_two_images_are_compared_once_by_one_model_and_twice_by_two():
    random = np.random.default_rng(0)
    label_N = np.repeat(np.arange(60), 2)
    old_ND, new_ND = (l2_normalize(random.normal(size=(120, 8))) for _ in range(2))
    # 120 · 118 / 2 = 7,080 impostor pairs: too few for 1e-4, of which two models make 14,160 comparisons.
    assert _accuracy(old_ND, old_ND, label_N)["tar@1e-04"] is None
    assert _accuracy(old_ND, new_ND, label_N)["tar@1e-04"] is not None
