import numpy as np
import pytest

from facetrain.verify.metrics import templates
from facetrain.verify.metrics.templates import pool_templates, score_pairs


def pooled_by_loops(embedding, template, medium, weight):
    """InsightFace's steps: weigh, mean of each medium, sum over the media, length 1."""
    rows = []
    for t in np.unique(template):
        total = np.zeros(embedding.shape[1])
        for m in np.unique(medium[template == t]):
            of = (template == t) & (medium == m)
            total += (embedding[of] * weight[of, None]).mean(0)
        rows.append(total / np.linalg.norm(total))
    return np.array(rows)


@pytest.mark.parametrize("at_once", [1, 40, 1 << 15])
def test_pooling_equals_loops_over_templates_and_media(at_once, monkeypatch):
    random = np.random.default_rng(0)
    monkeypatch.setattr(templates, "_MAX_IMAGES", at_once)
    embedding = random.normal(size=(300, 6)).astype(np.float32)
    # Media have the same numbers in several templates, and one template holds a third of all images.
    template, medium = random.choice([5, 9, 9, 40, 41], 300), random.integers(0, 4, 300)
    weight = random.random(300).astype(np.float32)
    ids, found = pool_templates(embedding, template, medium, weight)
    assert ids.tolist() == [5, 9, 40, 41]
    np.testing.assert_allclose(found, pooled_by_loops(embedding, template, medium, weight), atol=1e-5)


def test_a_range_of_templates_has_few_images_or_is_one_template():
    assert list(templates._template_ranges(np.array([2, 3, 8, 9, 11]), 3)) == [(0, 2), (2, 3), (3, 5)]


@pytest.mark.parametrize("products", [40, 1 << 24])
@pytest.mark.parametrize(("count", "pairs"), [(70, 4000), (2000, 900)])
def test_block_scores_equal_single_dot_products(products, count, pairs, monkeypatch):
    random = np.random.default_rng(1)
    monkeypatch.setattr(templates, "_MAX_PRODUCTS", products)
    unit = random.normal(size=(count, 8)).astype(np.float32)
    first, second = random.integers(0, count, pairs), random.integers(20, count, pairs)
    expected = (unit[first] * unit[second]).sum(1)
    np.testing.assert_allclose(score_pairs(unit, unit, first, second), expected, atol=1e-4)
