"""Order of the calls of the training loop."""

import pytest

from facetrain.config.loading import build_config
from facetrain.run.loop import Callbacks, fit

EVERY_STEPS = {"log": 2, "eval": 3, "checkpoint": 2}
SECTIONS = {section: {"every_steps": steps} for section, steps in EVERY_STEPS.items()}
CONFIG = build_config({"data": {"train": "x"}} | SECTIONS, "test")


class Recording:
    """Callbacks of the loop that record their calls. The signal comes after step `stop_at`."""

    def __init__(self, state, stop_at=None, interrupted=False):
        self.calls, self.advanced, self._state, self._stop_at = [], [], state, stop_at
        self._interrupted, self._begun = interrupted, None

    def announce_stage(self, state):
        pass

    def advance(self, state):
        self.advanced.append(state.step)

    def report(self, state, batches, *, at_once):
        self.calls.append(f"report {state.step}" if at_once else f"begin report {state.step}")
        self._begun = None if at_once else state.step

    def finish(self, state, batches):
        if self._begun is not None:
            self.calls.append(f"finish report {self._begun}")
            self._begun = None

    def check(self, state, batches):
        self.finish(state, batches)
        self.calls.append(f"check {state.step}")

    def verify(self, state):
        self.calls.append(f"verify {state.step}")
        state.unverified = self._interrupted

    def write_pairs(self, state):
        pass

    def save(self, state, *, ends=False):
        self.calls.append(f"save {state.step}" + ends * " last")

    def poll(self, state):
        self.calls.append(f"poll {state.step}")

    def begin(self):
        pass

    def agree(self, state):
        return state.step == self._stop_at or self._interrupted


def test_the_time_before_the_first_step_is_no_training(state, loader, step, monkeypatch):
    restarts = []
    monkeypatch.setattr(state.meter, "restart_clock", lambda: restarts.append(state.step))
    state.resumed = True  # no verification, which restarts the clock, too
    fit(state, loader, step, Callbacks(*[Recording(state)] * 4), CONFIG, total_steps=4)
    assert restarts == [0]


def test_the_progress_bar_moves_with_every_step(state, loader, step):
    recording = Recording(state)
    fit(state, loader, step, Callbacks(*[recording] * 4), CONFIG, total_steps=4)
    assert recording.advanced == [1, 2, 3, 4]


def calls_of(state, loader, step, *, config=CONFIG, resumed=False, unverified=False, **options):
    state.unverified, state.resumed = unverified, resumed
    recording = Recording(state, **options)
    callbacks = Callbacks(recording, recording, recording, recording)
    fit(state, loader, step, callbacks, config, total_steps=4)
    return recording.calls


def test_the_loop_calls_each_callback_at_its_interval_and_all_after_the_last_step(state, loader, step):
    assert calls_of(state, loader, step) == [
        "verify 0",
        "poll 1",
        "report 2", "save 2",
        "check 3", "verify 3", "poll 3",
        "report 4", "verify 4", "save 4 last",
    ]  # fmt: skip


def test_a_report_ends_after_the_next_step_or_before_a_verification_or_a_save(state, loader, step):
    sections = SECTIONS | {
        "log": {"every_steps": 1},
        "eval": {"every_steps": 9},
        "checkpoint": {"every_steps": 3},
    }
    config = build_config({"data": {"train": "x"}} | sections, "test")
    assert calls_of(state, loader, step, config=config, stop_at=4) == [
        "verify 0",
        "begin report 1", "poll 1",
        "finish report 1", "begin report 2", "poll 2",
        "finish report 2", "report 3", "save 3",
        "report 4", "verify 4", "check 4", "save 4 last",
    ]  # fmt: skip


def test_a_signal_ends_a_report_and_checks_the_step_before_its_save(state, loader, step):
    config = build_config({"data": {"train": "x"}} | SECTIONS | {"log": {"every_steps": 1}}, "test")
    calls = calls_of(state, loader, step, config=config, stop_at=1)
    assert calls == ["verify 0", "begin report 1", "finish report 1", "check 1", "save 1 last"]


@pytest.mark.parametrize(
    ("options", "part", "calls"),
    [
        ({"stop_at": 1}, slice(None), ["verify 0", "check 1", "save 1 last"]),
        ({"interrupted": True}, slice(None), ["verify 0", "save 0 last"]),
        ({"resumed": True}, slice(1), ["poll 1"]),
        ({"resumed": True, "unverified": True}, slice(3), ["verify 0", "save 0", "poll 1"]),
    ],
    ids=["signal", "signal in the first verification", "resumed", "verification repeated"],
)
def test_the_loop_saves_where_it_is_asked_to_and_a_resumed_run_verifies_only_what_was_interrupted(
    state, loader, step, options, part, calls
):
    assert calls_of(state, loader, step, **options)[part] == calls
    assert state.step == 0 or "interrupted" not in options
