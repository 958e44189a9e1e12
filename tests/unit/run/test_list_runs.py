"""List of runs, from the files that they leave."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from facetrain.config.loading import build_config, dump_config
from facetrain.errors import DivergedError, RunError, UsageError
from facetrain.run.folder import run_state
from facetrain.run.folder.lock import RunLock
from facetrain.run.folder.run_state import Start, read_state, record_end, train_recorded
from facetrain.run.report import list_runs as run_list
from facetrain.run.report.list_runs import format_runs, list_runs
from facetrain.telemetry.jsonl import JsonLines
from tests.support.command import facetrain

START = Start(step=0, ranks=1, device="cpu")


def make_run(folder):
    folder.mkdir()
    (folder / "config.yaml").write_text("{}\n")
    (folder / "environment.json").write_text("{}\n")
    lines = JsonLines(folder / "metrics.jsonl")
    lines.write(0, {"lfw/accuracy": 0.5})
    for step in (10, 20):
        lines.write(step, {"loss": 30.0 - step})
    lines.write(20, {"lfw/accuracy": 0.75})
    lines.write(30, {"lfw/accuracy": 0.625})
    lines.close()
    for step in (10, 20):
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    return folder


def train_as(folder, outcome):
    """Record a run that returns an exit code or raises an error."""

    def train():
        assert read_state(folder).state == "running"
        if isinstance(outcome, int):
            return outcome
        raise outcome

    lock = RunLock(folder)
    lock.acquire()
    with suppress(DivergedError, RunError, KeyError, KeyboardInterrupt, SystemExit):
        train_recorded(folder, START, 40, train)
    lock.release()


def test_a_saved_step_counts_that_a_killed_run_has_not_reported(tmp_path):
    folder = make_run(tmp_path / "killed")
    (folder / "checkpoints" / "step_00000035").mkdir()
    (run,) = list_runs(folder)
    assert (run.step, run.checkpoint) == (35, 35)


@pytest.mark.parametrize(
    ("outcome", "state", "reason"),
    [
        (0, "finished", ""),
        (143, "stopped", ""),
        (DivergedError("the loss is nan", {}), "failed", "the loss is nan"),
        (KeyboardInterrupt(), "failed", "ended by SIGINT"),
        (SystemExit(143), "failed", "ended by SIGTERM"),
        (SystemExit(255), "failed", "SystemExit: 255"),
        (KeyError("glasses"), "failed", "KeyError: 'glasses'"),
        (DivergedError("https://ann:hunter2@host/x?sig=hunter3", {}), "failed", "https://host/x"),
    ],
)
def test_the_list_has_state_step_loss_and_best_accuracy(tmp_path, outcome, state, reason):
    train_as(make_run(tmp_path / "tiny"), outcome)
    (run,) = list_runs(tmp_path)
    assert (run.state, run.reason, run.step, run.total_steps, run.checkpoint) == (state, reason, 30, 40, 20)
    assert run.loss == 10.0 and run.best == {"lfw": 0.75}
    header, row = format_runs([run]).splitlines()
    assert header.split()[:3] == ["run", "state", "step"]
    assert row.split() == ["tiny", state, "30", "of", "40", "20", "10.0000", "lfw", "75.00%"]


def test_a_run_whose_process_was_killed_has_failed(tmp_path):
    folder = make_run(tmp_path / "tiny")
    script = (
        "import os; from pathlib import Path; from facetrain.run.folder.lock import RunLock\n"
        "from facetrain.run.folder.run_state import *\n"
        f"folder = Path({str(folder)!r}); assert RunLock(folder).acquire() is None\n"
        "train_recorded(folder, Start(step=0, ranks=1, device='cpu'), 40, lambda: os._exit(9))"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    state = read_state(folder)
    assert state.state == "failed" and "ended without a message" in state.reason and state.total_steps == 40


def test_a_run_is_alive_as_long_as_its_lock_is(tmp_path):
    folder = make_run(tmp_path / "tiny")
    (folder / "state.json").write_text(json.dumps({"state": "running", "total_steps": 40}))
    assert read_state(folder).state == "failed", "there is no lock"
    lock = RunLock(folder)
    lock.acquire()
    assert read_state(folder).state == "running"
    content = json.loads((folder / "run.lock").read_text())
    lock.release()
    for changes, state in (({"pid_start": "1"}, "failed"), ({"machine": "another"}, "running")):
        (folder / "run.lock").write_text(json.dumps(content | changes))
        assert read_state(folder).state == state
    os.utime(folder / "run.lock", (0, 0))
    assert read_state(folder).state == "failed", "the other machine no longer rewrites it"
    (folder / "run.lock").unlink()
    (folder / "run.lock").mkdir()
    assert read_state(folder).state == "failed"


def test_a_folder_that_cannot_be_read_is_named_beside_the_list(tmp_path, monkeypatch, capfd):
    for name in ("mine", "other"):
        make_run(tmp_path / name)

    def is_run(folder):
        if folder.name == "other":
            raise PermissionError(13, "Permission denied", str(folder))
        return folder.name == "mine"

    monkeypatch.setattr(run_list, "is_run", is_run)
    assert [Path(run.folder).name for run in list_runs(tmp_path)] == ["mine"]
    assert "other: Permission denied; it is not listed" in capfd.readouterr().err


def test_starts_are_kept_over_restarts(tmp_path):
    folder = make_run(tmp_path / "tiny")
    train_as(folder, 143)
    train_recorded(folder, Start(step=20, ranks=2, device="cpu"), 40, lambda: 0)
    starts = read_state(folder).starts
    assert [(start.step, start.ranks) for start in starts] == [(0, 1), (20, 2)]
    assert all(start.time.endswith("+00:00") for start in starts)


def test_a_state_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_state, "write_atomically", refuse)
    assert train_recorded(tmp_path, START, 40, lambda: 0) == 0


def test_the_command_lists_runs_as_table_and_as_json(tmp_path):
    make_run(tmp_path / "tiny")
    (tmp_path / "no run").mkdir()
    table = facetrain("runs", tmp_path).stdout
    assert "tiny  failed  30 of ?" in table and "no run" not in table
    (run,) = json.loads(facetrain("runs", tmp_path, "--json").stdout)
    assert run["best"] == {"lfw": 0.75} and run["folder"] == str(tmp_path / "tiny")


def test_a_folder_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"/absent: .*run\.dir"):
        list_runs(tmp_path / "absent")


def test_a_failure_that_names_a_path_outside_of_utf_8_is_recorded(tmp_path):
    def train():
        raise RunError("/data/caf\udce9: missing")

    with pytest.raises(RunError, match="missing"):
        train_recorded(tmp_path, START, 40, train)
    assert read_state(tmp_path).reason == "/data/caf\\xe9: missing"


def test_the_page_of_runs_has_the_table_and_a_curve_of_each(tmp_path):
    for name in ("a", "b$<i>"):
        make_run(tmp_path / name)
    page = tmp_path / "runs.html"
    done = facetrain("runs", tmp_path, "--page", page)
    assert done.returncode == 0 and "75.00%" in done.stdout, done.stderr
    text = page.read_text()
    assert text.count("<svg") == 4 and "75.00%" in text and "b$&lt;i&gt;" in text and "<i>" not in text


def test_the_page_of_runs_names_the_best_one_and_colors_each_state(tmp_path):
    for name, accuracy, outcome in (("a", 0.9, 0), ("b", 0.95, 143), ("c", 0.8, RunError("full"))):
        folder = make_run(tmp_path / name)
        (folder / "metrics.jsonl").write_text(f'{{"step": 40, "lfw/accuracy": {accuracy}}}\n')
        train_as(folder, outcome)
    page = tmp_path / "runs.html"
    run_list.write_runs_page(list_runs(tmp_path), "runs", page)
    text = page.read_text()
    headline, table = text.split("<table>")
    assert "95.00%" in headline and " b," in headline
    assert [f'class="{kind}">{state}' in table for kind, state in STATES] == [True] * 3


def test_the_best_run_is_the_best_on_the_set_that_most_runs_have(tmp_path):
    for name, record in (
        ("b", {"lfw/accuracy": 0.9}),
        ("a", {"lfw/accuracy": 0.99999}),
        ("c", {"agedb/accuracy": 0.99}),
        ("d", {"loss": 0.0}),
    ):
        folder = make_run(tmp_path / name)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1} | record))
    for step in (10, 20):
        (tmp_path / "d" / "checkpoints" / f"step_{step:08d}").rmdir()
    train_as(tmp_path / "d", RunError("the disk is full"))
    runs = list_runs(tmp_path)
    assert run_list._best_of(runs) == ("good", "99.9990%", "best accuracy on lfw: a, of 2 runs")
    assert run_list._best_of(runs[3:]) is None
    rows = [line.split() for line in format_runs(runs).splitlines()]
    assert [row[0] for row in rows] == ["run", "a", "b", "c", "d"]
    assert rows[3] == ["c", "failed", "20", "of", "?", "20", "–", "agedb", "99.00%"]
    assert rows[4] == ["d", "failed", "1", "of", "40", "–", "0", "–"]
    (tmp_path / "d" / "checkpoints" / "step_00000000").mkdir()
    assert format_runs(list_runs(tmp_path / "d")).split()[-3:] == ["0", "0", "–"]


def test_list_and_page_have_the_loss_that_is_trained(tmp_path):
    make_run(tmp_path / "margin")
    folder = make_run(tmp_path / "teacher")
    lines = JsonLines(folder / "metrics.jsonl", resume_at=30)
    lines.write(30, {"distill_loss": 0.5})
    lines.close()
    # A config that cannot be read, as of `margin`, counts as one with a margin loss.
    distill = {"teacher": "x", "loss": "cosine", "margin_weight": 0}
    config = build_config({"data": {"train": "x"}, "distill": distill}, "test")
    (folder / "config.yaml").write_text(dump_config(config))
    listed = list_runs(tmp_path)
    assert [run.loss for run in listed] == [10.0, 0.5]
    page = tmp_path / "runs.html"
    for runs, panels in ((listed, ["loss", "loss to the teacher"]), (listed[1:], ["loss to the teacher"])):
        run_list.write_runs_page(runs, "runs", page)
        assert re.findall("<!-- (loss.*) -->", page.read_text()) == panels


STATES = (("good", "finished"), ("warn", "stopped"), ("bad", "failed"))


def test_the_end_of_a_run_can_be_recorded_before_its_command_ends(tmp_path):
    assert train_recorded(tmp_path, START, 40, lambda: 130) == 130
    record_end(tmp_path, "finished", "no gain")
    ended = read_state(tmp_path)
    assert (ended.state, ended.reason, ended.total_steps) == ("finished", "no gain", 40)
    assert [start.step for start in ended.starts] == [START.step]
