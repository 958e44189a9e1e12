"""The choice of the trunk, and a whole run on the fused one under Triton's interpreter."""

import json
import subprocess
import sys

import pytest
import torch

from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import load_config
from facetrain.distributed.sync_batch_norm import _HostSyncBatchNorm
from facetrain.errors import ConfigError
from facetrain.run import training as run
from facetrain.training import choose_kernels
from facetrain.training.choose_kernels import choose_trunk
from facetrain.training.precision import InPrecision
from tests.runs.conftest import dataset, describe  # noqa: F401
from tests.support.command import ROOT, environment

CPU = torch.device("cpu")
SMALL = {"layers": (1, 1, 1, 1), "widths": (16, 16, 16, 16), "embedding_size": 8, "image_size": 16}


def choose(
    fused="on",
    name="iresnet",
    precision="bf16",
    checkpoint_activations=False,
    compile="off",
    synchronized=False,
    **settings,
):
    options = SMALL if name == "iresnet" else {"embedding_size": 8, "image_size": 112}
    settings = {"memory_format": torch.channels_last} | settings
    network = InPrecision(build_backbone(name, **options), precision, CPU, **settings)
    if synchronized:
        network.backbone.bn1 = _HostSyncBatchNorm.sharing_tensors_of(network.backbone.bn1)
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
        ({"synchronized": True}, "the statistics of one rank"),
    ],
)
def test_a_required_trunk_that_the_config_excludes_names_the_reason(settings, reason):
    with pytest.raises(ConfigError, match=f"train.fused: on is not possible: .*{reason}"):
        choose(**settings)


@pytest.mark.parametrize("fused", ["auto", "on"])
def test_where_the_kernels_do_not_work_the_plain_trunk_runs_and_the_opening_line_says_why(fused, monkeypatch):
    monkeypatch.setattr(
        choose_kernels, "agree_on_kernels", lambda *_, **__: "their self-test ended by SIGSEGV"
    )
    network = choose(fused)
    assert network.fused_trunk is None
    expected = f"eager (train.fused: {fused} has no effect: their self-test ended by SIGSEGV)"
    assert network.describe_execution() == f"the backbone runs {expected}"


def test_auto_takes_the_plain_trunk_of_other_networks_and_off_asks_nothing():
    assert "(train.fused: auto has no effect: only r18" in choose("auto", name="mbf").describe_execution()
    assert choose("off").describe_execution() == "the backbone runs eager"
    assert choose("off", compile="on").describe_execution() == "the backbone runs compiled"


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_run_compares_the_trunks_in_its_first_step_and_records_what_it_chose(
    describe,  # noqa: F811
    tmp_path,
    monkeypatch,
    factor,
):
    pytest.importorskip("triton", reason="Triton is not installed")

    class Trunk:
        def __init__(self, network):
            self._network = network

        def __call__(self, image):
            calls.append(image.shape)
            return self._network.trunk(image) * factor

    calls = []
    monkeypatch.setattr("facetrain.backbone.fused_iresnet.FusedTrunk", Trunk)
    monkeypatch.setattr(choose_kernels, "agree_on_kernels", lambda *_, **__: "")
    changes = ["train.fused=auto", "train.precision=bf16", "eval.targets=[]", "model.widths=[16, 16, 16, 16]"]
    assert run.train(load_config(describe(steps=3), changes), tmp_path / "run") == 0
    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["execution"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the backbone runs eager on fused kernels" in log
    if factor == 1.0:
        assert recorded == "the backbone runs eager on fused kernels" and len(calls) == 4
    else:
        assert recorded in log and len(calls) == 1
        assert "the backbone runs eager (train.fused has no effect: in the first step, the " in recorded


SCRIPT = """
import copy, json, torch
from facetrain.backbone.zoo import build_backbone
from facetrain.training import choose_kernels
from facetrain.training.choose_kernels import choose_trunk
from facetrain.training.precision import InPrecision

choose_kernels.agree_on_kernels = lambda *_, **__: ""
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
print(json.dumps({"losses": losses, "remark": wrapped.remark}))
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
    assert found["remark"] == ""
    assert found["losses"]["on"] == pytest.approx(found["losses"]["off"], rel=0.03)
    assert found["losses"]["on"] != found["losses"]["off"], "the same trunk ran twice"
