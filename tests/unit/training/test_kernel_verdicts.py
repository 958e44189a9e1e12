"""The self-test of the kernels in another process, its verdict, the cache of verdicts, and the tested heads."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from facetrain.head.class_chunk import FusedChunk
from facetrain.head.partial_fc import PartialFC
from facetrain.head.row_optimizer import CenterUpdate
from facetrain.training import choose_kernels, kernel_verdicts
from facetrain.training.kernel_self_test import KernelWork
from facetrain.training.kernel_verdicts import agree_on_kernels
from tests.support.ranks import PRELOADED

CPU, WORK = torch.device("cpu"), KernelWork(512, 1024, 65536)


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_verdicts, "_why_impossible", lambda device: "")
    return tmp_path / "cache" / "facetrain" / "kernels"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (passes, ""),
        (disagrees, "their self-test has found that the gradient of conv1.weight differs"),
        (dies, "their self-test ended by SIGSEGV"),
        (hangs, "their self-test took longer than 1 s"),
        (
            lacks_a_compiler,
            "their self-test failed (RuntimeError: Failed to find C compiler. Please specify one)",
        ),
    ],
)
def test_a_child_decides_whatever_becomes_of_it_and_a_success_is_kept(check, reason, cache, monkeypatch):
    # In place of a new process, which imports torch for seconds.
    multiprocessing.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(kernel_verdicts, "HelperContext", lambda: multiprocessing.get_context("forkserver"))
    limit = 1.0 if check is hangs else 120.0
    monkeypatch.setattr(kernel_verdicts, "check_head", check)
    assert agree_on_kernels(CPU, WORK, limit_s=limit) == reason
    assert cache.exists() == (not reason)
    if not reason:
        monkeypatch.setattr(kernel_verdicts, "_test", None)
        assert agree_on_kernels(CPU, WORK) == "", "starts no child"


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
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(kernel_verdicts, "_test", lambda *arguments: "broken")
    assert agree_on_kernels(CPU, WORK) == "broken"


def test_a_machine_without_a_gpu_has_no_kernels(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.undo()
    assert agree_on_kernels(CPU, WORK) == "the kernels need a GPU of compute capability 8.0 or higher"


def test_every_head_with_kernels_is_compared_and_every_size_is_tested(monkeypatch):
    tested, compared = [], []
    monkeypatch.setattr(
        choose_kernels, "agree_on_kernels", lambda device, work, **_: tested.append(work.embedding_size) or ""
    )
    trained, of_other_dataset, of_teacher, without_kernels = heads = [
        PartialFC(margin, size, 9, update=update, trained=update is not None)
        for margin, size, update in (
            ("arcface", 8, CenterUpdate()),
            ("cosface", 8, CenterUpdate()),
            ("arcface", 12, None),
            ("curricularface", 16, CenterUpdate()),
        )
    ]
    for head in heads[:3]:
        head.chunk_type = FusedChunk

    def difference_on_ranks(head, global_batch):
        compared.append(head)
        return "wrong" if head is of_teacher else ""

    monkeypatch.setattr(choose_kernels, "difference_on_ranks", difference_on_ranks)
    assert choose_kernels.choose_head_kernels(heads, CPU, 4) == "wrong"
    assert tested == [8, 12] and compared == [trained, of_other_dataset, of_teacher]
    assert not any(head.uses_kernels for head in heads) and without_kernels not in compared
