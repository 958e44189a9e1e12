import numpy as np
import pytest
import torch
from torch import nn

from facetrain.verify.pairs import PairSet
from facetrain.verify.protocols import Options, assess
from facetrain.verify.targets import open_target
from facetrain.verify.verifier import Verifier
from tests.support.datasets import picture
from tests.support.faces import embedder
from tests.support.protocols import write_ijb, write_tinyface
from tests.support.ranks import run_ranks


def score():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
    # 22 pictures: on 3 ranks the last share is not full.
    pairs = PairSet("set", [picture(n // 3) for n in range(22)], np.arange(11) % 2 == 0)
    return dict(Verifier([pairs], image_size=16, batch_size=5, device=torch.device("cpu"))(network))[
        "set"
    ].told


def test_pairs_shared_by_ranks_score_as_on_one():
    alone = score()
    for world_size in (2, 3):
        for found in run_ranks(world_size, score):
            assert found.keys() == alone.keys()
            # Equal pictures are at distance 0 or a rounding above it, so curves may differ in their ties.
            for name in ("accuracy", "accuracy_no_flip", "accuracy_std", "xnorm", "pairs"):
                assert found[name] == pytest.approx(alone[name], rel=1e-6), name


def assess_both(folder):
    found = {}
    for name in ("ijbc", "tinyface"):
        found |= assess(open_target(name, folder), embedder(), Options(replicates=10))
    return {name: (result.metrics, result.interval) for name, result in found.items()}


def test_protocols_shared_by_ranks_are_reckoned_by_the_leader_as_on_one(tmp_path):
    write_ijb(tmp_path / "ijbc")
    write_tinyface(tmp_path / "tinyface")
    leader, *others = run_ranks(3, assess_both, tmp_path)
    assert leader == assess_both(tmp_path) and others == [{}, {}]
