"""The longest tests first, the same random numbers and an empty cache in every run, no signal handler left."""

import gc
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LONGEST = ("runs", "ranks", "cli", "interop", "golden")
"""Folders of the tests that start processes or train, in the order of their time per test."""


def pytest_collection_modifyitems(items):
    # With several workers (`pytest -n`) the short ones then fill the end evenly.
    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # The modules and tests that are loaded here stay: searching them for cycles takes a quarter of the time of the
    # collection, and a fifth of that of the tests.
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    return result


def order(item):
    folder = item.path.relative_to(TESTS).parts[0]
    number = LONGEST.index(folder) if folder in LONGEST else len(LONGEST)
    return number, item.get_closest_marker("slow") is None


for name in ("NO_PROXY", "no_proxy"):  # a proxy does not lead to their servers
    os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1,localhost"


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """What the user or earlier tests have downloaded, compiled or found out does not change a result."""
    # matplotlib would search all fonts again, for seconds.
    fonts = os.environ.get("MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MPLCONFIGDIR", fonts)
        yield


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws depends neither on the moment nor on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_signal_handlers():
    """Commands and runs in the process of the tests handle signals, and ignore SIGTERM at their end."""
    numbers = [signal.Signals[f"SIG{name}"] for name in ("HUP", "INT", "TERM", "USR1", "USR2", "ALRM")]
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_command_left():
    """A command that a failed test has not ended does not run beside the tests after it."""
    yield
    if command := sys.modules.get("tests.support.command"):
        command.kill_started()


@pytest.fixture
def no_home(monkeypatch):
    """A user without a home folder, as in a container that is started with a number that has no name."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A folder with `data`, a small dataset that no test may change (tests/support/training.py)."""
    from tests.support.training import write_dataset

    folder = tmp_path_factory.mktemp("dataset")
    write_dataset(folder / "data")
    return folder


@pytest.fixture
def describe(dataset, tmp_path):
    """Write a config whose runs go to the test's own folder (tests/support/training.py)."""
    from tests.support.training import write_run_config

    return partial(write_run_config, tmp_path, dataset)


@pytest.fixture
def model(tmp_path):
    """The file of a small model with random weights (tests/support/models.py)."""
    from tests.support.models import write_model

    write_model(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def object_store(monkeypatch):
    """An S3 server on the loopback interface with an empty `bucket` (tests/support/object_store.py)."""
    from tests.support.object_store import running_object_store

    with running_object_store(monkeypatch) as store:
        yield store


@pytest.fixture
def store(object_store, monkeypatch):
    """`object_store`, of which a failed request is repeated at once, and the end of an upload seen at once."""
    monkeypatch.setattr("facetrain.remote.filesystem.FIRST_WAIT_S", 0.001)
    monkeypatch.setattr("facetrain.checkpoint.uploads._POLL_S", 0.01)
    return object_store


@pytest.fixture
def web_server():
    """A web server on the loopback interface (tests/support/web_server.py)."""
    from tests.support.web_server import running_web_server

    with running_web_server() as server:
        yield server
