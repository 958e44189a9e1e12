"""The verdict on the kernels on several ranks and hosts."""

import re
import socket
from copy import copy
from functools import partial

import pytest
import torch

from facetrain.distributed import collectives
from facetrain.head.class_chunk import Chunk
from facetrain.head.partial_fc import PartialFC
from facetrain.head.row_optimizer import CenterUpdate
from facetrain.training import kernel_verdicts
from facetrain.training.choose_kernels import difference_on_ranks
from facetrain.training.kernel_self_test import KernelWork
from tests.support.ranks import run_ranks

CPU, WORK = torch.device("cpu"), KernelWork(512, 1024, 65536)


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


@pytest.mark.slow
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


class RightSlopes(Chunk):
    """Stand for the kernels of a head."""


class WrongSlopes(Chunk):
    """Stand for a kernel that computes a wrong derivative of the loss."""

    def slopes(self, log_total_G):
        return 1.1 * super().slopes(log_total_G)


def update_twice(optimizer, tables, rows, gradient, valid):
    """Stand for a kernel that computes a wrong update."""
    optimizer.update(tables, rows, 2 * gradient, valid)


def compare(fault):
    """Return what is wrong with kernels of which those of one rank have a fault."""

    def use_kernels(head):
        head.chunk_type = WrongSlopes if fault == f"slopes of rank {collectives.rank()}" else RightSlopes
        if fault == f"update of rank {collectives.rank()}":
            head._optimizer.update = partial(update_twice, copy(head._optimizer))

    PartialFC.use_kernels = use_kernels
    head = PartialFC(
        "cosface", embedding_size=8, num_classes=29, sample_rate=0.5, chunk_size=6, update=CenterUpdate()
    )
    head.product_dtype = torch.bfloat16
    before = head.weight.clone()
    found = difference_on_ranks(head, global_batch=12)
    assert torch.equal(head.weight, before)
    return found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("", "^$"),
        ("slopes of rank 1", "on rank 1, centers after step 1: "),
        ("update of rank 0", "on rank 0, centers after step 1: "),
    ],
)
def test_kernels_that_compute_something_wrong_on_one_rank_are_noticed_on_all(fault, message):
    found = run_ranks(2, compare, fault)
    assert found[0] == found[1] and re.match(message, found[0]), found
