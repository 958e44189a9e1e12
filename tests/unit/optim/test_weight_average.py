"""Moving average of the weights: its value, its exchange with the weights, and its part in a run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from facetrain.backbone.iresnet import IResNet
from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import load_config
from facetrain.embeddings.inference import Inference
from facetrain.errors import ModelError
from facetrain.models.model_file import open_model
from facetrain.optim.frozen_parts import freeze
from facetrain.optim.weight_average import WeightAverage, decay_at
from facetrain.run import training
from facetrain.telemetry.jsonl import read_jsonl
from facetrain.verify.evaluate import evaluate
from tests.runs.conftest import dataset  # noqa: F401
from tests.support.command import facetrain

CONFIG = """
data: {{train: {data}, image_size: 32, workers: 0}}
model: {{backbone: iresnet, layers: [1, 1, 1, 1], widths: [4, 4, 4, 4], embedding_size: 8}}
optim: {{lr: 0.05, {ema}}}
train: {{global_batch_size: 24, max_steps: 6, precision: fp32, device: cpu}}
checkpoint: {{every_steps: 2, keep: 9}}
eval: {{targets: [val], every_steps: 6}}
log: {{tensorboard: false, report: false}}
"""


@pytest.fixture
def network():
    torch.manual_seed(0)
    return IResNet([1, 1, 1, 1], [4, 4, 4, 4], embedding_size=8, image_size=16)


def copy_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def differing(one, other):
    return {name for name in one if not torch.equal(one[name], other[name])}


def test_the_average_is_that_of_the_formula_in_float64(network):
    freeze(network, ["layer1"])
    average = WeightAverage(network, 0.5)
    frozen = {name for name in network.state_dict() if name.startswith("layer1")} | {"features.weight"}
    counters = {name for name in network.state_dict() if name.endswith("num_batches_tracked")}
    expected = {
        name: value.double() for name, value in copy_of(network).items() if name not in frozen | counters
    }
    assert average.state().keys() == expected.keys() and "bn2.running_var" in expected
    for step in range(12):
        with torch.no_grad():
            for value in network.state_dict().values():
                value.add_(torch.randn(value.shape).to(value.dtype))
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = {
            name: decay * value + (1 - decay) * network.state_dict()[name].double()
            for name, value in expected.items()
        }
    for name, value in average.state().items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_the_decay_grows_from_a_tenth_to_the_given_one():
    assert [decay_at(step, 0.9) for step in (0, 1, 80, 81, 500)] == [0.1, 2 / 11, 0.9, 0.9, 0.9]


def test_the_exchange_leaves_addresses_and_restores_every_bit_also_after_an_error(network):
    average = WeightAverage(network, 0.5)
    with torch.no_grad():
        network.fc.weight.add_(1)
        network.bn2.running_mean.add_(1)
    average.update(100)
    weights, averages = copy_of(network), {name: value.clone() for name, value in average.state().items()}
    addresses = [value.data_ptr() for value in network.state_dict().values()]
    with pytest.raises(KeyError), average.in_use():
        assert differing(averages, network.state_dict()) == set()
        assert [value.data_ptr() for value in network.state_dict().values()] == addresses
        assert not torch.equal(network.fc.weight, weights["fc.weight"])
        raise KeyError
    assert differing(weights, network.state_dict()) == set()
    assert differing(averages, average.state()) == set()


@pytest.fixture(scope="module")
def runs(dataset, tmp_path_factory):  # noqa: F811
    """The folder of a run without an average, `plain`, and of one with it, `averaged`, and their configs."""
    folder = tmp_path_factory.mktemp("average")
    configs = {}
    for name, ema in (("plain", ""), ("averaged", "ema: 0.7")):
        (folder / f"{name}.yaml").write_text(CONFIG.format(data=dataset / "data", ema=ema))
        configs[name] = load_config(folder / f"{name}.yaml")
        assert training.train(configs[name], folder / name) == 0
    return folder, configs


def test_training_is_the_same_with_and_without_an_average(runs):
    plain, averaged = (load_file(runs[0] / name / "model.safetensors") for name in ("plain", "averaged"))
    assert differing(plain, averaged) == set()
    assert not (runs[0] / "plain" / "model_ema.safetensors").exists()
    names = Checkpoint.open(runs[0] / "plain").replicated()
    assert not [name for name in names if name.startswith("ema.")]


def test_the_average_of_a_run_is_verified_beside_the_weights(runs):
    (last,) = [record for record in read_jsonl(runs[0] / "averaged" / "metrics.jsonl")
               if record["step"] == 6 and "val/accuracy" in record]  # fmt: skip
    for file, name in (("model", "val"), ("model_ema", "val_ema")):
        model = open_model(runs[0] / "averaged" / f"{file}.safetensors", torch.device("cpu"))
        data = Path(runs[1]["averaged"].eval_dir)
        result = evaluate(model, ["val"], data, inference=Inference("cpu")).results["val"].as_json()
        assert last[f"{name}/accuracy"] == result["accuracy"] and last[f"{name}/auc"] == result["auc"]


def test_a_resumed_average_is_equal_bit_for_bit(runs, tmp_path):
    path = runs[0] / "averaged" / "model_ema.safetensors"
    expected = path.read_bytes()
    weights = load_file(runs[0] / "averaged" / "model.safetensors")
    assert {"fc.weight", "bn2.running_mean"} <= differing(load_file(path), weights)
    assert training.resume(runs[1]["averaged"], runs[0] / "averaged", 2) == 0
    assert path.read_bytes() == expected


def test_an_average_that_is_asked_for_later_starts_from_the_weights_of_the_checkpoint(runs):
    checkpoint = Checkpoint.open(runs[0] / "plain", 4).replicated("backbone.")
    assert training.resume(runs[1]["averaged"], runs[0] / "plain", 4) == 0
    decays = [decay_at(step, 0.7) for step in (4, 5)]
    weights = [Checkpoint.open(runs[0] / "plain", 6).replicated("backbone.")["fc.weight"]]
    average = load_file(runs[0] / "plain" / "model_ema.safetensors")["fc.weight"]
    # Step 5 was not saved: solve for it, and compare its distance to the weights around it.
    fifth = ((average - (1 - decays[1]) * weights[0]) / decays[1] - decays[0] * checkpoint["fc.weight"]) / (
        1 - decays[0]
    )
    moved = (weights[0] - checkpoint["fc.weight"]).norm()
    assert (fifth - checkpoint["fc.weight"]).norm() < 1.5 * moved


def test_the_average_of_a_run_and_of_a_checkpoint_can_be_exported(runs, tmp_path):
    folder = runs[0] / "averaged"
    expected = load_file(folder / "model_ema.safetensors")
    opened = open_model(folder, torch.device("cpu"), average=True)
    assert differing(expected, opened.network.state_dict()) == set()
    latest = open_model(folder / "checkpoints" / "latest", torch.device("cpu"), average=True)
    assert differing(expected, latest.network.state_dict()) == set()
    checkpoint, output = folder / "checkpoints" / "step_00000006", tmp_path / "m.safetensors"
    done = facetrain("export", checkpoint, "--ema", "--format", "safetensors", "--output", output)
    assert done.returncode == 0, done.stderr
    assert differing(expected, load_file(output)) == set()


def test_a_model_without_an_average_is_refused_with_the_reason(runs):
    cpu = torch.device("cpu")
    with pytest.raises(ModelError, match=r"has no average of the weights; .* without optim\.ema"):
        open_model(runs[0] / "plain" / "checkpoints" / "step_00000002", cpu, average=True)
    with pytest.raises(ModelError, match="has one set of weights"):
        open_model(runs[0] / "plain" / "model.safetensors", cpu, average=True)
