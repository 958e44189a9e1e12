"""Ctrl-C while reading processes start, which ignore it only from their own first line on."""

import pytest

from tests.runs.test_lost_ranks import LONG
from tests.soak.interrupts import interrupt


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ctrl_c_while_reading_processes_start_is_an_interruption_and_no_lack_of_memory(
    describe, tmp_path, ranks
):
    command = [
        "train", "--config", describe(), "--run-dir", tmp_path / "run", *LONG, "--set", "data.workers=3",
        "--nproc-per-node", ranks,
    ]  # fmt: skip
    # One rank: its first readers and multiprocessing's tracker. Two: also the ranks and their watchdogs.
    readers = 2 if ranks == 1 else 7
    assert interrupt(command, moment_s=0.3, processes=readers) == []
