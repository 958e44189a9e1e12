import subprocess
import sys

import pytest

from facetrain import control_groups
from facetrain.telemetry import memory
from facetrain.telemetry.memory import available_bytes

PROGRAM = """
import torch
from facetrain.telemetry.memory import peak_gib
first = peak_gib(torch.device("cpu"))
b"x" * (1 << 28)
print(first, peak_gib(torch.device("cpu")))
"""
START = "import os, sys; b'x' * (1 << 30); os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
"""Takes 1 GiB, and becomes the program of its argument: ru_maxrss stays."""


def test_the_peak_is_that_of_the_process_and_not_of_the_one_that_has_started_it():
    shown = subprocess.run(
        [sys.executable, "-c", START, PROGRAM], capture_output=True, text=True, check=True, timeout=200
    )
    first, then = map(float, shown.stdout.split())
    assert first < 1 and then > first + 0.1


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
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text("1:cpu,cpuacct:/job\n0::/path/of/the/host\n")
    (tmp_path / "meminfo").write_text(machine)
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("5000\n")
        (tmp_path / "memory.stat").write_text("anon 7\nactive_file 10\ninactive_file 20\n")
    assert available_bytes() == left


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        (
            "0::/slurm/job_7/step_0",
            {
                "slurm/job_7/memory": ("7000", 6000),
                "slurm/job_7/step_0/memory": ("9000", 100),
                "memory": ("max", 8),
            },
            1030,
        ),
        ("4:cpuset,memory:/slurm/job_7\n0::/", {"memory/slurm/job_7/memory": (7000, 6000)}, 1030),
        ("4:memory:/job\n0::/", {"memory/job/memory": (0x7FFFFFFFFFFFF000, 6000)}, None),
    ],
    ids=["a job, version 2", "a job, version 1", "no limit, version 1"],
)
def test_the_memory_that_is_left_is_that_of_the_smallest_group_of_the_job(
    own, files, left, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "_MEMORY_FACTS", tmp_path / "absent")
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text(own + "\n")
    first = own.startswith("4:")
    names = ("limit_in_bytes", "usage_in_bytes") if first else ("max", "current")
    for path, values in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, values, strict=True):
            (tmp_path / f"{path}.{name}").write_text(f"{value}\n")
        cached = "active_file {}\ninactive_file {}\n"
        whole = "total_active_file 10\ntotal_inactive_file 20\n"
        (tmp_path / f"{path}.stat").write_text(
            cached.format(1, 2) + whole if first else cached.format(10, 20)
        )
    assert available_bytes() == left
