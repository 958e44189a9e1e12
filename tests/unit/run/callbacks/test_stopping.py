"""Agreement of the ranks on a stop."""

import signal

import pytest

from facetrain.distributed.stop_request import StopRequest
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


def test_a_second_ctrl_c_leaves_the_user_s_program_alive():
    # As in a new program: a shell that runs the tests in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.signal == signal.SIGINT, "the first one is recorded"
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_sigint_that_a_rank_receives_from_the_scheduler_and_from_its_agent_is_one_request(monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert request.signal == signal.SIGINT
