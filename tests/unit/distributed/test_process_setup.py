import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import facetrain
from facetrain.distributed import process_setup
from facetrain.distributed.process_setup import (
    keep_compiled_code,
    set_gpu_defaults,
    silence_torch_logs,
    write_collectives_to,
)
from facetrain.distributed.user_environment import user_cache_folder
from facetrain.training import choose_kernels

VARIABLE, OF_TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def cache_folder_not_set(monkeypatch):
    for name in (VARIABLE, OF_TRITON):
        monkeypatch.setenv(name, "")  # makes monkeypatch remove what the test sets
        monkeypatch.delenv(name)


def test_compiled_code_is_kept_in_the_users_cache_folder_unless_the_environment_names_another(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_code()
    assert Path(os.environ[VARIABLE]) == tmp_path / "facetrain" / "compiled"
    assert (tmp_path / "facetrain" / "compiled").is_dir()
    assert Path(os.environ[OF_TRITON]) == tmp_path / "facetrain" / "compiled" / "triton"
    del os.environ[OF_TRITON]
    os.environ[VARIABLE] = "/given"
    keep_compiled_code()
    assert (os.environ[VARIABLE], os.environ[OF_TRITON]) == ("/given", "/given/triton")
    os.environ[OF_TRITON] = "/other"
    keep_compiled_code()
    assert (os.environ[VARIABLE], os.environ[OF_TRITON]) == ("/given", "/other")


@pytest.mark.parametrize(
    ("base", "folder"), [("/cache", "/cache"), ("cache", "/home/.cache"), ("", "/home/.cache")]
)
def test_an_absolute_cache_folder_in_the_environment_has_precedence(base, folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home")
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert user_cache_folder() == Path(folder, "facetrain")


@pytest.mark.parametrize("problem", ["cannot be created", "cannot be written", "no home"])
def test_torchs_default_stays_if_the_cache_folder_cannot_be_used(monkeypatch, tmp_path, request, problem):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if problem == "cannot be created":
        (tmp_path / "facetrain").write_text("")
    elif problem == "cannot be written":
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to every folder
    else:
        request.getfixturevalue("no_home")
    keep_compiled_code()
    assert VARIABLE not in os.environ and OF_TRITON not in os.environ


def test_the_kernels_of_the_head_are_kept_there_before_they_are_tested(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    head = SimpleNamespace(
        uses_kernels=True, update=None, embedding_size=8, num_classes=4, group=None, weight=torch.zeros(1),
        classes_per_chunk=lambda batch: 4, avoid_kernels=lambda: None,
    )  # fmt: skip
    monkeypatch.setattr(choose_kernels, "head_parts", lambda head: [SimpleNamespace(head=head)])
    # In place of the self-test, whose process inherits the variable.
    monkeypatch.setattr(
        choose_kernels, "agree_on_kernels", lambda *_, **__: os.environ.get(OF_TRITON, "none")
    )
    found = choose_kernels.choose_head_kernels([head], torch.device("cpu"), 8)
    assert found == str(tmp_path / "facetrain" / "compiled" / "triton")


@pytest.mark.parametrize(("has_driver", "level"), [(True, "ERROR"), (False, "FATAL")])
def test_torchs_errors_are_printed_where_nccl_reports_and_nowhere_else(monkeypatch, has_driver, level):
    monkeypatch.setattr(process_setup, "has_gpu_driver", lambda: has_driver)
    for name in ("TORCH_CPP_LOG_LEVEL", "KINETO_LOG_LEVEL", "LOGLEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    silence_torch_logs()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == level


def test_opencv_reports_no_damaged_image_beside_the_message():
    damaged = struct.pack("<2sIxxxxIIiiHHI", b"BM", 70, 54, 40, 112, 112, 1, 24, 0).ljust(54, b"\0")
    code = (
        "from facetrain.distributed.process_setup import silence_opencv_logs; silence_opencv_logs(); "
        f"from facetrain.data.images.decode import decode; decode({damaged!r})"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OPENCV_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr.startswith("Traceback") and "NotAnImageError: the BMP image" in done.stderr


def test_matplotlib_says_nothing_about_a_home_that_cannot_be_written_to():
    code = (
        "from facetrain.distributed.process_setup import silence_matplotlib_logs; silence_matplotlib_logs(); "
        "import matplotlib; print(matplotlib.get_configdir())"
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HOME": "/proc/absent"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "/matplotlib-" in done.stdout and not done.stderr, "a folder that disappears with the process"


NAMES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # fmt: skip


def test_torchs_variables_for_gpus_are_set_unless_the_user_has_set_them(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    set_gpu_defaults()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    set_gpu_defaults()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


def test_the_last_collectives_go_to_the_run_of_now_unless_the_user_gives_a_place(monkeypatch):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "")
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE")
    for folder in ("first", "second"):
        write_collectives_to(Path(folder))
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{folder}/nccl_collectives_of_rank_"
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/given")
    write_collectives_to(Path("third"))
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "/given"


_FREE_BETWEEN_KEPT = """
from ctypes import CDLL, c_size_t, c_void_p, memset
from pathlib import Path
from facetrain.distributed.process_setup import keep_freed_memory, release_freed_memory

c = CDLL(None)
c.malloc.argtypes, c.malloc.restype, c.free.argtypes = [c_size_t], c_void_p, [c_void_p]
keep_freed_memory()
release_freed_memory()
blocks = []
for _ in range(64):
    blocks.append(c.malloc(1 << 20))
    for block, size in ((blocks[-1], 1 << 20), (c.malloc(1 << 13), 1 << 13)):
        memset(block, 1, size)
for block in blocks:
    c.free(block)
print(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
"""


def test_freed_memory_is_returned_also_after_an_earlier_run_has_kept_it():
    done = subprocess.run(
        [sys.executable, "-c", _FREE_BETWEEN_KEPT], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 64 << 20


@pytest.fixture
def waiting_not_set(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)],
)
def test_threads_spin_as_the_environment_says(given, spins, waiting_not_set, monkeypatch):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    process_setup.bound_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_the_python_interface_leaves_the_threads_of_a_program_that_has_loaded_torch(waiting_not_set):
    assert facetrain.train and "GOMP_SPINCOUNT" not in os.environ
