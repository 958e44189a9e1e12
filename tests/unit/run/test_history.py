"""History of a run: as exact as its records, in memory that does not grow with them."""

import math

import numpy as np
import pytest

from facetrain.run.report import history as module
from facetrain.run.report.history import History
from facetrain.telemetry.jsonl import GrowingJsonLines, JsonLines


def history_of(records):
    history = History()
    for record in records:
        history.add(record)
    return history


def test_a_history_has_first_last_and_bounds_of_every_metric(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step, loss in ((1, 5.0), (2, math.nan), (3, 9.0), (4, 2.0)):
        lines.write(step, {"loss": loss})
    lines.write(4, {"lfw/accuracy": 0.9, "cfp/accuracy": 0.7})
    lines.write(8, {"lfw/accuracy": 0.8})
    lines.close()
    found = History.read(tmp_path)
    loss = found.metrics["loss"]
    assert (loss.first, loss.last, loss.low, loss.high) == ((1, 5.0), (4, 2.0), 2.0, 9.0)
    assert loss.curve[0] == [1, 2, 3, 4] and math.isnan(loss.curve[1][1])
    assert found.step == 8 and found.sets == ["lfw", "cfp"] and found.best == {"lfw": 0.9, "cfp": 0.7}
    assert History.read(tmp_path / "empty").metrics == {}


def test_the_accuracy_of_step_0_is_never_the_best():
    untrained = {"step": 0, "lfw/accuracy": 0.71}
    assert history_of([untrained, {"step": 3, "loss": 1.0}]).best == {}
    found = history_of([untrained, {"step": 5, "lfw/accuracy": 0.5}, {"step": 9, "lfw/accuracy": 0.6}])
    assert found.best == {"lfw": 0.6} and found.metrics["lfw/accuracy"].first == (0, 0.71)


def test_a_long_curve_is_thinned_and_ends_with_its_last_point(monkeypatch):
    monkeypatch.setattr(module, "_MOST_STRETCHES", 10)
    for records in (11, 20, 21, 100, 161):
        loss = history_of({"step": n, "loss": float(n)} for n in range(records)).metrics["loss"]
        steps, values = loss.curve
        assert steps == sorted(set(steps)) and values == [float(n) for n in steps]
        assert steps[0] == 0 and steps[-1] == records - 1 and len(steps) <= 21
        assert len(steps) == records or records > 20
        assert loss.median == np.median(range(0, records, loss._length))


@pytest.mark.parametrize("at", range(37, 53))
@pytest.mark.parametrize("value", [50.0, -50.0, "nan"])
def test_a_single_spike_or_gap_stays_in_a_thinned_curve(monkeypatch, at, value):
    monkeypatch.setattr(module, "_MOST_STRETCHES", 10)
    found = history_of({"step": n, "loss": value if n == at else 5.0 + n % 3} for n in range(200))
    steps, values = found.metrics["loss"].curve
    assert np.isclose(values[steps.index(at)], float(value), equal_nan=True)


def test_only_the_last_verifications_are_kept():
    found = history_of({"step": n, "lfw/accuracy": 0.5} for n in range(500))
    assert len(found.verifications) == 100 and found.verifications[-1]["step"] == 499


def test_a_live_history_reads_each_record_once_and_waits_for_the_end_of_a_line(tmp_path, monkeypatch):
    path, live, added = tmp_path / "metrics.jsonl", History(), []
    lines = GrowingJsonLines(path)
    add = History.add
    monkeypatch.setattr(
        History, "add", lambda self, record: (added.append(record["step"]), add(self, record))
    )
    live.extend(lines)
    assert live.metrics == {}
    for text in (
        '{"step": 1, "loss": 5.0}\n{"step": 2, "lo',
        'ss": 4.0}\nno record\n',
        '{"step": 3, "loss": 3.0}\n',
    ):
        with path.open("a") as file:
            file.write(text)
        live.extend(lines)
    assert added == [1, 2, 3] and live == History.read(tmp_path)
