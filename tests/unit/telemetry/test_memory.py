import subprocess
import sys

import pytest
import torch

from facetrain.telemetry import memory
from facetrain.telemetry.memory import available_bytes, peak_gib

PROGRAM = (
    "import torch; from facetrain.telemetry.memory import peak_gib; print(peak_gib(torch.device('cpu')))"
)


def test_the_peak_is_that_of_the_process_and_not_of_the_one_that_has_started_it():
    held = bytearray(1 << 31)
    held[:: 1 << 12] = b"x" * (1 << 19)  # every page
    assert peak_gib(torch.device("cpu")) > 2
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=200
    )
    assert float(shown.stdout) < 1.5


@pytest.mark.parametrize(
    ("machine", "limit", "left"),
    [
        ("MemFree: 1 kB\nMemAvailable: 8 kB\n", "max", 8192),
        ("MemAvailable: 8 kB\n", "9000", 9000 - 5000 + 30),
        ("MemAvailable: 1 kB\n", "9000", 1024),
        ("nonsense", None, None),
    ],
)
def test_the_memory_that_is_left_is_that_of_the_machine_or_of_its_container(
    machine, limit, left, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "_MEMORY_FACTS", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text(machine)
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("5000\n")
        (tmp_path / "memory.stat").write_text("anon 7\nactive_file 10\ninactive_file 20\n")
    assert available_bytes() == left
