"""The self-test of the kernels in another process, its verdict, and the cache of verdicts."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from facetrain.training import kernel_verdicts
from facetrain.training.kernel_self_test import KernelWork
from facetrain.training.kernel_verdicts import agree_on_kernels

CPU, WORK = torch.device("cpu"), KernelWork(torch.bfloat16, 512, 1024, 65536)


def passes(device, work):
    assert (device, work) == (CPU, WORK)
    return ""


def disagrees(device, work):
    return "the gradient of conv1.weight differs"


def dies(device, work):
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(device, work):
    time.sleep(600)


def lacks_a_compiler(device, work):
    raise RuntimeError("Failed to find C compiler.\nPlease specify one")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(kernel_verdicts, "_why_impossible", lambda device: "")
    return tmp_path / ".cache" / "facetrain" / "kernels"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (passes, ""),
        (disagrees, "their self-test has found that the gradient of conv1.weight differs"),
        (dies, "their self-test ended by SIGSEGV"),
        (hangs, "their self-test took longer than 9 s"),
        (
            lacks_a_compiler,
            "their self-test failed (RuntimeError: Failed to find C compiler. Please specify one)",
        ),
    ],
)
def test_a_child_decides_whatever_becomes_of_it_and_a_success_is_kept(check, reason, cache):
    limit = 9.0 if check is hangs else 120.0
    assert agree_on_kernels(CPU, WORK, check=check, limit_s=limit) == reason
    assert cache.exists() == (not reason)
    if not reason:
        assert agree_on_kernels(CPU, WORK, check=None, limit_s=0) == "", "starts no child"


def test_a_verdict_holds_for_one_machine_and_these_sources_and_a_damaged_one_is_replaced(cache, monkeypatch):
    tested = []
    monkeypatch.setattr(kernel_verdicts, "_test", lambda *arguments: tested.append(arguments) or "")
    for _ in range(2):
        assert agree_on_kernels(CPU, WORK) == "" and len(tested) == 1
    (file,) = cache.iterdir()
    file.write_text("{")
    agree_on_kernels(CPU, WORK)
    agree_on_kernels(CPU, WORK._replace(embedding_size=256))
    assert len(tested) == 3
    monkeypatch.setattr(torch, "__version__", "9.9")
    agree_on_kernels(CPU, WORK)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"another kernel")
    agree_on_kernels(CPU, WORK)
    assert len(tested) == 5


def test_without_a_cache_folder_every_run_tests(monkeypatch, tmp_path):
    (tmp_path / ".cache").write_text("a file")
    monkeypatch.setattr(kernel_verdicts, "_test", lambda *arguments: "broken")
    assert agree_on_kernels(CPU, WORK) == "broken"


def test_a_machine_without_a_gpu_has_no_kernels(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.undo()
    assert agree_on_kernels(CPU, WORK) == "the kernels need a GPU of compute capability 8.0 or higher"
