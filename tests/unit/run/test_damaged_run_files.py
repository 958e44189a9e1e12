"""Damaged files of a run folder: each reader skips or refuses them, and none waits or raises an unexpected error."""

import json
import os

import pytest

from facetrain.config.loading import load_config
from facetrain.errors import ConfigError, RunError
from facetrain.files import os_errors_as, read_regular_text, write_atomically
from facetrain.run.folder.earlier import missing_newest
from facetrain.run.folder.environment import recorded_environment
from facetrain.run.folder.run_state import read_state
from facetrain.run.report.history import records_of
from facetrain.run.report.list_runs import format_runs, list_runs
from facetrain.run.report.page import write_run_report
from facetrain.telemetry.jsonl import JsonLines, read_jsonl
from facetrain.telemetry.log import log_to

NESTED = "[" * 100_000
DAMAGED_LINES = [
    b"\xff\xfe\x80",
    NESTED.encode(),
    b"[]",
    b"null",
    b'{"step": "x"}',
    b'{"step": 1e308}',
    b'{"step": 3, "loss": 1' + 400 * b"0" + b"}",
    b'{"step": 3, "lo',
]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("data: {train: none}\neval: {targets: []}\n")
    (folder / "environment.json").write_text("{}")
    return folder


def test_damaged_lines_of_metrics_are_left_out_and_removed_at_the_next_start(run):
    path = run / "metrics.jsonl"
    good = [b'{"step": 1, "loss": 2.0}', b'{"step": 2, "loss": 1.0}']
    path.write_bytes(b"\n".join([good[0], *DAMAGED_LINES[:-1], good[1], DAMAGED_LINES[-1]]))
    assert read_jsonl(path) == list(records_of(run)) == [json.loads(line) for line in good]
    JsonLines(path, resume_at=2).close()
    assert path.read_bytes().splitlines() == good


@pytest.mark.parametrize("name", ["state.json", "environment.json"])
@pytest.mark.parametrize("content", [NESTED, "", "[]", "null", "{", "\0", '{"starts": [1, {"step": "x"}]}'])
def test_damaged_state_and_environment_count_as_empty(run, name, content):
    (run / name).write_text(content)
    assert read_state(run).starts == () and recorded_environment(run).get("threads") is None
    (listed,) = list_runs(run)
    assert listed.state == "failed" and "0 of ?" in format_runs([listed])


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "state.json", "environment.json"])
def test_a_pipe_in_place_of_a_file_blocks_no_reader(run, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular_text(run / name)
    if name == "environment.json":
        with pytest.raises(RunError, match=r"environment\.json: .*not a regular file"):
            recorded_environment(run)
    assert read_state(run).starts == ()
    (run / "checkpoints").mkdir()
    os.mkfifo(run / "checkpoints" / "latest")
    assert missing_newest(run) is None
    if name != "environment.json":
        write_run_report(run, run / "report.html")
        assert "Warnings" in (run / "report.html").read_text()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_run_does_not_start_with_something_else_than_files_for_its_log_and_metrics(run, make):
    make(run / "log.txt")
    make(run / "metrics.jsonl")
    with pytest.raises(RunError, match=r"log\.txt: "):
        log_to(run / "log.txt", 0)
    with pytest.raises(RunError, match=r"metrics\.jsonl: .*; remove it"):
        JsonLines(run / "metrics.jsonl", resume_at=1)


def test_a_config_that_is_a_link_to_itself_is_refused(run):
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to("config.yaml")
    with pytest.raises(ConfigError, match="symbolic links"):
        load_config(run / "config.yaml")


def test_an_error_of_a_rename_names_the_file_and_not_its_temporary_copy(run):
    (run / "latest").mkdir()
    with pytest.raises(RunError) as caught, os_errors_as(RunError, run):
        write_atomically(run / "latest", "text")
    assert str(caught.value) == f"{run / 'latest'}: Is a directory"
