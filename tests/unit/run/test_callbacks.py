"""What happens between the steps of a run."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from facetrain.run.callbacks import RunHooks
from facetrain.telemetry.log import logger
from facetrain.telemetry.meter import Meter
from facetrain.telemetry.recorder import Recorder
from facetrain.verify.pair_set import PairSet
from facetrain.verify.verification import verification_result


class Board:
    """Keeps what it is told; its images fail where that is asked."""

    def __init__(self, *, broken):
        self.written, self.shown, self._broken = [], [], broken

    def write(self, step, values):
        self.written.append((step, values))

    def show(self, step, images):
        if self._broken:
            raise RuntimeError("no space left for images")
        self.shown.append((step, set(images)))


def hooks_of(board, results):
    nothing = dict.fromkeys(("spikes", "step", "loader", "writer", "stop", "meta", "say"))
    every = {"total_steps": 9, "log_every": 1, "verify_every": 1, "save_every": 1, "save_every_minutes": None}
    return RunHooks(
        recorder=Recorder(board=board), verifier=lambda _: results, max_skipped=None, **nothing, **every
    )


@pytest.mark.parametrize("broken", [False, True])
def test_a_verification_is_recorded_and_drawn_and_a_drawing_that_fails_ends_no_run(
    broken, caplog, monkeypatch
):
    pytest.importorskip("matplotlib")
    same = np.arange(20) % 2 == 0
    pairs = PairSet("lfw", [], same, subject=np.arange(40))
    embedding = np.random.default_rng(0).normal(size=(40, 8))
    result, _ = verification_result(embedding, embedding, pairs, replicates=0)
    state = SimpleNamespace(
        step=3, backbone=nn.Linear(1, 1), network=None, metrics={}, meter=Meter(), unverified=False
    )
    board = Board(broken=broken)
    monkeypatch.setattr(logger, "propagate", True)  # a run in this process has switched it off
    hooks = hooks_of(board, [("lfw", result)])
    hooks.begin(state, resumed=False)
    assert board.written == [(3, state.metrics)] and not board.shown, "the first step need not wait"
    hooks.verify(state)
    assert board.written[0] == board.written[1]
    assert state.metrics["lfw/accuracy"] == result.metrics["accuracy"]
    assert "lfw/tar@1e-06" not in state.metrics, "what the set cannot tell is not recorded"
    if broken:
        assert "figures of step 3 were not drawn" in caplog.text
    else:
        assert board.shown == 2 * [(3, {"lfw/roc", "lfw/det", "lfw/scores", "lfw/folds"})]
