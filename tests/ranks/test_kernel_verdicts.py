"""The verdict on the kernels on several ranks and hosts."""

import socket

import torch

from facetrain.distributed import collectives
from facetrain.training import kernel_verdicts
from facetrain.training.kernel_self_test import KernelWork
from tests.support.ranks import run_ranks

CPU, WORK = torch.device("cpu"), KernelWork(torch.bfloat16, 512, 1024, 65536)


def verdict(reasons, kinds):
    """Return what the kernels' verdict is, and whether this rank has tested; ranks 0 and 1 are on one host."""
    rank, tested = collectives.rank(), []
    socket.gethostname = lambda: "ab"[rank // 2]
    kernel_verdicts._why_impossible = lambda device: reasons[rank]
    kernel_verdicts._machine_key = lambda device, work: {"gpu": kinds[rank]}
    kernel_verdicts._kept_verdict = lambda key, test: (
        tested.append(key) or ("" if key["gpu"] == "good" else "broken")
    )
    return kernel_verdicts.agree_on_kernels(CPU, WORK), bool(tested)


def test_one_rank_of_each_host_and_kind_of_gpu_tests_and_all_agree():
    cases = [
        (("", "", "", ""), ("good",) * 4, "", (True, False, True, False)),
        (("", "", "", ""), ("good", "good", "good", "bad"), "broken (on b)", (True, False, True, True)),
        (("", "", "Triton is not installed", "Triton is not installed"), ("good",) * 4,
         "Triton is not installed (on b)", (True, False, False, False)),
    ]  # fmt: skip
    for reasons, kinds, expected, tests in cases:
        found = run_ranks(4, verdict, reasons, kinds)
        assert found == [(expected, has_tested) for has_tested in tests]
