"""Crafted weight files: nothing in them runs."""

import argparse
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from facetrain.backbone.zoo import build_on_meta
from facetrain.data.formats.bin import write_bin
from facetrain.errors import ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.models.preprocessing import PREPROCESSING
from facetrain.models.weight_files import load_without_code, read_weights


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def torch_file(path, value):
    torch.save(value, path)


def bare_pickle(path, value):
    path.write_bytes(pickle.dumps(value, protocol=2))


def test_a_pickle_that_is_no_weights_file_is_refused_without_a_warning_of_torch(tmp_path, recwarn):
    write_bin(tmp_path / "pairs.bin", [b"one", b"two"], [True])
    (tmp_path / "list.pt").write_bytes(pickle.dumps([b"one"], protocol=4))
    for name in ("pairs.bin", "list.pt"):
        with pytest.raises(ModelError, match=f"{name}: "):
            read_weights(tmp_path / name)
    assert not recwarn.list


@pytest.mark.parametrize("write", [torch_file, bare_pickle])
@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.safetensors"])
def test_a_weights_file_with_a_payload_is_refused_and_runs_nothing(tmp_path, write, name):
    proof = tmp_path / "proof"
    write(tmp_path / name, {"conv1.weight": torch.zeros(1), "payload": Payload(proof)})
    with pytest.raises(ModelError, match=name):
        read_weights(tmp_path / name)
    assert not proof.exists()


def test_threads_open_checkpoints_of_lightning_at_the_same_time(tmp_path):
    weights = {f"w{number}": torch.zeros(1) for number in range(300)}
    torch.save({"state_dict": weights, "hyper_parameters": argparse.Namespace(lr=1)}, tmp_path / "m.ckpt")
    before = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(load_without_code, [tmp_path / "m.ckpt"] * 80))
    assert all(each["state_dict"].keys() == weights.keys() for each in loaded)
    assert set(torch.serialization.get_safe_globals()) == before


def iresnet(layers):
    return f'{{"backbone": {{"name": "iresnet", "layers": {layers}, "widths": [1, 1, 1, 1]}}}}'


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("not JSON", ""),
        ("3", ""),
        ('{"backbone": "r50"}', ""),
        ('{"backbone": {"name": "../../r50"}}', ""),
        ('{"backbone": {"name": "mbf", "embedding_size": -1}}', ""),
        ('{"backbone": {"name": "mbf", "embedding_size": 99999999999999999999999999}}', ""),
        ('{"backbone": {"name": "mbf", "depths": [1, 1, 1, 1]}}', "has no option depths"),
        # Refused before the network is built; negative numbers of blocks do not hide large ones.
        (iresnet([1 << 40, 1, 1, 1]), "1 weights for 1,099,511"),
        (iresnet([-500, 500, 0, 0]), r"\(1 weights for 1,000 blocks\)"),
        (iresnet("[1, 1099511627776, NaN, 1]"), "integer"),
    ],
)
def test_a_model_file_with_a_wrong_description_of_its_network_is_refused(tmp_path, description, message):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1)}, path, metadata={"facetrain": description})
    with pytest.raises(ModelError, match=f"model.safetensors: .*{message}") as caught:
        open_model(path, torch.device("cpu"))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("preprocessing", ["RGB", None, {"channels": "RGB"}, PREPROCESSING | {"scale": 255}])
def test_a_model_file_with_another_input_than_its_network_takes_is_refused(tmp_path, preprocessing):
    description = describe_backbone("mbf") | {"preprocessing": preprocessing}
    save_model(
        tmp_path / "m.safetensors", build_on_meta("mbf").to_empty(device="cpu").state_dict(), description
    )
    with pytest.raises(ModelError, match=r"preprocessing.*'channels': 'RGB'"):
        open_model(tmp_path / "m.safetensors", torch.device("cpu"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1).expand(1000, 1000),
        torch.empty(4, 4, device="meta"),
        torch.eye(4).to_sparse(),
        torch.as_strided(torch.zeros(5), (3, 3), (1, 1)),
    ],
)
def test_a_weight_with_fewer_numbers_than_its_shape_is_refused(tmp_path, tensor):
    torch.save({"conv1.weight": tensor}, tmp_path / "model.pt")
    with pytest.raises(
        ModelError, match=r"model.pt: the weight conv1.weight (has fewer numbers|is not stored)"
    ):
        read_weights(tmp_path / "model.pt")


def test_a_file_of_class_centers_alone_is_no_network(tmp_path):
    torch.save(torch.zeros(100, 8), tmp_path / "rank_0_softmax_weight.pt")
    with pytest.raises(ModelError, match=r"rank_0_softmax_weight.pt: .*\[100, 8\].*backbone"):
        read_weights(tmp_path / "rank_0_softmax_weight.pt")


def test_a_transposed_weight_is_read(tmp_path):
    torch.save({"conv1.weight": torch.arange(6.0).view(2, 3).T}, tmp_path / "model.pt")
    assert read_weights(tmp_path / "model.pt")[0]["conv1.weight"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("described", ["text", [1], 3])
def test_a_description_whose_network_is_no_object_is_refused(tmp_path, described):
    save_model(tmp_path / "m.safetensors", {"weight": torch.zeros(1)}, {"backbone": described})
    with pytest.raises(ModelError, match="no valid description of its network"):
        open_model(tmp_path / "m.safetensors", torch.device("cpu"))
