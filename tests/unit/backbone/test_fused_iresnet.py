"""The fused trunk of an IResNet, under Triton's interpreter, on tensors without content, and compiled for GPUs."""

import subprocess
import sys
from statistics import median

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.kernels import launch
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.registry import IRESNET_LAYERS
from facetrain.plan.memory_traffic import MemoryTraffic
from facetrain.torch_private import LiveBytes
from facetrain.training.kernel_self_test import _images_for
from tests.support.command import ROOT, environment, printed_by

triton = pytest.importorskip("triton", reason="Triton is not installed: its kernels are not used either")


INTERPRETED = pytest.mark.skipif(
    triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of Triton 3.6 does not run on NumPy 2.4",
)


@pytest.mark.slow
@INTERPRETED
def test_results_gradients_and_running_statistics_are_as_exact_as_the_plain_trunks():
    for case, tensors in printed_by("interpret_fused_iresnet", TRITON_INTERPRET="1").items():
        rounding = 5e-2 if case == "16 bits" else 5e-3 if "far above" in case else 5e-6
        if "weight of a convolution" in case:
            rounding = 1e-4
        else:
            assert len(tensors) > 60, case
        for name, error in tensors.items():
            assert error["fused"] <= 5 * error["plain"] + rounding, (case, name, error)
        assert median(error["fused"] / max(error["plain"], 1e-9) for error in tensors.values()) < 1.5, case


SELF_TEST = """
import torch, facetrain.head.margin_head as head
from facetrain.training.kernel_self_test import check_head, check_trunk
cpu = torch.device("cpu")
head.fused_chunks_available = lambda _, margin, dtype: dtype is not None
head.one_pass_available = lambda *_: True
print([check_trunk(cpu, torch.float16), check_head(cpu, torch.float16)])
"""


@pytest.mark.slow
@INTERPRETED
def test_the_self_test_passes():
    done = subprocess.run(
        [sys.executable, "-c", SELF_TEST],
        env=environment(TRITON_INTERPRET="1"), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "['', '']\n", done.stdout + done.stderr


@pytest.mark.parametrize("number", [20, 72, 108, 132, 148, 188])
def test_each_program_of_the_self_test_has_several_tiles_on_gpus_of_any_size(number, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: number)
    # What the second stage reads, whose programs are the most, because all channels are in one tile.
    x = torch.empty(_images_for(number), 64, 56, 56, device="meta").to(memory_format=torch.channels_last)
    rows, _ = launch.size_of(x)
    assert rows > max(40_000, launch.programs_along_rows(x) * launch.BLOCK_ROWS)


@pytest.mark.slow
def test_the_kernels_spill_no_register_and_load_ahead_16_bytes_at_a_time_on_each_generation_of_gpus():
    found = printed_by("compile_kernels", "batch_norms")
    assert len(found) == 9 * 6 + 7
    for name, kernel in found.items():
        assert kernel["spilled_bytes"] == 0 and kernel["registers"] <= 168, (name, kernel)
        assert kernel["shared_bytes"] <= kernel["shared_bytes_of_the_device"], name
        assert kernel["wide_loads"] > 0, name
        loops_over_tiles = not name.startswith(("border", "finish statistics")) and "one tile" not in name
        assert (kernel["async_copies"] > 0) == loops_over_tiles, name


class Layouts(TorchDispatchMode):
    """Records the tensors of every backward convolution that are not in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.others = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution_backward.default:
            self.calls += 1
            tensors = [t for t in (*args[:3], *result) if t is not None]
            self.others += [t for t in tensors if not t.is_contiguous(memory_format=torch.channels_last)]
        return result


def step_cost(name: str, batch: int, *, fused: bool) -> dict[str, int]:
    """Return what a training step of a trunk in bfloat16 moves, keeps and launches, counted without content."""
    from facetrain.backbone.fused_iresnet import FusedTrunk
    from facetrain.device.kernel_launches import shapes_only

    with FakeTensorMode():
        net = IResNet(IRESNET_LAYERS[name])
        use_torch_backward(net)
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                weight = torch.empty(module.weight.shape).contiguous(memory_format=torch.channels_last)
                module.weight = torch.nn.Parameter(weight)
        image = torch.zeros(batch, 3, 112, 112).contiguous(memory_format=torch.channels_last)
        trunk = FusedTrunk(net) if fused else net.trunk
        # On fake CPU tensors some convolutions return NCHW, which a clone changes; on CUDA they return channels_last.
        traffic, layouts = MemoryTraffic(without=frozenset(["clone"])), Layouts()
        with shapes_only() as kernels, LiveBytes() as live, traffic, layouts:
            with torch.autocast("cpu", torch.bfloat16):
                feature = trunk(image)
            kept = live.now
            feature.backward(torch.zeros_like(feature))
    assert layouts.calls >= sum(IRESNET_LAYERS[name])
    return {
        "moved": traffic.bytes + kernels.bytes,
        "kept": kept,
        "launches": traffic.launches + kernels.launches,
        "transposed": len(layouts.others) if fused else 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "megabytes", "launches"), [("r50", 213, 710), ("r100", 341, 1400)])
def test_a_step_moves_few_bytes_in_few_launches_and_keeps_half_of_the_activations(name, megabytes, launches):
    small, large = (step_cost(name, batch, fused=True) for batch in (64, 128))
    plain_small, plain_large = (step_cost(name, batch, fused=False) for batch in (64, 128))
    # The convolutions' bytes are counted too. cuDNN would transpose what is not in channels_last, and move more.
    assert (large["moved"] - small["moved"]) / 64 <= megabytes * 1e6 and large["transposed"] == 0
    kept, plain_kept = large["kept"] - small["kept"], plain_large["kept"] - plain_small["kept"]
    assert kept <= 0.5 * plain_kept
    assert large["launches"] <= launches < 0.8 * plain_large["launches"]
