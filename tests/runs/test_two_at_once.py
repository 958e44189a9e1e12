"""Two processes on one run folder: the second one is refused as long as the first one lives."""

import shutil
import signal

import pytest

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.errors import UsageError
from facetrain.run.folder.lock_file import LOCK_FILE
from tests.support import training
from tests.support.command import start
from tests.support.processes import descendants, kill, state_of
from tests.support.runs import LONG, losses, wait_for_checkpoint, wait_for_step
from tests.support.waiting import wait_until


@pytest.mark.slow
def test_a_second_resume_or_train_is_refused_while_the_first_one_lives_even_if_it_is_stopped(
    describe, tmp_path
):
    config, folder = describe(), tmp_path / "run"
    command = ("train", "--config", config, "--run-dir", folder, *LONG, "--set", "data.workers=0")
    process = start(*command)
    try:
        wait_for_step(folder, 2, process)
        with pytest.raises(UsageError):  # before and after the first checkpoint
            training.train(load_config(config), folder)
        wait_for_checkpoint(folder, process)
        loaded = load_config(folder / "config.yaml", ["train.max_steps=40", "data.workers=0"])
        with pytest.raises(UsageError, match=f"process {process.pid} on .* has been writing this run"):
            training.resume(loaded, folder)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(process.pid) == "T", process)
        with pytest.raises(UsageError, match=f"it is stopped .SIGSTOP.*kill -KILL {process.pid}"):
            training.resume(loaded, folder)
        reported, before = len(losses(folder)), (folder / "config.yaml").read_bytes()
        process.send_signal(signal.SIGCONT)
        wait_for_step(folder, reported + 2, process)
        assert (folder / "config.yaml").read_bytes() == before, "the refused commands have changed nothing"
    finally:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()
    assert (folder / LOCK_FILE).exists()
    last = Checkpoint.open(folder).step
    loaded = load_config(folder / "config.yaml", [f"train.max_steps={last + 2}", "data.workers=0"])
    assert training.resume(loaded, folder) == 0, "a killed process holds nothing"
    assert not (folder / LOCK_FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["moved", "deleted"])
def test_a_run_whose_folder_is_moved_or_deleted_ends_and_is_not_split_between_two_folders(
    describe, tmp_path, change
):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    process = start("train", "--config", describe(), "--run-dir", folder, *LONG, "--set", "data.workers=0")
    try:
        wait_for_step(folder, 2, process)
        wait_for_checkpoint(folder, process)
        folder.rename(moved)
        if change == "deleted":
            shutil.rmtree(moved)
        _, stderr = process.communicate(timeout=60)
    finally:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()
    (line,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert process.returncode == 1 and "Traceback" not in stderr, stderr
    assert f"{folder}: the run folder was moved or deleted while the run trains" in line
    assert not folder.exists()
    if change == "moved":
        last = Checkpoint.open(moved).step
        loaded = load_config(moved / "config.yaml", [f"train.max_steps={last + 2}", "data.workers=0"])
        assert training.resume(loaded, moved) == 0
