"""The choice of the trunk, and a whole run on the fused one under Triton's interpreter."""

import json
import subprocess
import sys

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ConfigError
from facetrain.training.fused_trunk import choose_trunk
from facetrain.training.precision import InPrecision
from tests.support.command import ROOT, environment

CPU = torch.device("cpu")
SMALL = {"layers": (1, 1, 1, 1), "widths": (16, 16, 16, 16), "embedding_size": 8, "image_size": 16}


def choose(
    fused="on", name="iresnet", precision="bf16", checkpoint_activations=False, compile="off", **settings
):
    options = SMALL if name == "iresnet" else {"embedding_size": 8, "image_size": 112}
    settings = {"memory_format": torch.channels_last} | settings
    network = InPrecision(build_backbone(name, **options), precision, CPU, **settings)
    network.compile_mode = compile  # without the compiler itself, whose import takes seconds
    choose_trunk(network, fused, checkpoint_activations=checkpoint_activations)
    return network


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "mbf"}, "only r18"),
        ({"precision": "fp32"}, "train.precision is fp32"),
        ({"memory_format": torch.contiguous_format}, "train.channels_last is false"),
        ({"compile": "on"}, "train.compile compiles"),
        ({"checkpoint_activations": True}, "model.checkpoint_activations"),
        ({}, "need a GPU"),
    ],
)
def test_a_required_trunk_that_cannot_be_used_names_the_reason(settings, reason):
    if not settings:
        pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(ConfigError, match=f"train.fused: on is not possible: .*{reason}"):
        choose(**settings)


def test_auto_and_off_take_the_plain_trunk_and_the_opening_line_says_why():
    assert choose("auto").fused_trunk is None and choose("off").fused_trunk is None
    assert choose("off").describe_execution() == "the backbone runs eager"
    assert "eager (train.fused: auto is off, because no self-test" in choose("auto").describe_execution()
    assert choose("off", compile="on").describe_execution() == "the backbone runs compiled"


SCRIPT = """
import copy, json, torch
from facetrain.backbone.kernels.self_check import why_unusable
from facetrain.backbone.zoo import build_backbone
from facetrain.training.fused_trunk import choose_trunk
from facetrain.training.precision import InPrecision

cpu, layout = torch.device("cpu"), torch.channels_last
torch.manual_seed(0)
plain = build_backbone("iresnet", layers=(1, 1, 1, 1), widths=(16, 16, 16, 16), embedding_size=8, image_size=16)
plain = plain.to(memory_format=layout)
losses = {}
for fused in ("off", "on"):
    net = copy.deepcopy(plain)
    wrapped = InPrecision(net, "fp16", cpu, memory_format=layout)
    choose_trunk(wrapped, fused, checkpoint_activations=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9)
    losses[fused] = []
    for step in range(3):
        image = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step % 2))
        loss = (wrapped(image) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[fused].append(loss.item())
    wrapped.eval()
    losses[fused].append((wrapped(image) - 1).square().mean().item())
print(json.dumps({"losses": losses, "reason": why_unusable(cpu, torch.float16)}))
"""


@pytest.mark.slow
def test_training_steps_on_the_fused_trunk_follow_those_on_the_plain_one():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if triton.__version__ < "3.7":
        pytest.skip("the interpreter of Triton 3.6 does not run on NumPy 2.4")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment(TRITON_INTERPRET="1"), cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["reason"] == ""
    assert found["losses"]["on"] == pytest.approx(found["losses"]["off"], rel=0.03)
    assert found["losses"]["on"] != found["losses"]["off"], "the same trunk ran twice"
