import os
import subprocess
import sys

import pytest

from facetrain.distributed.launch import agent_folder
from tests.support.command import environment

HOLDER = """
from facetrain.distributed.launch import agent_folder
with agent_folder() as folder:
    (folder / "attempt_0").mkdir()
    print(folder, flush=True)
    input()
"""


@pytest.fixture
def launchers(tmp_path, monkeypatch):
    """Start processes that hold a folder each; return them and the folders, an hour old."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER], env=environment(TMPDIR=str(tmp_path)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        folder = tmp_path / process.stdout.readline().strip()
        os.utime(folder, (0, 0))
        return process, folder

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_folder_of_a_launcher_that_was_killed_goes_with_the_next_and_no_other(launchers, tmp_path):
    (killed, left), (_, held) = launchers(), launchers()
    kept = [tmp_path / "facetrain-agent-of_mine_too", tmp_path / "facetrain-agent-abcdefg0"]
    for path in kept:
        path.mkdir()
    os.utime(kept[0], (0, 0))
    linked = tmp_path / "facetrain-agent-abcdefg1"
    linked.symlink_to(tmp_path)
    killed.kill()
    killed.wait()
    assert left.is_dir()
    with agent_folder() as own:
        assert {*tmp_path.iterdir()} == {held, own, linked, *kept}
        assert (held / "attempt_0").is_dir()
    assert not own.exists()
