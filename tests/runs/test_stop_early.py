"""Runs that end when their verification no longer improves."""

import json
import math

import pytest

from facetrain.config.loading import load_config
from facetrain.run.report.list_runs import format_runs, list_runs
from facetrain.training.early_stop import EarlyStop
from facetrain.training.settings import StopEarlySettings
from tests.runs.conftest import train_and_resume
from tests.support import training
from tests.support.runs import metrics


def test_a_gain_exceeds_the_best_value_and_a_value_that_is_no_number_is_none():
    settings = StopEarlySettings(metric="lfw/accuracy", patience=2, min_gain=0.25)
    state, ends = EarlyStop(), []
    # The first value, the highest, is of the network before training.
    for step, value in enumerate((0.9, math.nan, 0.25, 0.5, 0.75, 0.25, None, math.inf)):
        state = state.after(step, {} if value is None else {"lfw/accuracy": value}, settings)
        ends.append(bool(state.reason(settings)))
    assert (state.best, state.best_step, state.waited) == (0.75, 4, 3) and ends == [False] * 6 + [True] * 2
    assert not state.reason(settings.model_copy(update={"metric": "lfw/auc"})), (
        "the waits were for another metric"
    )


def test_the_count_for_another_metric_begins_anew():
    before = EarlyStop(metric="lfw/accuracy", best=0.9, best_step=4, waited=1)
    after = before.after(6, {"lfw/auc": 0.5}, StopEarlySettings(metric="lfw/auc", patience=2))
    assert after == EarlyStop(metric="lfw/auc", best=0.5, best_step=6)


def test_a_run_that_is_verified_without_gain_after_its_last_step_has_not_stopped_early(
    describe, tmp_path, capsys
):
    # No accuracy rises by more than one: of the verifications at steps 1 and 2, the second has no gain.
    rule = "train.stop_early={metric: val/accuracy, patience: 1, min_gain: 1}"
    config, folder = load_config(describe(steps=2), [rule, "eval.every_steps=1"]), tmp_path / "run"
    assert training.train(config, folder) == 0
    assert json.loads((folder / "state.json").read_text())["reason"] == ""
    options = "--set train.max_steps=MORE --set train.stop_early.patience=MORE"
    output = capsys.readouterr().out
    assert f"resume {folder} {options}\n" in output and "stopped early" not in output
    assert training.resume(config, folder) == 0
    output = capsys.readouterr().out
    assert f"already finished, at step 2; to train on: facetrain resume {folder} {options}\n" in output


def test_verifications_before_a_run_went_on_without_the_rule_do_not_count(describe, tmp_path):
    rule = "train.stop_early={metric: val/accuracy, patience: 2, min_gain: 1}"
    values, folder = ["eval.every_steps=1"], tmp_path / "run"
    assert training.train(load_config(describe(steps=9), [*values, rule]), folder) == 0
    for changes, steps in (
        (["train.stop_early=null", "train.max_steps=4"], 4),
        ([rule, "train.max_steps=9"], 7),
    ):
        assert training.go_on(folder, changes=changes) == 0
        assert metrics(folder)[-1]["step"] == steps


@pytest.mark.slow
def test_a_run_ends_at_the_same_step_whether_it_was_interrupted_or_not(describe, tmp_path, capsys):
    # No accuracy rises by more than one: of the verifications at steps 2, 4 and 6, two have no gain.
    rule = "train.stop_early={metric: val/accuracy, patience: 2, min_gain: 1}"
    # AdaFace has state of its own in the checkpoint: averages of the lengths of embeddings.
    described = describe(dropout=0.2, margin="adaface")
    config, folder = load_config(described, [rule, "eval.every_steps=2"]), tmp_path / "run"
    train_and_resume(config, folder, step=4)
    assert [record["step"] for record in metrics(folder)] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    reason = json.loads((folder / "state.json").read_text())["reason"]
    assert reason.startswith("stopped early: no gain of val/accuracy in 2 verifications over ")
    assert capsys.readouterr().out.count(f"  {reason}\n") == 2 and "finished early  6 of 12" in format_runs(
        list_runs(folder)
    )

    weights = (folder / "model.safetensors").read_bytes()
    assert training.resume(config, folder) == 0
    assert f"was already finished, at step 6 ({reason})" in capsys.readouterr().out
    assert weights == (folder / "model.safetensors").read_bytes()
    # As after a crash between the last checkpoint and the results.
    (folder / "state.json").unlink()
    (folder / "model.safetensors").unlink()
    assert training.resume(config, folder) == 0 and metrics(folder)[-1]["step"] == 6
    assert weights == (folder / "model.safetensors").read_bytes()
    patient = load_config(folder / "config.yaml", ["train.stop_early.patience=3"])
    assert training.resume(patient, folder) == 0
    assert max(record["step"] for record in metrics(folder)) == 8
