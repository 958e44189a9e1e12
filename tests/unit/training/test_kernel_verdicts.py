"""The self-test of the kernels in another process, its verdict, and the cache of verdicts."""

import ast
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import facetrain
from facetrain.training import kernel_verdicts
from facetrain.training.kernel_verdicts import agree_on_kernels

PACKAGE = Path(facetrain.__file__).parent
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def passes(part, device, dtype):
    assert (part, device, dtype) == ("trunk", CPU, BF16)
    return ""


def disagrees(part, device, dtype):
    return "the gradient of conv1.weight differs"


def dies(part, device, dtype):
    os.kill(os.getpid(), signal.SIGSEGV)


def is_ended_by_a_scheduler(part, device, dtype):
    os.kill(os.getpid(), signal.SIGTERM)


def hangs(part, device, dtype):
    time.sleep(600)


def lacks_a_compiler(part, device, dtype):
    raise RuntimeError("Failed to find C compiler.\nPlease specify one")


def facetrain_modules(path):
    """Return the modules of facetrain that a file imports, as paths in the package."""
    names = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("facetrain")
        for name in [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    ]
    paths = [Path(*name.split(".")[1:]).with_suffix(".py") for name in names if "." in name]
    return {path for path in paths if (PACKAGE / path).is_file()}


@pytest.mark.parametrize("part", ["trunk", "head"])
def test_a_verdict_depends_on_every_file_that_the_kernels_import(part):
    patterns = (*kernel_verdicts._SOURCES[part], *kernel_verdicts._SHARED_SOURCES)
    sources = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    kernels = [path for path in sources if "kernels" in path.parts or path.name == "fused_iresnet.py"]
    used = {module for path in kernels for module in facetrain_modules(path)}
    assert len(used) >= 3
    assert used <= {path.relative_to(PACKAGE) for path in sources} | {Path("torch_private.py")}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(kernel_verdicts, "_why_impossible", lambda device: "")
    monkeypatch.setattr(kernel_verdicts, "LIMIT_S", 9.0)
    return tmp_path / ".cache" / "facetrain" / "kernels"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "reason", "is_kept"),
    [
        (passes, "", True),
        (disagrees, "their self-test has found that the gradient of conv1.weight differs; /", True),
        (dies, "their self-test ended by SIGSEGV; /", True),
        (is_ended_by_a_scheduler, "their self-test ended by SIGTERM", False),
        (hangs, "their self-test took longer than 9 s; /", True),
        (lacks_a_compiler, "self-test failed (RuntimeError: Failed to find C compiler. Please", False),
    ],
)
def test_a_child_decides_whatever_becomes_of_it_and_a_lasting_verdict_is_kept(check, reason, is_kept, cache):
    limit = 9.0 if check is hangs else 120.0
    found = agree_on_kernels("trunk", CPU, BF16, check=check, limit_s=limit)
    assert reason in found and bool(found) == bool(reason)
    assert cache.exists() == is_kept
    if is_kept:
        again = agree_on_kernels("trunk", CPU, BF16, check=None, limit_s=0)  # starts no child
        assert again == found


def test_a_verdict_holds_for_one_machine_and_these_sources_and_a_damaged_one_is_replaced(cache, monkeypatch):
    tested = []
    monkeypatch.setattr(kernel_verdicts, "_test", lambda *arguments: tested.append(arguments) or ("", True))
    for _ in range(2):
        assert agree_on_kernels("trunk", CPU, BF16) == "" and len(tested) == 1
    (file,) = cache.iterdir()
    file.write_text("{")
    agree_on_kernels("trunk", CPU, BF16)
    agree_on_kernels("trunk", CPU, torch.float16)
    agree_on_kernels("head", CPU, BF16)
    assert len(tested) == 4
    monkeypatch.setattr(torch, "__version__", "9.9")
    agree_on_kernels("head", CPU, BF16)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"another kernel")
    agree_on_kernels("head", CPU, BF16)
    assert len(tested) == 6


def test_without_a_cache_folder_every_run_tests(monkeypatch, tmp_path):
    (tmp_path / ".cache").write_text("a file")
    monkeypatch.setattr(kernel_verdicts, "_test", lambda *arguments: ("broken", True))
    assert agree_on_kernels("trunk", CPU, BF16).startswith("broken")


def test_a_machine_without_a_gpu_has_no_kernels(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.undo()
    assert agree_on_kernels("head", CPU, BF16) == "the kernels need a GPU, and this is cpu"
