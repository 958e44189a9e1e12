import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import facetrain
from facetrain.data.formats.bin import write_bin
from facetrain.data.tools.aligned_images import NoFaceError
from facetrain.distributed import collectives
from facetrain.distributed.stop_request import Stopped, StopRequest
from facetrain.distributed.world import assemble
from facetrain.embeddings.embed_images import _exchange, embed_images
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.errors import UsageError
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.protocols import evaluate_set
from facetrain.verify.sets.open_sets import open_set
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.verifier import Verifier
from tests.support.datasets import encoded_image
from tests.support.faces import embedder, face
from tests.support.models import write_model
from tests.support.protocols import write_ijb, write_tinyface
from tests.support.ranks import run_ranks


def score(progress=None, check_stop=None):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
    # 20 images, the first two in two pairs: on 3 ranks the last share is not full.
    pairs = PairSet("set", [encoded_image(n % 20) for n in range(22)], np.arange(11) % 2 == 0)
    options = {"image_size": 16, "batch_size": 2, "device": torch.device("cpu")}
    make_embedder = partial(ImageEmbedder, **options, progress=progress, check_stop=check_stop)
    return {name: result.available_metrics for name, result in Verifier([pairs], make_embedder)(network)}


def stop_and_score():
    """Stop a verification by a signal to the last rank after the second batch, then score again with progress."""
    checked, reports = [], []

    def check_stop():
        checked.append(collectives.rank())
        if len(checked) == 2 and collectives.rank() == collectives.world_size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        stop.raise_if_requested()

    with StopRequest() as stop, pytest.raises(Stopped):
        score(check_stop=check_stop)
    return len(checked), score(lambda *report: reports.append(report)), reports


def test_sharing_pairs_among_ranks_keeps_the_scores_and_a_signal_to_one_rank_stops_all():
    alone = score()
    for world_size in (2, 3):
        for rank, (batches, found, reports) in enumerate(run_ranks(world_size, stop_and_score)):
            assert batches == 2
            done = range(2 * world_size, 20 + 2 * world_size, 2 * world_size)
            assert reports == ([] if rank else [(min(each, 20), 20) for each in done])
            assert found.keys() == (set() if rank else {"set"}), "only the leader computes metrics"
            # Equal images are at distance 0 or a rounding above it, so curves may differ in their ties.
            for name in ("accuracy", "accuracy_no_flip", "accuracy_std", "xnorm", "pairs") if found else ():
                assert found["set"][name] == pytest.approx(alone["set"][name], rel=1e-6), name


def embed_readable():
    """Embed images of which two cannot be read, each on another of two ranks; also exchange a photo without a face."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
    images = [encoded_image(number) for number in range(7)]
    images[1] = images[5] = b"damaged"
    faults, of_all = {}, {collectives.rank(): NoFaceError(f"no face on rank {collectives.rank()}")}
    options = {"image_size": 16, "batch_size": 2, "device": torch.device("cpu")}
    found, _ = embed_images(ImageEmbedder(network, **options), images, "set", faults=faults)
    _exchange(of_all, range(2))
    return found, {number: str(error) for number, error in faults.items()}, sorted(map(repr, of_all.values()))


def test_images_that_one_rank_cannot_read_are_left_out_on_all_ranks():
    alone, faults, _ = embed_readable()
    assert len(alone) == 5 and faults.keys() == {1, 5}
    for found, found_faults, of_all in run_ranks(2, embed_readable):
        np.testing.assert_allclose(found, alone, atol=1e-6)
        assert found_faults == faults
        assert of_all == [f"NoFaceError('no face on rank {rank}')" for rank in range(2)]


def use_in_a_program_with_a_group(folder, world_size):
    """Evaluate on the last rank, and begin a run, as a script under torchrun would; return the metrics."""
    rank = collectives.rank()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with pytest.raises(UsageError, match="has one; call destroy_process_group first"), assemble():
        pass
    if rank < world_size - 1:
        return {}
    return facetrain.evaluate(folder / "m.safetensors", "pairs", folder, device="cpu", bootstrap=0)


def test_one_rank_evaluates_a_model_in_a_program_that_has_a_process_group(tmp_path):
    write_model(tmp_path / "m.safetensors")
    write_bin(tmp_path / "pairs.bin", [encoded_image(n, 32) for n in range(40)], [True, False] * 10)
    first, last = run_ranks(2, use_in_a_program_with_a_group, tmp_path, 2)
    assert not first
    assert last == facetrain.evaluate(
        tmp_path / "m.safetensors", "pairs", tmp_path, device="cpu", bootstrap=0
    )


def evaluate_all(folder):
    found, options = {}, EvaluationOptions(bootstrap=40)
    for gallery in (None, embedder(factors=(1, 0.4, 2))):
        for name in ("ijbc", "tinyface", "pairs"):
            results = evaluate_set(open_set(name, folder), embedder(), options, gallery=gallery)
            found |= {(key, gallery is None): (one.metrics, one.interval) for key, one in results.items()}
    return found


@pytest.mark.slow
def test_the_leader_of_three_ranks_gets_the_results_of_one_rank_and_the_others_get_none(tmp_path):
    write_ijb(tmp_path / "ijbc")
    write_tinyface(tmp_path / "tinyface")
    write_bin(tmp_path / "pairs.bin", [face(n // 3, n) for n in range(40)], [n % 2 == 0 for n in range(20)])
    leader, *others = run_ranks(3, evaluate_all, tmp_path)
    assert len(leader) == 8
    assert leader == evaluate_all(tmp_path) and others == [{}, {}]
