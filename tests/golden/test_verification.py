import numpy as np

from facetrain.verify.folds import fold_accuracy, grid_roc, squared_distances
from facetrain.verify.metrics import verification_metrics
from tests.support.shared import shared_path


def test_every_folds_accuracy_is_the_peers():
    golden = np.load(shared_path("golden/verification.npz"))
    same = golden["issame"].astype(bool)
    found = fold_accuracy(squared_distances(golden["embeddings"].astype(np.float64)), same)
    np.testing.assert_allclose(found.accuracy_F, golden["fold_accuracy"], atol=1e-12)
    assert verification_metrics(golden["embeddings"], same)["accuracy"] == golden["fold_accuracy"].mean()


def test_the_curve_on_the_grid_is_the_peers():
    golden = np.load(shared_path("golden/verification.npz"))
    found = grid_roc(squared_distances(golden["embeddings"].astype(np.float64)), golden["issame"].astype(bool))
    np.testing.assert_allclose(found.tpr_T, golden["tpr"], atol=1e-12)
    np.testing.assert_allclose(found.fpr_T, golden["fpr"], atol=1e-12)
