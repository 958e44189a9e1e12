"""Sinks of metrics: TensorBoard, Weights & Biases, and what happens to a run whose sink fails."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from facetrain.distributed import ranks, watchdog_process
from facetrain.errors import ConfigError, UsageError
from facetrain.settings import OwnPart
from facetrain.telemetry.log import log_to, logger, stop_logging
from facetrain.telemetry.sink import _HURRIED_S, CLOSE_S, LoggedRun, Sinks
from tests.support.command import environment
from tests.support.events import read_events
from tests.support.faults import full, small_disk


def logged(folder, resume_at=None):
    return LoggedRun(folder, folder.resolve().name, "a1b2c3", {"seed": 0}, resume_at)


def test_tensorboard_has_the_metrics_at_once_in_groups_under_the_name_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sinks = Sinks(["tensorboard"], logged(Path()))
    sinks.write(1, {"loss": 1.5, "lr": 0.1, "wait_s": 2.0, "epoch": 0.0, "lfw/accuracy": 0.5})
    events = read_events(tmp_path / "tensorboard" / tmp_path.name)
    sinks.close()
    tags = {"loss/loss", "lr/lr", "speed/wait_s", "run/epoch", "eval/lfw/accuracy"}
    assert set(events.Tags()["scalars"]) == tags
    assert [(event.step, event.value) for event in events.Scalars("loss/loss")] == [(1, 1.5)]


@pytest.mark.parametrize(
    ("starts", "shown"),
    [([(None, (1, 2, 3)), (2, (3, 4))], [1, 2, 3, 4]), ([(None, (1, 2, 3)), (None, (1, 2))], [1, 2])],
    ids=["resumed", "started over"],
)
def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path, monkeypatch, starts, shown):
    for start, (resume_at, steps) in enumerate(starts):
        # TensorBoard reads files in the order of the seconds in their names.
        monkeypatch.setattr("time.time", lambda start=start: float(start))
        sinks = Sinks(["tensorboard"], logged(tmp_path, resume_at))
        for step in steps:
            sinks.write(step, {"loss": float(step)})
        sinks.close()
    events = read_events(tmp_path / "tensorboard" / tmp_path.name)
    assert [event.step for event in events.Scalars("loss/loss")] == shown


def test_a_sink_on_a_full_disk_is_given_up_with_one_warning(tmp_path, capfd):
    before = set(threading.enumerate())
    disk = tmp_path / "disk"
    with small_disk(disk, size_kib=64):
        sinks = Sinks(["tensorboard"], logged(disk))
        with full(disk):
            for step in range(100):
                sinks.write(step, {f"number_{n}": 0.0 for n in range(50)})
            for thread in set(threading.enumerate()) - before:
                if thread.name != "sink tensorboard":  # it ends when the sink is closed
                    thread.join(timeout=100)
        sinks.write(100, {"loss": 1.0})
        sinks.close()
    assert set(threading.enumerate()) <= before
    assert capfd.readouterr().err.count("warning: log.sinks: tensorboard failed") == 1


def test_a_sink_without_its_package_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Exception, match=r"facetrain\[wandb\]") as refused:
        Sinks(["wandb"], logged(tmp_path))
    assert refused.value.exit_code == 2


class RenamingSink:
    def __init__(self, run):
        pass

    def write(self, step, values):
        values["train/loss"] = values.pop("loss")

    def close(self):
        pass


def test_a_sink_that_changes_its_metrics_changes_those_of_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: RenamingSink)
    sinks, values = Sinks([OwnPart(type="own:Sink"), "tensorboard"], logged(tmp_path)), {"loss": 1.0}
    sinks.write(1, values)
    sinks.close()
    assert values == {"loss": 1.0}
    assert read_events(tmp_path / "tensorboard" / tmp_path.name).Tags()["scalars"] == ["loss/loss"]


@pytest.mark.slow
def test_a_server_of_wandb_that_does_not_answer_ends_no_run_but_a_missing_login_does(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    errors = [
        wandb.errors.CommError("context deadline exceeded\nwhile retrying: connection refused"),
        wandb.errors.UsageError("No API key."),
        wandb.errors.AuthenticationError("Wrong key."),
    ]
    monkeypatch.setattr(wandb, "init", Mock(side_effect=errors))
    (fault,) = Sinks(["wandb"], logged(tmp_path)).faults
    assert fault.startswith("log.sinks: wandb cannot be opened (context deadline exceeded while retrying")
    for _ in range(2):
        with pytest.raises(UsageError, match=r"wandb: .* key, or set WANDB_MODE=offline"):
            Sinks(["wandb"], logged(tmp_path))


@pytest.mark.slow
def test_wandb_keeps_the_numbers_of_a_run_that_has_gone_back(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks = Sinks(["wandb"], logged(tmp_path))
    # As to the server, where a resume continues the same run of W&B.
    for step, loss in ((8, 0.125), (3, 0.375), (9, 0.625)):
        sinks.write(step, {"loss": loss})
    sinks.close(CLOSE_S)
    wandb.teardown()  # as when the process exits: W&B's own process may still write the file
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert numbers(history(path), "loss") == [(8, 0.125), (3, 0.375), (9, 0.625)]


class OwnSink:
    closed = 0

    def __init__(self, run, address=""):
        if address == "down":
            raise ConnectionRefusedError(111, "Connection refused")
        if address == "port":
            raise TypeError("no number")

    def close(self):
        OwnSink.closed += 1


def test_a_sink_that_cannot_be_opened_is_given_up_and_wrong_options_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: OwnSink)
    sinks = Sinks([OwnPart(type="own:Sink", options={"address": "down"}), "tensorboard"], logged(tmp_path))
    sinks.write(1, {"loss": 1.0})
    sinks.close()
    (fault,) = sinks.faults
    assert fault.startswith("log.sinks: own:Sink cannot be opened (Connection refused)")
    with monkeypatch.context() as patched:
        patched.setattr("facetrain.own_parts._imports", {__name__: "own:Sink"})
        (fault,) = Sinks([OwnPart(type="own:Sink", options={"address": "port"})], logged(tmp_path)).faults
        assert "TypeError: no number" in fault, "an error inside of it says nothing of the options"
    assert read_events(tmp_path / "tensorboard" / tmp_path.name).Tags()["scalars"] == ["loss/loss"]
    wrong = OwnPart(type="own:Sink", options={"adress": 1})
    with pytest.raises(ConfigError, match="log.sinks: own:Sink: .*'adress'"):
        Sinks([OwnPart(type="own:Sink"), wrong], logged(tmp_path))
    assert OwnSink.closed == 1, "the one that was open"


@pytest.mark.parametrize(
    "error", [SystemExit("quota exceeded"), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_a_sink_that_asks_for_the_end_of_its_program_is_given_up_as_after_any_error(
    tmp_path, monkeypatch, capfd, error
):
    class EndingSink:
        def __init__(self, run, at):
            self.at = at
            self.end_at("open")

        def end_at(self, place):
            if self.at == place:
                raise error

        def write(self, step, values):
            self.end_at("write")

        def close(self):
            pass

    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: EndingSink)
    monkeypatch.setattr("facetrain.own_parts._imports", {__name__: "own:Sink"})
    sinks = Sinks(
        [OwnPart(type="own:Sink", options={"at": at}) for at in ("open", "write")], logged(tmp_path)
    )
    sinks.write(1, {"loss": 1.0})
    sinks.close()
    given_up = capfd.readouterr().err
    for line in (*sinks.faults, given_up):
        assert f"({__file__}:" in line and repr(error) in line, line
    assert len(sinks.faults) == given_up.count("own:Sink failed") == 1


def test_a_sink_that_cannot_be_closed_does_not_keep_the_others_open(tmp_path, monkeypatch, capfd):
    closed = []

    class Open:
        def __init__(self, run):
            pass

    class Closed(Open):
        def close(self):
            closed.append(True)

    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: parts[place])
    parts = {"own:Open": Open, "own:Closed": Closed}
    Sinks([OwnPart(type=place) for place in parts], logged(tmp_path)).close()
    assert closed and "own:Open failed" in capfd.readouterr().err


def test_sinks_that_were_given_up_are_closed_once(tmp_path, monkeypatch, capfd):
    closed = []

    class FailingSink:
        def __init__(self, run, at):
            self.at = at

        def fail_at(self, place):
            if self.at == place:
                raise RuntimeError("the connection is lost")

        def write(self, step, values):
            self.fail_at("write")

        def close(self):
            closed.append(self.at)
            self.fail_at("write")
            self.fail_at("close")

    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: FailingSink)
    places = ("write", "write", "close", "never")
    sinks = Sinks([OwnPart(type="own:Sink", options={"at": at}) for at in places], logged(tmp_path))
    sinks.write(0, {"loss": 1.0})
    assert not closed and capfd.readouterr().err.count("own:Sink failed") == 2
    sinks.write(1, {"loss": 1.0})
    sinks.close()
    sinks.close()
    assert sorted(closed) == ["close", "never", "write", "write"]
    assert capfd.readouterr().err.count("own:Sink failed") == 1


def test_a_sink_whose_server_is_gone_holds_up_neither_the_others_nor_the_end_of_the_run(
    tmp_path, monkeypatch, capfd
):
    server, closed, threads = threading.Event(), threading.Event(), []

    class WaitingSink:
        def __init__(self, run, waits=False):
            self.waits = waits
            threads.append(threading.current_thread())

        def write(self, step, values):
            assert threading.current_thread() in threads, (
                "some clients are bound to the thread that opened them"
            )

        def close(self):
            self.write(0, {})
            if self.waits:
                server.wait()
            else:
                closed.set()

    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: WaitingSink)
    own = [OwnPart(type="own:Gone", options={"waits": True}), OwnPart(type="own:Sink")]
    sinks = Sinks(own, logged(tmp_path))
    sinks.write(1, {"loss": 1.0})
    sinks.close(limit_s=0.0)
    assert closed.wait(60)
    late = "warning: log.sinks: own:Gone has not ended within 0 s, and may lack the last metrics"
    assert late in capfd.readouterr().err
    server.set()
    for thread in threads:
        thread.join()


def test_a_run_says_that_it_waits_for_a_sink(tmp_path, monkeypatch):
    lines, server = [], threading.Event()

    class WaitingSink:
        def __init__(self, run):
            pass

        def close(self):
            server.wait(60)

    def say(line, **_):
        lines.append(line)
        server.set()

    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: WaitingSink)
    monkeypatch.setattr("facetrain.telemetry.sink._QUIET_S", 0.0)
    monkeypatch.setattr("builtins.print", say)
    Sinks([OwnPart(type="own:Slow")], logged(tmp_path)).close(CLOSE_S)
    assert lines == ["waiting up to 60 s for the last metrics of own:Slow"]


def test_the_sinks_of_a_failed_run_are_waited_for_less_long_than_others_wait_for_their_rank():
    assert min(ranks._FAREWELL_S, watchdog_process._ENDED_S) - 2 > _HURRIED_S


def test_wandb_gives_up_the_upload_of_the_last_metrics_before_the_run_does(tmp_path, monkeypatch):
    # It waits once more when the process ends.
    wandb, settings = Mock(), []
    wandb.Settings = lambda **given: settings.append(given)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    Sinks(["wandb"], logged(tmp_path)).close(CLOSE_S)
    assert 0 < settings[0]["finish_timeout"] < CLOSE_S


def test_a_copy_of_a_run_folder_is_another_run_of_wandb(tmp_path, monkeypatch):
    wandb, ids = Mock(), []
    wandb.init = lambda id, **_: ids.append(id) or Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("a", "a:b %?", "a"):  # the characters of names that W&B refuses in an id
        (tmp_path / name).mkdir(exist_ok=True)
        Sinks(["wandb"], logged(tmp_path / name)).close(CLOSE_S)
    assert ids[0] == ids[2] != ids[1] and all(re.fullmatch(r"a1b2c3-\w+", each) for each in ids)


class RefusedSink(OwnSink):
    def write(self, step, values):
        raise RuntimeError("401 Unauthorized: https://ann:hunter2@host/log?token=hunter3")


def test_a_password_in_the_error_of_a_sink_is_neither_shown_nor_logged(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("facetrain.telemetry.sink.load_part", lambda place, key: RefusedSink)
    log = log_to(tmp_path / "log.txt", 0)
    Sinks([OwnPart(type="own:Sink")], logged(tmp_path)).write(1, {"loss": 1.0})
    logger.error("%s", "https://ann:hunter2@host/log?token=hunter3")
    stop_logging(log)
    text = capfd.readouterr().err + (tmp_path / "log.txt").read_text()
    assert text.count("https://host/log") == 3 and "hunter" not in text


CONTINUED = """
import sys
from pathlib import Path
from facetrain.telemetry.sink import LoggedRun, Sinks
resume_at, steps = (None, range(4)) if sys.argv[2] == "start" else (2, range(3, 6))
sinks = Sinks(["wandb"], LoggedRun(Path(sys.argv[1]), "run", "a1b2c3", {"optim": {"lr": 0.1}}, resume_at))
for step in steps:
    sinks.write(step, {"loss": float(step)})
    sinks.write(step, {"lfw/accuracy": 0.5})
sinks.close(60)
"""


@pytest.mark.slow
def test_wandb_keeps_an_offline_run_with_the_config_and_all_metrics(tmp_path):
    pytest.importorskip("wandb")
    for start in ("start", "resume"):
        command = [sys.executable, "-c", CONTINUED, tmp_path, start]
        done = subprocess.run(
            command, env=environment(WANDB_MODE="offline"), capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        ended = int(time.time())
        while int(time.time()) == ended:  # wandb names the folder of a run after the second of its start
            time.sleep(0.05)
    files = sorted((tmp_path / "wandb").glob("offline-run-*-a1b2c3-*/run-a1b2c3-*.wandb"))
    histories = [list(history(file)) for file in files]
    assert numbers(histories[0], "loss") == [(step, float(step)) for step in range(4)]
    assert numbers(histories[0], "lfw/accuracy") == [(step, 0.5) for step in range(4)]
    assert [step for step, _ in numbers(histories[1], "loss")] == [3, 4, 5]


def numbers(rows, name):
    """Return the steps and values of a metric."""
    return [(row["step"], row[name]) for row in rows if name in row]


def history(path):
    """Yield the metrics of each step in a small file of an offline run: records behind 7 bytes of length and kind."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()[7:]
    while len(data) > 7:
        length = int.from_bytes(data[4:6], "little")
        record = wandb_internal_pb2.Record.FromString(data[7 : 7 + length])
        data = data[7 + length :]
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in items}
