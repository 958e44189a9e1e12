import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

from facetrain.distributed import collectives
from facetrain.distributed.stop_request import Stopped, StopRequest
from facetrain.verify.pair_set import PairSet
from facetrain.verify.protocols import Options, assess
from facetrain.verify.targets import open_target
from facetrain.verify.verifier import Verifier
from tests.support.datasets import encoded_image
from tests.support.faces import embedder
from tests.support.protocols import write_ijb, write_tinyface
from tests.support.ranks import run_ranks


def score(told=None):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
    # 20 images, the first two in two pairs: on 3 ranks the last share is not full.
    pairs = PairSet("set", [encoded_image(n % 20) for n in range(22)], np.arange(11) % 2 == 0)
    verifier = Verifier([pairs], image_size=16, batch_size=2, device=torch.device("cpu"), progress=told)
    return dict(verifier(network))["set"].told


def stop_and_score():
    """Score again after a signal has come to the last rank in the middle of a set."""
    looked = []

    def look(done, of):
        looked.append(done)
        if len(looked) == 2 and collectives.rank() == collectives.world_size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        stop.raise_if_requested()

    with StopRequest() as stop, pytest.raises(Stopped):
        score(look)
    return looked, score()


def test_pairs_shared_by_ranks_score_as_on_one_and_all_leave_when_a_signal_comes_to_one():
    alone = score()
    for world_size in (2, 3):
        for looked, found in run_ranks(world_size, stop_and_score):
            assert looked == [2, 4]
            assert found.keys() == alone.keys()
            # Equal images are at distance 0 or a rounding above it, so curves may differ in their ties.
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
