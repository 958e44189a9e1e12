"""Agreement of the ranks on a stop."""

import signal

import pytest

from facetrain.distributed.stop_request import StopRequest
from facetrain.errors import UsageError
from facetrain.run.callbacks.checkpointing import Stopping


def test_a_signal_is_agreed_on_and_shown_with_the_step(state):
    lines = []
    with StopRequest() as request:
        stopping = Stopping(request, lines.append)
        stopping.begin()
        signal.raise_signal(signal.SIGTERM)
        assert not stopping.agree(state), "what was known before the step counts"
        assert stopping.signal == 0 and not lines
        stopping.begin()
        state.step, state.unverified = 7, True
        assert stopping.agree(state)
    assert stopping.signal == signal.SIGTERM
    assert "SIGTERM received: saving step 7" in lines[0] and "`facetrain resume` will verify it" in lines[0]


def test_a_signal_that_interrupts_the_verification_after_a_step_stops_the_run_there(state):
    with StopRequest() as request:
        stopping = Stopping(request, [].append)
        stopping.begin()
        signal.raise_signal(signal.SIGTERM)
        state.unverified = True
        assert stopping.agree(state)


@pytest.mark.parametrize("seconds", ["5m", "", "-1"])
def test_a_grace_period_that_is_no_number_is_refused_before_a_signal_comes(monkeypatch, seconds):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", seconds)
    with pytest.raises(
        UsageError, match=f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: '{seconds}' is not a whole number of"
    ):
        StopRequest()
