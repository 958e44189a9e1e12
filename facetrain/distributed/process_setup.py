"""Settings of a process and its libraries: allocators, threads, open files, CUDA and NCCL, compiled code, logs.

Imports no torch: some of these settings work only if they are made before `import torch`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from facetrain.device.gpu_driver import has_gpu_driver
from facetrain.distributed.user_environment import user_cache_folder
from facetrain.errors import ConfigError

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_INT_MAX = 2**31 - 1
_DEFAULT_MMAP_MAX = 65536  # from glibc's malloc.c
_LARGE_BLOCK = 1 << 16
COLLECTIVES = "nccl_collectives_of_rank_"
"""Beginning of the name of the files with the last collectives of each rank, a pickle of torch's flight recorder."""


def keep_freed_memory() -> None:
    """Make glibc keep large blocks when they are freed, and back them with huge pages.

    By default glibc returns every large block to the kernel, which clears the pages before it hands
    them out again: half of a training step on CPU was spent there. Call it before the first tensor
    is allocated, because torch reads THP_MEM_ALLOC_ENABLE at its first allocation.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # No block is mapped by itself, and the heap never shrinks: what a step frees, the next one takes.
    _mallopt({_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _INT_MAX})


def release_freed_memory() -> None:
    """Make glibc return blocks of 64 KiB and more to the kernel when they are freed: slower, less memory."""
    # An earlier run in this process may have kept them.
    _mallopt(
        {
            _M_MMAP_MAX: _DEFAULT_MMAP_MAX,
            _M_MMAP_THRESHOLD: _LARGE_BLOCK,
            _M_TRIM_THRESHOLD: _LARGE_BLOCK,
        }
    )


def keep_compiled_code() -> None:
    """Make torch.compile and Triton cache their code in the user's cache folder.

    By default they use /tmp, which a reboot empties, and ~/.triton, which a container loses, or cannot write to: then
    no kernel of Triton can be compiled. TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR have precedence. If the cache
    folder cannot be written, the defaults stay. Call it before the first kernel is compiled.
    """
    with suppress(OSError):
        folder = user_cache_folder() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        # A folder may exist on a file system that is mounted read-only.
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # As torch.compile itself keeps Triton's code; here also that of kernels which it does not compile.
    if common := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(common, "triton")))


def fix_cublas_workspace() -> None:
    """Give cuBLAS a separate workspace for each stream: with a shared one, its sums may differ from run to run.

    cuBLAS reads the setting when it starts, so call this before CUDA starts. See "Results reproducibility" in the
    documentation of cuBLAS.

    Raises:
        ConfigError: the environment has another workspace, or CUDA has started already.
    """
    name, sizes = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
    given = os.environ.get(name)
    if given is not None and given not in sizes:
        raise ConfigError(
            f"train.deterministic: the environment variable {name} is {given}; unset it, or set it to {sizes[0]}"
        )
    torch = sys.modules.get("torch")
    if given is None and torch is not None and torch.cuda.is_initialized():
        raise ConfigError(
            f"train.deterministic: CUDA has started already in this process; export {name}={sizes[0]} before it starts"
        )
    os.environ[name] = given or sizes[0]


def set_gpu_defaults() -> None:
    """Set torch's variables for GPUs, unless the environment has them. Call it before CUDA or NCCL starts.

    The agent of the ranks would set the first one to 1, which cleans up after an error, and may hang.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    # The last collectives of each rank are kept, and written to a file of the run folder when one times out.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        # Blocks that grow: less memory is lost between those of unequal sizes.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def bound_spinning() -> None:
    """Let the threads of OpenMP wait for each other actively for microseconds, unless the environment says otherwise.

    By default they do it for milliseconds. Beside other programs, one of the threads waits for a core in each parallel
    region, and the others use up the cores meanwhile: docs/log/log.md. Call it before `import torch`, whose OpenMP
    reads the variable when it is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def write_collectives_to(folder: Path) -> None:
    """Let a rank write its last collectives into a folder if one of them times out; NCCL adds the rank to the name."""
    name = "TORCH_FR_DUMP_TEMP_FILE"
    # A path of the user stays; that of an earlier run in this process does not.
    if os.environ.get(name, COLLECTIVES).endswith(COLLECTIVES):
        os.environ[name] = str(folder / COLLECTIVES)


def silence_torch_logs() -> None:
    """Turn off torch's own reports of failures (C++ stacks, tables of the agent): facetrain prints one line.

    On a machine with a GPU torch's C++ errors are kept: only they name the collective in which NCCL failed. Call it
    before `import torch`: the C++ side reads its log levels when it is loaded.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR" if has_gpu_driver() else "FATAL")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's library, which logs even its start
    # `pick_device` says what is wrong with the driver.
    warnings.filterwarnings("ignore", "CUDA initialization")
    for name in ("torch.distributed.elastic", "torch.numa"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # some modules of the agent read their level from here


def silence_opencv_logs() -> None:
    """Turn off OpenCV's own reports of images that it cannot decode: facetrain names the image in one line.

    Call it before `import cv2`, which reads the variable when it is loaded, as do the processes that this one starts.
    """
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")


def silence_matplotlib_logs() -> None:
    """Turn off matplotlib's advice for a read-only home folder: the figures of a page are drawn without a cache."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


def _mallopt(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        for option, value in values.items():
            mallopt(option, value)
