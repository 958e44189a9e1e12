"""The verdict on the kernels, and the comparison of the trunks, on several ranks and hosts."""

import socket

import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.distributed import collectives
from facetrain.training import kernel_verdicts
from facetrain.training.choose_kernels import compare_trunks
from facetrain.training.precision import InPrecision
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def verdict(reasons, kinds):
    """Return what the kernels' verdict is, and whether this rank has tested; ranks 0 and 1 are on one host."""
    rank, tested = collectives.rank(), []
    socket.gethostname = lambda: "ab"[rank // 2]
    kernel_verdicts._why_impossible = lambda device: reasons[rank]
    kernel_verdicts._machine_key = lambda part, device, dtype: {"gpu": kinds[rank]}
    kernel_verdicts._kept_verdict = lambda key, test: (
        tested.append(key) or ("" if key["gpu"] == "good" else "broken")
    )
    return kernel_verdicts.agree_on_kernels("trunk", CPU, torch.bfloat16), bool(tested)


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


def compared():
    torch.manual_seed(0)
    small = {"layers": (1, 1, 1, 1), "widths": (16, 16, 16, 16), "embedding_size": 8, "image_size": 16}
    network = InPrecision(build_backbone("iresnet", **small), "bf16", CPU, memory_format=torch.channels_last)
    factor = 1.0 + collectives.rank()
    network.fused_trunk = lambda image: network.backbone.trunk(image) * factor
    reason = compare_trunks(network, torch.randn(16, 3, 16, 16))
    return reason, network.fused_trunk is None


def test_all_ranks_take_the_plain_trunk_if_it_differs_on_one():
    first, second = run_ranks(2, compared)
    assert first == second and first[0].endswith("(on rank 1)") and first[1]
