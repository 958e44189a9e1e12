"""`train.deterministic`: the settings of torch, whole runs under them, and the operations that a step uses."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from facetrain.config.loading import build_config, load_config
from facetrain.distributed.process_setup import fix_cublas_workspace
from facetrain.errors import ConfigError
from facetrain.training.deterministic import deterministic_algorithms
from tests.support import training as run
from tests.support.command import ROOT
from tests.support.runs import losses

# Operations that raise an error on a GPU under torch.use_deterministic_algorithms, by its documentation; those with an
# indices output, or on floating-point numbers, with that condition.
WITHOUT_DETERMINISTIC_ALGORITHM = {
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward",
    "max_unpool2d", "max_unpool3d",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "nll_loss2d_forward", "_ctc_loss_backward", "_embedding_bag_backward",
    "put", "put_", "histc", "bincount", "median.dim", "nanmedian.dim", "kthvalue", "mode",
    "grid_sampler_2d_backward", "grid_sampler_3d_backward", "cumsum", "logcumsumexp",
    "scatter_reduce", "scatter_reduce_",
}  # fmt: skip


def flags():
    cudnn = torch.backends.cudnn
    memory = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, memory


def test_the_settings_hold_inside_the_context_and_are_restored():
    before = flags()
    with pytest.raises(KeyError), deterministic_algorithms():
        assert flags() == (True, True, False, False)
        raise KeyError
    assert flags() == before
    with deterministic_algorithms(False):
        assert flags() == before


def test_cublas_gets_a_workspace_of_fixed_size(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored after the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fix_cublas_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    fix_cublas_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":8:8")
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG is :8:8"):
        fix_cublas_workspace()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA has started already"):
        fix_cublas_workspace()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"train": {"compile": "on"}}, "compile: on, because the compiler may choose other code"),
        ({"train": {"compress_gradients": "fp16"}}, "compress_gradients: fp16, because a restarted process"),
    ],
)
def test_a_setting_that_is_not_deterministic_is_refused_with_the_reason(values, reason):
    values = {
        "data": {"train": "x"} | values.get("data", {}),
        "train": {"deterministic": True} | values.get("train", {}),
    }
    with pytest.raises(ConfigError, match=f"deterministic.*{reason}"):
        build_config(values, "x")


class _Operations(TorchDispatchMode):
    """Recorder of the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.__name__ if func.__name__.endswith(".dim") else func._opname
        if name != "cumsum" or result.is_floating_point():
            self.names.add(name)
        return result


HEADS = {
    "sampled on the host, in micro-batches": {
        "sample_rate": 0.3, "accumulate": 2, "head": "placement: host", "precision": "bf16",
    },
    "adaface": {"margin": "adaface"},
}  # fmt: skip
AUGMENTED = "data.augment={low_resolution: 0.5, blur: 0.5, gray: 0.5, color: 0.5, crop: 0.5}"


@pytest.mark.parametrize("name", HEADS)
def test_a_deterministic_run_has_the_same_bits(name, describe, tmp_path, monkeypatch):
    """And uses no operation that sums in random order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    config, found, before = describe(steps=2, **HEADS[name]), {}, flags()
    with _Operations() as operations:
        for deterministic in ("false", "true"):
            changes = ["eval.targets=[]", "data.workers=0", AUGMENTED]
            changes += [f"train.deterministic={deterministic}"]
            assert run.train(load_config(config, changes), tmp_path / deterministic) == 0
            found[deterministic] = losses(tmp_path / deterministic)
    assert len(found["true"]) == 2 and found["true"] == found["false"]
    assert flags() == before
    assert operations.names >= {"index_add_", "convolution_backward"}, "the step was not recorded"
    assert not operations.names & WITHOUT_DETERMINISTIC_ALGORITHM


def test_no_kernel_of_facetrain_uses_atomic_operations():
    kernels = list(Path(ROOT, "facetrain").rglob("kernels/*.py"))
    assert kernels and not [path for path in kernels if "tl.atomic" in path.read_text()]


class Joined(Exception):
    """Marks the moment when a rank joins the others, before which CUDA does not start."""


def test_each_rank_gives_cublas_its_workspace_before_it_joins_the_others(describe, tmp_path, monkeypatch):
    def join(*_, **__):
        raise Joined(os.environ["CUBLAS_WORKSPACE_CONFIG"])

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored after the test
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr("facetrain.run.parts.world.join", join)
    with pytest.raises(Joined, match=":4096:8"):
        run.train(load_config(describe(), ["train.deterministic=true"]), tmp_path / "run")
