"""Frozen parts of a network: neither weights nor batch norm statistics change."""

import pytest
import torch
from safetensors.torch import load_file

from facetrain.backbone.iresnet import IResNet
from facetrain.config.loading import load_config
from facetrain.distributed import collectives
from facetrain.errors import ConfigError
from facetrain.optim.build import build_optimizer
from facetrain.optim.frozen_parts import freeze
from facetrain.optim.optimizer import parameter_groups
from facetrain.optim.settings import OptimSettings
from facetrain.training.state import averaged_buffers, averaged_state
from tests.support import training


@pytest.fixture
def network():
    torch.manual_seed(0)
    return IResNet([1, 1, 1, 1], [4, 4, 4, 4], embedding_size=8, image_size=16)


def copy_of(tensors):
    return {name: tensor.clone() for name, tensor in tensors}


def train(network, steps):
    optimizer = build_optimizer(OptimSettings(weight_decay=0.01), parameter_groups(network, {}))
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    for _ in range(steps):
        network(torch.randn(4, 3, 16, 16)).pow(2).mean().backward()
        optimizer.step(torch.tensor(1.0), torch.tensor(0.0))
        optimizer.zero_grad()


def test_weights_and_statistics_of_frozen_parts_are_bit_equal_after_100_steps(network):
    freeze(network, ["conv1", "bn1", "prelu", "layer1", "layer2.0.bn1.weight"])
    before = copy_of(network.state_dict().items())
    train(network, 100)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    frozen = {name for name in before if name.startswith(("conv1", "bn1", "prelu", "layer1"))}
    assert "layer1.0.bn2.running_mean" in frozen and not changed & frozen
    # A norm that is frozen in part is trained. The features' weight is fixed in every run.
    assert changed == set(before) - frozen - {"layer2.0.bn1.weight", "features.weight"}


def test_without_training_of_batch_norms_only_the_other_layers_change(network):
    freeze(network, [], train_batch_norm=False)
    before = copy_of(network.state_dict().items())
    train(network, 100)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    norms = {name for name in before if "bn" in name or "features" in name or "downsample.1" in name}
    assert changed == set(before) - norms


def test_every_kind_of_batch_norm_is_frozen():
    norms = [torch.nn.BatchNorm1d(4), torch.nn.SyncBatchNorm(4)]
    freeze(torch.nn.Sequential(torch.nn.Linear(3, 4), *norms), [], train_batch_norm=False)
    assert not any(norm.training or norm.weight.requires_grad for norm in norms)


def test_a_network_without_parameters_is_refused_without_a_key_that_nobody_has_set():
    with pytest.raises(ConfigError, match=r"^model\.backbone: the network has no parameter"):
        freeze(torch.nn.Flatten(), [])


def test_statistics_of_frozen_norms_are_not_averaged_over_the_ranks(network, monkeypatch):
    freeze(network, ["layer1"])
    averaged = []
    monkeypatch.setattr(collectives, "mean_all_", averaged.extend)
    averaged_state(network)
    state_of_all = len(averaged)
    with averaged_buffers(network):
        network.eval()  # as the verification does; the buffers are restored all the same
    assert len(averaged) == 2 * state_of_all
    frozen = [buffer for name, buffer in network.named_buffers() if name.startswith("layer1")]
    assert frozen and state_of_all == len(list(network.buffers())) - len(frozen)
    assert not {buffer.data_ptr() for buffer in frozen} & {buffer.data_ptr() for buffer in averaged}


def other_files(folder):
    """Return the files of a run but the config, which was edited."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "config.yaml")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        (
            {"freeze": ["conv", "bn", "prelu", "layer", "features"]},
            r"model\.freeze, model\.train_batch_norm: .*step_00000002 .*bn",
        ),
        ({"train_batch_norm": False}, r"step_00000002: .*train_batch_norm: false needs init_from"),
    ],
)
def test_a_fine_tuned_run_keeps_the_statistics_and_resumes_bit_for_bit(dataset, tmp_path, key, refusal):
    model = {"init_from": f"{tmp_path}/first"} | key
    for name, keys in (("first", {}), ("tuned", model)):
        training.write_tiny_config(
            tmp_path, dataset, name=name, model=keys, train={"max_steps": 2}, checkpoint={"every_steps": 1}
        )
    assert training.train(load_config(tmp_path / "first.yaml"), tmp_path / "first") == 0
    tuned = load_config(tmp_path / "tuned.yaml")
    assert training.train(tuned, tmp_path / "tuned") == 0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "tuned"))
    statistics = [name for name in before if "running" in name]
    assert statistics and all(torch.equal(before[name], after[name]) for name in statistics)
    assert not torch.equal(before["fc.weight"], after["fc.weight"])
    expected = (tmp_path / "tuned" / "model.safetensors").read_bytes()
    assert training.resume(tuned, tmp_path / "tuned", 1) == 0
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() == expected
    before = other_files(tmp_path / "first")
    refused = load_config(tmp_path / "tuned.yaml", ["train.max_steps=4"])
    with pytest.raises(ConfigError, match=refusal):
        training.resume(refused, tmp_path / "first")
    assert before == other_files(tmp_path / "first")
    thawed = ["model.freeze=[]", "model.train_batch_norm=true", "train.max_steps=3"]
    assert training.resume(load_config(tmp_path / "tuned.yaml", thawed), tmp_path / "tuned") == 0


def test_statistics_can_only_be_kept_if_there_is_a_model_that_has_them(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {train: x}\nmodel: {train_batch_norm: false}\n")
    with pytest.raises(ConfigError, match="needs init_from"):
        load_config(tmp_path / "a.yaml")


def test_a_batch_norm_without_weights_is_trained_or_frozen_as_its_part_of_the_network():
    def network():
        block = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, affine=False))
        return torch.nn.Sequential(block, torch.nn.Linear(4, 2))

    trained, frozen = network(), network()
    freeze(trained, [])
    freeze(frozen, ["0"])
    assert trained[0][1].training and not frozen[0][1].training
