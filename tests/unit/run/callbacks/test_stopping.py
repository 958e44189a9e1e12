"""Agreement of the ranks on a stop."""

import signal

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
