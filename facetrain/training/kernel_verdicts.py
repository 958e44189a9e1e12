"""Verdict on the head's Triton kernels on this machine, by a self-test in another process, which is kept.

The self-test does not run in the process that trains: an illegal memory access ends CUDA in its process for good, and a
kernel may also hang. A verdict that the kernels work holds for a GPU, a driver, a version of torch and Triton, and the
source of the kernels; the user's cache folder keeps it, so that only the first run on a machine waits for the
self-test. Any other verdict is not kept: the next run tests again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import facetrain
from facetrain.device.capability import BFLOAT16_GPU, multiplies_bfloat16
from facetrain.device.thread_device import numbered, use_device
from facetrain.distributed import collectives
from facetrain.distributed.spawn import HelperContext
from facetrain.distributed.user_environment import user_cache_folder
from facetrain.files import make_folder, read_regular_text, write_atomically
from facetrain.training.kernel_self_test import KernelWork, check_head

LIMIT_S = 300.0
"""Time for a self-test. Triton compiles about 20 kernels in it, which takes most of a minute on a slow machine."""
_SOURCES = (
    "head/**/*.py",
    "device/*.py",
    "training/kernel_self_test.py",
)
"""Files whose changes make a verdict out of date."""
_DRIVER = Path("/proc/driver/nvidia/version")


def agree_on_kernels(device: torch.device, work: KernelWork, *, limit_s: float = LIMIT_S) -> str:
    """Return why the kernels are not used, "" if they are; the same on all ranks. Collective.

    One rank of each host tests its GPU, and one for each other kind of GPU on the host. The others wait for it.

    Args:
        device: device of this rank.
        work: what the kernels compute; the same on all ranks.
        limit_s: time after which the self-test is ended. Less than the ranks wait for each other.
    """
    device = numbered(device)
    reason = _why_impossible(device)
    key = {} if reason else _machine_key(device, work)
    place = [socket.gethostname(), key]
    # The first rank with a host and a key tests for all that have the same. A rank without kernels has an empty key.
    places = collectives.gather_json(place)
    if key and places.index(place) == collectives.rank():
        reason = _kept_verdict(key, lambda: _test(device, work, limit_s))
    # Here the others wait: `limit_s` is shorter than the timeout of a collective.
    reasons = collectives.gather_json(reason)
    hosts = {host for host, _ in places}
    # Every rank must take the same way: a rank with kernels sends other messages than one without.
    for (host, _), text in zip(places, reasons, strict=True):
        if text:
            return f"{text} (on {host})" if len(hosts) > 1 else str(text)
    return ""


def _why_impossible(device: torch.device) -> str:
    """Return why this rank has no kernels to test, "" if it has."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from facetrain.head.kernels.center_update import IS_INTERPRETED

    if IS_INTERPRETED or multiplies_bfloat16(device):
        return ""
    return f"the kernels need {BFLOAT16_GPU}"


def _machine_key(device: torch.device, work: KernelWork) -> dict[str, str]:
    """Return what a verdict depends on."""
    package = Path(facetrain.__file__).parent
    # By content: a version with other kernels, or an edited file, is tested again.
    sources = [path for pattern in _SOURCES for path in sorted(package.glob(pattern))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    driver = ""
    with suppress(OSError):
        driver = _DRIVER.read_text(errors="replace").partition("\n")[0]
    return {
        **{name: str(value) for name, value in work._asdict().items()},
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "driver": driver,
        "torch": str(torch.__version__),
        # `_why_impossible` has imported it.
        "triton": getattr(sys.modules.get("triton"), "__version__", ""),
        "kernels": digest,
    }


def _kept_verdict(key: dict[str, str], test: Callable[[], str]) -> str:
    """Return "" if the cache says that the kernels work; otherwise test them, and keep a success."""
    text = json.dumps(key, indent=1, sort_keys=True) + "\n"
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    # Without a folder, or with another text in the file: the kernels are tested.
    with suppress(OSError, ValueError):
        if read_regular_text(user_cache_folder() / "kernels" / f"{name}.json") == text:
            return ""
    reason = test()
    if not reason:
        with suppress(OSError):
            folder = user_cache_folder() / "kernels"
            make_folder(folder)
            write_atomically(folder / f"{name}.json", text)
    return reason


def _test(device: torch.device, work: KernelWork, limit_s: float) -> str:
    """Run the self-test in a new process; return what is wrong, or how the process has ended, "" if nothing is."""
    context = HelperContext()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sender, check_head, device, work), daemon=True)
    process.start()
    sender.close()  # so that the pipe ends with the process
    try:
        if not receiver.poll(limit_s):
            return f"their self-test took longer than {limit_s:.0f} s"
        return receiver.recv_bytes().decode()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with the exit code {code}"
        return f"their self-test ended {ended}"
    finally:
        # Also on Ctrl-C. SIGKILL, because a kernel that hangs keeps the process from handling another signal.
        process.kill()
        process.join()
        receiver.close()


def _report(sender: Connection, check: Callable[..., str], device: torch.device, work: KernelWork) -> None:
    """Send the verdict of a check to the process that has started this one."""
    try:
        use_device(device)
        reason = check(device, work)
        verdict = f"their self-test has found that {reason}" if reason else ""
    except Exception as error:  # of Triton, the C compiler or the driver: they have no common type
        line = " ".join(str(error).split())[:200]
        verdict = f"their self-test failed ({type(error).__name__}: {line})"
    sender.send_bytes(verdict.encode())
