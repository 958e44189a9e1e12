"""Execution modes that a run may use, and the measurement that chooses one of them."""

import logging
from dataclasses import replace

import pytest
import torch

from facetrain.errors import ConfigError
from facetrain.run.build.execution import begin_trial
from facetrain.telemetry.log import logger
from facetrain.training.execution import Execution, ExecutionSettings, possible_modes
from facetrain.training.execution_trial import ExecutionTrial

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
SETTINGS = ExecutionSettings(compile="auto", cuda_graphs="auto", fused="auto", device=GPU, batch_size=128)


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ({}, ("eager", "compiled", "graphs")),
        ({"device": CPU}, ("eager",)),
        ({"device": CPU, "compile": "on"}, ("compiled",)),
        ({"compile": "off", "cuda_graphs": "off"}, ("eager",)),
        ({"compile": "on"}, ("compiled",)),
        ({"cuda_graphs": "on"}, ("graphs",)),
        ({"cuda_graphs": "on", "batch_size": 512}, ("graphs",)),
        ({"batch_size": 129}, ("eager", "compiled")),
        ({"fused": "on"}, ("eager", "graphs")),
        ({"checkpoint_activations": True}, ("eager", "compiled")),
        ({"synchronized": True}, ("eager", "compiled")),
        ({"deterministic": True}, ("eager",)),
        ({"deterministic": True, "cuda_graphs": "on"}, ("graphs",)),
    ],
)
def test_the_config_and_the_machine_decide_which_modes_are_tried(changes, modes):
    assert possible_modes(replace(SETTINGS, **changes)) == modes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": CPU}, "CUDA graphs need a GPU, and this run is on cpu"),
        ({"compile": "on"}, "train.compile: on compiles the same network"),
        ({"checkpoint_activations": True}, "model.checkpoint_activations"),
        ({"synchronized": True}, "batch norm over all ranks"),
    ],
)
def test_required_graphs_that_cannot_be_used_name_the_reason(changes, reason):
    with pytest.raises(ConfigError, match=f"^train.cuda_graphs: on is not possible: {reason}"):
        possible_modes(replace(SETTINGS, cuda_graphs="on", **changes))


def test_the_log_has_the_reason_why_auto_is_off(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO):
        possible_modes(replace(SETTINGS, batch_size=256, fused="on"))
    assert "train.compile: auto is off: train.fused: on" in caplog.text
    assert "train.cuda_graphs: auto is off: with 256 images per rank (more than 128)" in caplog.text


class FixedTimer:
    """Timer that returns given seconds, and counts the measured steps."""

    def __init__(self, *seconds):
        self._seconds, self.began, self.ended = list(seconds), 0, 0

    def begin(self):
        self.began += 1

    def end(self):
        self.ended += 1

    def take_median_s(self):
        return self._seconds.pop(0)


class Network(torch.nn.Module):
    """Network that only notes whether compiled code is in use."""

    compiled = compilation_has_failed = False

    def use_compiled_code(self, use):
        self.compiled = use


def make_execution(compile="auto", cuda_graphs="auto"):
    return Execution(Network(), replace(SETTINGS, compile=compile, cuda_graphs=cuda_graphs))


def run_trial(execution, timer):
    """Take steps until the trial ends; return the mode of each step, the chosen mode and the report."""
    lines, modes, chosen = [], [], None
    trial = ExecutionTrial(execution, timer, lines.append)
    while chosen is None:
        trial.begin_step()
        modes.append(execution.mode)
        assert execution._network.compiled == (execution.mode == "compiled")
        assert execution.network.enabled == (execution.mode == "graphs")
        chosen = trial.end_step()
    assert timer.began == timer.ended
    return modes, chosen, lines


def test_the_fastest_mode_of_the_first_hundred_steps_stays():
    execution, timer = make_execution(), FixedTimer(0.050, 0.040, 0.045)
    modes, chosen, lines = run_trial(execution, timer)
    assert chosen == execution.mode == "compiled"
    assert len(modes) <= 100 and list(dict.fromkeys(modes)) == ["eager", "compiled", "graphs"]
    assert timer.began == 60, "20 steps of each mode are measured"
    assert lines == [
        "the backbone runs compiled from now on: a step takes 50.0 ms eager, 40.0 ms compiled, 45.0 ms graphs "
        "(medians of 20 steps)"
    ]


def test_a_gain_within_the_noise_changes_nothing():
    assert run_trial(make_execution(), FixedTimer(0.0500, 0.0495, 0.0491))[1] == "eager"


def test_a_mode_that_has_failed_is_not_chosen():
    execution = make_execution()
    execution.network.failure = "no memory left"
    _, chosen, (line,) = run_trial(execution, FixedTimer(0.050, 0.048, 0.010))
    assert chosen == "compiled" and "graphs failed, see the log" in line


def test_code_that_could_not_be_compiled_is_not_chosen():
    execution = make_execution()
    execution._network.compilation_has_failed = True
    assert run_trial(execution, FixedTimer(0.050, 0.010, 0.048))[1] == "graphs"


class State:
    """The fields of a run's state that the choice reads."""

    def __init__(self, step=0, execution_mode=None):
        self.step, self.execution_mode, self.world = step, execution_mode, self
        self.device = CPU


class Schedule:
    total_steps = 5000


def test_a_resumed_run_keeps_the_mode_of_its_checkpoint():
    execution = make_execution()
    assert begin_trial(execution, State(500, "compiled"), Schedule, lambda line: None) is None
    assert execution.mode == "compiled"


def test_a_resumed_run_measures_again_if_its_config_excludes_the_mode():
    execution = make_execution(cuda_graphs="off")
    assert begin_trial(execution, State(500, "graphs"), Schedule, lambda line: None) is not None


def test_a_short_run_measures_nothing_and_reports_why():
    lines, execution = [], make_execution()
    assert begin_trial(execution, State(4500), Schedule, lines.append) is None
    assert execution.mode == "eager" and "500 steps are too few" in lines[0]


def test_a_run_with_one_possible_mode_measures_nothing():
    assert begin_trial(make_execution("off", "off"), State(), Schedule, pytest.fail) is None


def test_recorded_graphs_are_discarded_where_a_stage_begins_and_the_mode_stays():
    execution = make_execution(cuda_graphs="on")
    execution.network._graphs = object()
    execution.record_again()
    assert execution.network._graphs is None and execution.network.enabled and execution.mode == "graphs"
    eager = make_execution()
    eager.record_again()
    assert eager.mode == "eager" and not eager.network.enabled
