"""A power cut after every system call of a run: no saved checkpoint is lost, and no metric before it."""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest

from facetrain.checkpoint.commit import complete_steps, step_folder
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.run.folder import lease
from facetrain.run.folder.lock import RunLock
from facetrain.telemetry.jsonl import read_jsonl
from tests.support import training
from tests.support.command import environment
from tests.support.power_cut import Disk, build_recorder, read_calls, write_tree
from tests.support.runs import metrics

TRAIN = """
import sys
from pathlib import Path
from facetrain.config.loading import load_config
from tests.support import training
sys.exit(training.train(load_config(sys.argv[1]), Path(sys.argv[2])))
"""

pytestmark = pytest.mark.xdist_group("recorded")


@pytest.fixture(scope="module")
def recorded(dataset, tmp_path_factory):
    """Calls of a run with three saves, of which the last removes a checkpoint; its config and its folder."""
    folder = tmp_path_factory.mktemp("power")
    recorder = build_recorder(folder)
    if recorder is None:
        pytest.skip("needs a C compiler")
    config = training.write_tiny_config(
        folder,
        dataset,
        train={"max_steps": 6},
        checkpoint={"every_steps": 2, "keep": 2},
        log={"report": True, "every_steps": 1},
    )
    disk = folder / "disk"
    disk.mkdir()
    variables = {"LD_PRELOAD": recorder, "RECORD_ROOT": disk, "RECORD_FILE": folder / "calls"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(config), str(disk / "runs" / "a")],
        env=environment(**{name: str(value) for name, value in variables.items()}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return read_calls(folder / "calls"), config, disk


def fault_of(run, saved, reported):
    """Return what is wrong with a run folder after a cut; an empty string for nothing.

    `saved` is the step of the newest checkpoint that was reported as saved, `reported` all records of the run.
    """
    steps = complete_steps(run / "checkpoints")
    if max(steps, default=0) < saved:
        return f"step {saved} was reported as saved, and the newest checkpoint is {max(steps, default=None)}"
    if not steps:
        return ""
    for step in steps:
        Checkpoint.open(step_folder(run / "checkpoints", step)).verify()
    Checkpoint.open(run)
    if (run / "checkpoints" / "latest").exists():
        Checkpoint.open(run / "checkpoints" / "latest")
    load_config(run / "config.yaml")
    assert (run / "run_id.txt").exists(), "run_id.txt is missing"
    found = [record for record in read_jsonl(run / "metrics.jsonl") if record["step"] <= steps[-1]]
    expected = [record for record in reported if record["step"] <= steps[-1]]
    return "" if found == expected else f"{len(found)} of {len(expected)} records up to step {steps[-1]}"


def sweep(recorded, folder, *, each_folder):
    """Cut the power after every call; return the number of states, and the faults by the call."""
    calls, _, disk = recorded
    reported = read_jsonl(disk / "runs" / "a" / "metrics.jsonl")
    model, saved, seen, faults = Disk(disk), 0, set(), {}
    for number, call in enumerate(calls):
        model.apply(call)
        if call.op == "W" and b"saved the checkpoint of step" in call.data:
            saved = int(call.data.split()[-1])
        for tree in model.states(each_folder=each_folder):
            # The lock and the log are in no check: states that differ in them alone are equal.
            state = frozenset(item for item in tree.items() if not item[0].endswith(("run.lock", "log.txt")))
            if (state, saved) in seen:
                continue
            seen.add((state, saved))
            write_tree(tree, folder / "cut")
            try:
                fault = fault_of(folder / "cut" / "runs" / "a", saved, reported)
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault:
                faults.setdefault(f"{number} {call.op} {call.path.removeprefix(str(disk))}", fault)
            shutil.rmtree(folder / "cut")
    return len(seen), faults


@pytest.mark.slow
def test_a_power_cut_after_any_call_of_a_run_loses_no_saved_checkpoint_and_no_metric(recorded, tmp_path):
    states, faults = sweep(recorded, tmp_path, each_folder=False)
    assert states > 100 and not faults, json.dumps(faults, indent=1)


@pytest.mark.long
def test_a_power_cut_after_which_one_folder_was_written_or_all_but_one_loses_nothing_either(
    recorded, tmp_path
):
    states, faults = sweep(recorded, tmp_path, each_folder=True)
    assert states > 150 and not faults, json.dumps(faults, indent=1)


@pytest.mark.slow
def test_a_run_continues_from_what_a_power_cut_has_left_as_if_there_had_been_none(
    recorded, tmp_path, monkeypatch
):
    # A lock without content may be that of another host.
    monkeypatch.setattr(lease, "RunLock", partial(RunLock, silence_s=1))
    calls, config, disk = recorded
    model = Disk(disk)
    renames = [
        n
        for n, call in enumerate(calls)
        if call.op == "R" and call.data.endswith((b"step_00000004", b"step_00000006"))
    ]
    assert len(renames) == 2
    for number, call in enumerate(calls):
        model.apply(call)
        if number not in (renames[0], renames[1] + 1):
            continue
        # Nothing that was not synced has survived.
        write_tree(next(model.states(each_folder=False)), tmp_path / f"cut{number}")
        run = tmp_path / f"cut{number}" / "runs" / "a"
        assert training.resume(load_config(config), run) == 0
        assert metrics(run) == metrics(disk / "runs" / "a")
        ours, theirs = Checkpoint.open(run), Checkpoint.open(disk / "runs" / "a")
        assert [file.sha256 for file in ours.manifest.files] == [
            file.sha256 for file in theirs.manifest.files
        ]
