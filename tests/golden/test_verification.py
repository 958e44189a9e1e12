import numpy as np

from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.fold_accuracy import fold_accuracy, grid_roc, squared_distances
from facetrain.verify.pair_protocol import verification_result
from facetrain.verify.sets.pair_set import PairSet
from tests.support.golden import golden_path


def test_the_accuracy_of_every_fold_and_the_roc_on_the_grid_equal_insightfaces():
    golden = np.load(golden_path("verification.npz"))
    same = golden["issame"].astype(bool)
    distances = squared_distances(golden["embeddings"])
    found = fold_accuracy(distances, same)
    np.testing.assert_allclose(found.accuracy_F, golden["fold_accuracy"], atol=1e-12)
    pairs = PairSet("golden", [], same, subject=np.arange(2 * len(same)))
    result = verification_result(golden["embeddings"], golden["embeddings"], pairs, draws=Draws(0))
    assert result.metrics["accuracy"] == golden["fold_accuracy"].mean()
    found = grid_roc(distances, same)
    np.testing.assert_allclose(found.tpr_T, golden["tpr"], atol=1e-12)
    np.testing.assert_allclose(found.fpr_T, golden["fpr"], atol=1e-12)
