import pytest
import torch

from tests.support import training
from tests.support.command import ROOT, start
from tests.support.processes import descendants, kill
from tests.support.runs import wait_for_step


def train_and_resume(config, folder, step):
    """Train, resume from a checkpoint, and check that the weights at both ends are equal bit for bit."""
    assert training.train(config, folder) == 0
    expected = (folder / "model.safetensors").read_bytes()
    assert training.resume(config, folder, step) == 0
    assert (folder / "model.safetensors").read_bytes() == expected


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The runs of this process compute with one thread, as those of the commands: the last bits depend on it."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)


@pytest.fixture
def started_run(describe, tmp_path):
    """Start a run on two ranks and wait for its sixth step; return its folder and its launcher."""
    processes = []

    def start_run(*options, site="", **described):
        folder, config = tmp_path / "run", describe(**described)
        (tmp_path / "sitecustomize.py").write_text(site)
        process = start(
            "train", "--config", config, "--run-dir", folder, "--nproc-per-node", 2, *options,
            PYTHONPATH=f"{tmp_path}:{ROOT}",
        )  # fmt: skip
        processes.append(process)
        wait_for_step(folder, 6, process)
        return folder, process

    yield start_run
    for process in processes:
        kill([process.pid, *descendants(process.pid)])
        process.communicate()
