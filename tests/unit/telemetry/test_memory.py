import subprocess
import sys

import torch

from facetrain.telemetry.memory import peak_gib

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
