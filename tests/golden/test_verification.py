import numpy as np

from facetrain.verify.folds import fold_accuracy, squared_distances
from facetrain.verify.metrics import verification_metrics
from tests.support.shared import shared_path


def test_every_folds_accuracy_is_the_peers():
    golden = np.load(shared_path("golden/verification.npz"))
    same = golden["issame"].astype(bool)
    found = fold_accuracy(squared_distances(golden["embeddings"].astype(np.float64)), same)
    np.testing.assert_allclose(found.accuracy_F, golden["fold_accuracy"], atol=1e-12)
    assert verification_metrics(golden["embeddings"], same)["accuracy"] == golden["fold_accuracy"].mean()
