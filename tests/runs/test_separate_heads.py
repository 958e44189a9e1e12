"""Runs on a mixture with a head per dataset: ranks, checkpoints and resuming."""

from pathlib import Path

import pytest
import torch

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.errors import ConfigError
from tests.support import training
from tests.support.datasets import write_records
from tests.support.ranks import free_ports, start_ranks
from tests.support.runs import losses, metrics
from tests.support.worlds import in_worlds

MIXTURE = """
heads: separate
datasets:
  - {path: data}
  - {path: other, weight: 0.5, margin: {type: cosface, m3: 0.2}, loss_weight: 0.5}
  - {path: few, margin: {type: adaface}}
"""


@pytest.fixture
def mixture(dataset, tmp_path):
    (tmp_path / "data").symlink_to(dataset / "data")
    write_records(tmp_path / "other", [n // 5 for n in range(60)], size=32)
    # Two identities: with three ranks, one rank has no class of this head.
    write_records(tmp_path / "few", [0, 0, 1, 1, 1], size=32)
    (tmp_path / "mixture.yaml").write_text(MIXTURE)
    return tmp_path / "mixture.yaml"


def settings_of(mixture, *more):
    return [f"data.train={mixture}", "data.workers=0", "eval.targets=[]", "optim.lr=0.01", *more]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "resumed"),
    [
        ((1, 2), [(1, 1, 2), (2, 1, 2)]),
        pytest.param((1, 2, 3), [(1, 1, 2), (1, 3, 2), (2, 3, 2), (3, 1, 2)], marks=pytest.mark.long),
    ],
)
def test_heads_of_datasets_on_any_number_of_ranks_give_the_same_losses(
    describe, mixture, tmp_path, sizes, resumed
):
    config = describe(steps=6, checkpoint="every_steps: 2, keep: 9", sample_rate=0.5)
    ports = free_ports(len(sizes) + len(resumed))
    start_ranks(in_worlds, (config, settings_of(mixture), tmp_path, sizes, resumed, ports), max(sizes))
    alone = losses(tmp_path / "1")
    assert len(alone) == 6
    for name in [*map(str, sizes), *(f"{saved_on}_to_{size}_at_2" for saved_on, size, _ in resumed)]:
        assert losses(tmp_path / name) == pytest.approx(alone, rel=1e-5), name
    assert metrics(tmp_path / "1_to_1_at_2") == metrics(tmp_path / "1")
    first, resumed = (Checkpoint.open(tmp_path / name) for name in ("1", "1_to_1_at_2"))
    sums = [
        {entry.name: entry.sha256 for entry in found.manifest.files if not entry.name.startswith("rank")}
        for found in (first, resumed)
    ]
    assert sums[0] == sums[1] and len(sums[0]) == 4
    assert first.manifest.num_classes == 20 + 12 + 2
    # Whatever the number of ranks, the checkpoint has the centers in the order of the mixture's labels.
    whole = first.rows("weight", 0, 34)
    split = Checkpoint.open(tmp_path / f"{max(sizes)}").rows("weight", 0, 34)
    assert whole.shape == (34, 16)
    torch.testing.assert_close(split, whole, rtol=1e-3, atol=1e-5)


def test_another_head_in_the_mixture_is_refused_when_the_run_continues(describe, mixture, tmp_path):
    described = load_config(describe(steps=2), settings_of(mixture))
    assert training.train(described, tmp_path / "run") == 0
    text = mixture.read_text()
    mixture.write_text(text.replace("loss_weight: 0.5", "loss_weight: 0.6"))
    longer = load_config(describe(steps=4), settings_of(mixture))
    with pytest.raises(ConfigError, match="trained with other images, another order of them, or other heads"):
        training.resume(longer, tmp_path / "run", None)
    mixture.write_text(text)
    assert training.resume(longer, tmp_path / "run", None) == 0
    assert len(losses(tmp_path / "run")) == 4


def test_the_heads_of_datasets_start_from_the_centers_of_another_run(describe, mixture, tmp_path):
    first = load_config(describe(steps=2), settings_of(mixture))
    assert training.train(first, tmp_path / "first") == 0
    centers = Checkpoint.open(tmp_path / "first").rows("weight", 0, 34)
    from_first = (f"model.init_from={tmp_path / 'first'}", "head.init_from=keep", "optim.lr=1e-9")
    second = load_config(describe(steps=1), settings_of(mixture, *from_first))
    assert training.train(second, tmp_path / "second") == 0
    torch.testing.assert_close(Checkpoint.open(tmp_path / "second").rows("weight", 0, 34), centers)


@pytest.mark.parametrize(
    ("margin", "message"),
    [
        ("{type: cosface, m3: 0.0}", "m3 must be greater than 0"),
        # The digest of its source would be in no checkpoint.
        ('{type: "own_faces:margin"}', "own_faces:margin is code, which only the config may name"),
    ],
)
def test_a_wrong_margin_of_a_dataset_names_the_mixture(describe, mixture, tmp_path, margin, message):
    mixture.write_text(MIXTURE.replace("{type: cosface, m3: 0.2}", margin))
    described = load_config(describe(steps=2), settings_of(mixture))
    with pytest.raises(ConfigError, match=rf"mixture.yaml: margin of dataset 2: .*{message}"):
        training.train(described, Path(tmp_path, "run"))


def test_a_dataset_with_a_margin_of_another_type_does_not_take_the_m1_of_the_config(
    describe, mixture, tmp_path
):
    combined = ("head.margin.type=combined", "head.margin.m1=1.1")
    described = load_config(describe(steps=1), settings_of(mixture, *combined))
    assert training.train(described, tmp_path / "run") == 0
