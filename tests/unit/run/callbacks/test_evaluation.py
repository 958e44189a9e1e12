"""Verification during training."""

from functools import partial

import numpy as np
import pytest

from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.distributed.stop_request import Stopped
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.run.callbacks.evaluation import Evaluation
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.output.hardest_pairs import SHOWN_PAIRS, VerifiedPairs
from facetrain.verify.pair_protocol import verification_result
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.verifier import Verifier
from tests.support.datasets import encoded_image
from tests.support.waiting import set_time
from tests.unit.run.callbacks.helpers import CPU, SIZE, Board

embedder_of = partial(ImageEmbedder, image_size=SIZE, batch_size=8, device=CPU, workers=0)


@pytest.fixture
def pairs():
    images = [encoded_image(number, SIZE) for number in range(40)]
    return PairSet("lfw", images, np.arange(20) % 2 == 0)


def verifier_of(pairs, check_stop=None):
    return Verifier([pairs], partial(embedder_of, check_stop=check_stop))


def raise_stopped():
    raise Stopped


def test_a_verification_is_recorded_at_once_and_the_hardest_pairs_of_the_last_one_later(
    state, pairs, tmp_path
):
    board, path = Board(), tmp_path / "pairs.json"
    evaluation = Evaluation(verifier_of(pairs), board.write, pairs_file=path)
    for state.step in (0, 1):
        evaluation.verify(state)
        assert board.written[-1] == (state.step, state.metrics) and state.verified_step == state.step
    assert not path.exists(), "the first step must not wait for it"
    assert 0 <= state.metrics["lfw/accuracy"] <= 1
    assert "lfw/tar@1e-06" not in state.metrics, "20 pairs cannot measure this rate"
    result = evaluation.verifier.score(embedder_of(state.backbone.eval()), pairs)
    evaluation.write_pairs(state)
    shown = VerifiedPairs.model_validate_json(path.read_bytes())
    assert shown.step == 1 and list(shown.sets) == ["lfw"]
    path.unlink()
    evaluation.write_pairs(state)
    assert not path.exists(), "once for each verification"
    for found, hardest in (
        (shown.sets["lfw"].genuine, result.hardest_genuine),
        (shown.sets["lfw"].impostors, result.hardest_impostors),
    ):
        assert [(each.pair, each.score) for each in found] == [
            (each.pair, pytest.approx(each.score)) for each in hardest[:SHOWN_PAIRS]
        ]
        second = decode_rgb(found[0].images[1], location="")
        source = resize_square(decode_rgb(pairs.images[hardest[0].second], location=""), 112)
        assert np.abs(second.astype(float) - source).mean() < 8, "the image of this pair, as JPEG"


def test_a_report_that_has_begun_counts_the_time_before_the_hardest_pairs_but_not_theirs(
    state, pairs, tmp_path, monkeypatch
):
    evaluation = Evaluation(verifier_of(pairs), Board().write, pairs_file=tmp_path / "pairs.json")
    evaluation.verify(state)
    for module in ("telemetry.meter", "run.callbacks.evaluation"):
        set_time(monkeypatch, f"facetrain.{module}", perf_counter=lambda: next(seconds))
    seconds = iter([0.0, 8.0, 20.0, 22.0])  # of the restart, of the pairs from and to, and of the report
    state.meter.restart_clock()
    state.meter.add_images(100)
    means = state.meter.take()
    evaluation.write_pairs(state)
    assert means()["images_per_s"] == 10


def test_hardest_pairs_are_written_where_there_is_a_file_and_a_disk_that_refuses_them_ends_no_run(
    state, pairs, tmp_path, capfd
):
    evaluation = Evaluation(verifier_of(pairs), Board().write, pairs_file=tmp_path / "missing" / "pairs.json")
    state.meter.add_images(100)
    evaluation.verify(state)
    assert state.meter.report()["images_per_s"] == 0, "the steps before a verification count no more"
    evaluation.write_pairs(state)
    assert "pairs.json: No such file or directory; training continues" in capfd.readouterr().err
    evaluation.pairs_file = None  # as on every rank but the leader
    evaluation.verify(state)
    evaluation.write_pairs(state)
    assert capfd.readouterr().err == ""


def test_the_recorded_metrics_are_those_of_the_protocol(state, pairs):
    class Fixed:
        def __call__(self, model):
            embedding = np.random.default_rng(0).normal(size=(40, 8))
            self.result = verification_result(embedding, embedding, pairs, draws=Draws(0))
            return [("lfw", self.result)]

    verifier, board = Fixed(), Board()
    Evaluation(verifier, board.write).verify(state)
    assert state.metrics["lfw/accuracy"] == verifier.result.metrics["accuracy"]
    assert board.written == [(0, state.metrics)]


def test_every_rank_has_the_metrics_of_the_leader(state, monkeypatch):
    board, of_leader = Board(), {"lfw/accuracy": 0.5}
    monkeypatch.setattr("facetrain.run.callbacks.evaluation.collectives.broadcast_json", lambda _: of_leader)
    Evaluation(lambda network: [], board.write).verify(state)  # as on every rank but the leader
    assert state.metrics == of_leader and board.written == [(0, of_leader)] and state.verified_step == 0


def test_an_interrupted_verification_is_marked_and_records_nothing(state, pairs):
    board = Board()
    evaluation = Evaluation(verifier_of(pairs, check_stop=raise_stopped), board.write)
    evaluation.verify(state)
    assert state.unverified and not board.written and state.metrics == {}
    Evaluation(verifier_of(pairs), board.write).verify(state)
    assert not state.unverified and board.written
