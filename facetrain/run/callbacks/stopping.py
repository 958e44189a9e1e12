"""Early stopping of a run by a signal."""

from __future__ import annotations

import signal
from collections.abc import Callable

from facetrain.distributed.stop_request import StopRequest, grace_s
from facetrain.train.loop import Agreement
from facetrain.train.state import TrainState


class Stopping:
    """Lets the ranks agree, once per step, whether to stop and whether to save by the clock."""

    def __init__(self, request: StopRequest, print_message: Callable[[str], None]) -> None:
        """Take the signal handler, and a function that shows the user a line."""
        self._request, self._print = request, print_message
        self.signal = 0
        """Signal that the ranks have agreed to stop for; 0 as long as there is none."""

    def agree(self, state: TrainState, *, save: bool) -> Agreement:
        """Return what the ranks decide together; `save` is this rank's wish for a checkpoint. Collective.

        Both decisions share one reduction, because this is called after every step.
        """
        self.signal, save = self._request.requested(save)
        if self.signal:
            self._print(
                f"{signal.Signals(self.signal).name} received: saving step {state.step} and stopping, within "
                f"{grace_s()} s of the signal"
                + ("; `facetrain resume` will verify it" if state.unverified else "")
            )
        return Agreement(stop=self.signal != 0, save=save)
