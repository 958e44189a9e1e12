"""Training with every default of a GPU, on a fake one: devices, streams, threads, waits, order of the collectives."""

import json
import os
from pathlib import Path

import pytest

from facetrain.config.loading import load_config
from facetrain.data.formats.bin import write_bin
from tests.support import training
from tests.support.datasets import encoded_image, write_records
from tests.support.ranks import free_ports, start_worlds

CONFIG = """
run: {{name: tiny, dir: {folder}/runs}}
data:
  train: {folder}/data
  image_size: 16
  workers: 0
  augment: {{blur: 0.5, gray: 0.5, color: 0.5, crop: 0.5, low_resolution: 0.5}}
model: {{backbone: iresnet, layers: [1, 1, 1, 1], widths: [8, 8, 16, 16], embedding_size: 16}}
head: {{{head}}}
optim: {{{optim}}}
train: {{batch_size: 2, max_steps: 6, device: cuda, {train}}}
eval: {{targets: [val], every_steps: 6}}
checkpoint: {{every_steps: 4}}
log: {{every_steps: 5}}
"""
QUIET_STEPS = (4,)
"""Steps without a verification or a save, after the first ones, in which DDP orders its buckets. A report follows."""

OF_THE_HEAD = ("_exponentials", "_narrow", "_update")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake_gpu")
    write_records(folder / "data", [n // 6 for n in range(120)], size=16)
    write_bin(
        folder / "data" / "val.bin", [encoded_image(n, 16) for n in range(16)], [n % 2 == 0 for n in range(8)]
    )
    return folder


def train_rank(rank, size, port, folder, config, kernels):
    """Train on a fake GPU, and write what it has recorded."""
    import torch

    from facetrain.training import kernel_verdicts
    from facetrain.training.step import TrainStep
    from tests.support.fake_gpu import fake_gpu

    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "WORLD_SIZE": f"{size}",
            "LOCAL_WORLD_SIZE": f"{size}",
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["XDG_CACHE_HOME"] = f"{folder}_cache"  # it keeps the verdicts of other tests
    verdict = "" if kernels else "they are not tested here"
    kernel_verdicts._test = lambda *_: verdict
    take_step, tunes = TrainStep.__call__, []

    def count_step(step, state, batches):
        gpu.step = state.step
        tunes.append(torch.backends.cudnn.benchmark)
        take_step(step, state, batches)

    TrainStep.__call__ = count_step
    with fake_gpu(rank, size, has_device=False) as gpu:
        code = training.train(load_config(config), folder)
    waits = sorted({place for step in QUIET_STEPS for place in gpu.waits[step]})
    pageable = max(size for step in QUIET_STEPS for size in gpu.pageable[step].values())
    assert not torch.backends.cudnn.benchmark, "the setting of the caller"
    found = {"code": code, "waits": waits, "pageable": pageable, "tunes": all(tunes)} | {
        name: getattr(gpu, name) for name in ("faults", "collectives", "launches")
    }
    Path(folder, f"found_{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("runs", "kernels"),
    [
        # Together: Triton decides at its import whether its interpreter runs the kernels, so they need a process that
        # has not imported it.
        (
            [
                # With this scale of the margin, the loss scale of the first step does not overflow.
                (2, "precision: fp16", "placement: host, sample_rate: 0.5, margin: {scale: 4}", ""),
                (3, "precision: bf16", "", ""),
            ],
            OF_THE_HEAD,
        ),
        pytest.param([(1, "", "", "muon: {}")], OF_THE_HEAD, marks=pytest.mark.long),
        # The self-test refuses all kernels.
        pytest.param([(3, "", "", "name: adamw, lr: 0.001")], (), marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_a_run_with_the_defaults_of_a_gpu_uses_it_rightly(runs, kernels, dataset, tmp_path, monkeypatch):
    if kernels:
        pytest.importorskip("triton")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    worlds = []
    for size, train, head, optim in runs:
        config, folder = tmp_path / f"{size}.yaml", tmp_path / f"run_{size}"
        config.write_text(CONFIG.format(folder=dataset, train=train, head=head, optim=optim))
        worlds.append((size, (size, *free_ports(1), folder, config, bool(kernels))))
    start_worlds(train_rank, worlds, fresh=bool(kernels))
    for size, *_ in runs:
        check_run(tmp_path / f"run_{size}", size, kernels)


def check_run(folder, size, kernels):
    ranks = [json.loads((folder / f"found_{rank}.json").read_text()) for rank in range(size)]
    for found in ranks:
        assert found["code"] == 0 and not found["faults"] and found["tunes"]
        assert found["collectives"] == ranks[0]["collectives"]
        assert found["launches"].keys() >= set(kernels) and bool(found["launches"]) == bool(kernels)
        assert found["waits"] == ["data/loading/device_prefetch:wait_for_transfers stream.synchronize"]
        # A few numbers for each image, and the tables of JPEG: the driver copies up to 64 KiB without waiting.
        assert found["pageable"] <= 256
    execution = json.loads((folder / "environment.json").read_text())["execution"]
    assert ("they are not tested here" in execution) == (not kernels)
    assert execution in (folder / "log.txt").read_text()
