import pytest
import torch

from facetrain.data.formats.bin import write_bin
from tests.support import training
from tests.support.command import ROOT, start
from tests.support.datasets import encoded_image, write_records
from tests.support.processes import descendants, kill
from tests.support.runs import wait_for_step

CONFIG = """
run: {{name: tiny, dir: {folder}/runs}}
data: {{train: {folder}/data, image_size: 32, workers: {workers}}}
model: {{backbone: iresnet, layers: [1, 1, 1, 1], widths: [8, 8, 16, 16], embedding_size: 16, dropout: {dropout}}}
head: {{margin: {{type: {margin}, m2: 0.3, scale: 16}}, sample_rate: {sample_rate}, {head}}}
optim: {{lr: 0.05, warmup_epochs: 0.5, accumulate: {accumulate}}}
train: {{global_batch_size: 24, max_steps: {steps}, precision: {precision}, device: cpu}}
eval: {{targets: [val], every_steps: 6}}
checkpoint: {{{checkpoint}}}
log: {{every_steps: 1, tensorboard: false, report: false}}
"""


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


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A folder with 20 identities of noise, and verification pairs."""
    folder = tmp_path_factory.mktemp("runs")
    write_records(folder / "data", [n // 6 for n in range(120)], size=32)
    images = [encoded_image(n if n % 4 < 2 or n % 2 else n + 1000, 32) for n in range(80)]
    write_bin(folder / "data" / "val.bin", images, [n % 2 == 0 for n in range(40)])
    return folder


@pytest.fixture
def describe(dataset, tmp_path):
    """Write a config whose runs go to the test's own folder."""

    def write(**options):
        path = tmp_path / "tiny.yaml"
        # Each reading process takes half a second: tests of what it does, or of how it ends, ask for one.
        values = {"workers": 0, "dropout": 0.0, "sample_rate": 1.0, "accumulate": 1, "precision": "fp32"}
        values |= {"margin": "arcface", "head": "placement: device", "steps": 12}
        values |= {"checkpoint": "every_steps: 4, keep: 9"} | options
        text = CONFIG.format(folder=dataset, **values).replace(f"{dataset}/runs", f"{tmp_path}/runs")
        path.write_text(text)
        return path

    return write


@pytest.fixture
def started_run(describe, tmp_path):
    """Start a run on two ranks and wait for its sixth step; return its folder and its launcher."""
    processes = []

    def start_run(*options, site="", **described):
        folder, config = tmp_path / "run", describe(workers=1, **described)
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
