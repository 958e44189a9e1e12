import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import ModelError
from facetrain.finetune.first_model import backbone_of
from facetrain.models.average_models import average_models
from facetrain.models.embedding_model import open_model
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.models.read_model import read_model
from facetrain.models.weight_files import load_weights_into, read_weights
from tests.support.models import SMALL, write_model
from tests.support.snapshots import snapshot

CPU = torch.device("cpu")


def embedding_of(model, size):
    image = torch.linspace(-1, 1, 2 * 3 * size * size).view(2, 3, size, size)
    with torch.no_grad():
        return model(image)


@pytest.mark.parametrize("options", [SMALL, SMALL | {"stem_stride": 2}])
def test_a_model_file_describes_its_network(tmp_path, options):
    network = write_model(tmp_path / "m.safetensors", options=options).eval()
    opened = open_model(tmp_path / "m.safetensors", CPU)
    assert (opened.image_size, opened.embedding_size) == (32, 16)
    assert torch.equal(embedding_of(opened.network, 32), embedding_of(network, 32))
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]
    (tmp_path / "other").touch()
    assert (tmp_path / "m.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def data_parallel(state):
    return {f"module.{name}": value for name, value in state.items()}


def arcface_torch(state):
    return {"state_dict_backbone": state, "epoch": 3}


@pytest.mark.parametrize(
    ("name", "wrap"), [("r18", dict), ("mbf", dict), ("mbf", data_parallel), ("mbf", arcface_torch)]
)
def test_the_network_of_an_arcface_torch_file_is_identified_by_its_weights(tmp_path, name, wrap):
    network = build_backbone(name).eval()
    torch.save(wrap(network.state_dict()), tmp_path / "model.pt")
    opened = open_model(tmp_path / "model.pt", CPU)
    assert opened.description.startswith(f"{name}, ")
    assert torch.equal(embedding_of(opened.network, 112), embedding_of(network, 112))


def test_weights_without_the_counters_of_batch_norms_are_complete(tmp_path):
    network = build_backbone("mbf").eval()
    weights = {key: value for key, value in network.state_dict().items() if "num_batches" not in key}
    torch.save(weights, tmp_path / "model.pt")
    opened = open_model(tmp_path / "model.pt", CPU)
    assert torch.equal(embedding_of(opened.network, 112), embedding_of(network, 112))


@pytest.fixture(scope="module")
def magface(tmp_path_factory):
    """Return a checkpoint of MagFace, which also has its class centers."""
    names = {f"features.module.{name}": value for name, value in build_backbone("r18").state_dict().items()}
    path = tmp_path_factory.mktemp("magface") / "magface.pth"
    torch.save({"arch": "iresnet18", "state_dict": names | {"fc.weight": torch.ones(512, 5)}}, path)
    return path


def test_weights_of_magface_get_pixels_divided_by_255(tmp_path, magface):
    opened = open_model(magface, CPU)
    assert opened.description.endswith("(MagFace, trained on BGR)")
    pixels = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).view(2, 4, 4, 3)
    assert torch.equal(opened.prepare(pixels), pixels.permute(0, 3, 1, 2) / 255)
    save_model(tmp_path / "m.safetensors", opened.network.state_dict(), opened.metadata)
    again = open_model(tmp_path / "m.safetensors", CPU)
    assert again.description == opened.description
    assert torch.equal(again.prepare(pixels), opened.prepare(pixels))


def test_a_run_does_not_start_from_weights_for_other_pixels(tmp_path, magface):
    with pytest.raises(ModelError, match=r"magface\.pth: takes pixels / 255; .*distill\.teacher"):
        initialize_backbone(build_backbone("r18"), magface, None)
    with pytest.raises(ModelError, match="pixels / 255"):
        backbone_of(magface)
    with pytest.raises(ModelError, match="pixels / 255"):
        average_models([magface, magface], [1, 1], tmp_path / "m.safetensors")


def test_a_common_prefix_of_known_names_is_named(tmp_path):
    state = build_backbone("mbf").state_dict()
    torch.save({f"encoder.0.{name}": value for name, value in state.items()}, tmp_path / "m.pt")
    with pytest.raises(
        ModelError, match=r"without encoder\.0\. at the beginning of each name they are those of mbf"
    ):
        open_model(tmp_path / "m.pt", CPU)


def test_class_centers_among_the_weights_are_left_out(tmp_path):
    state = build_backbone("r18").state_dict()
    torch.save(state | {"weight": torch.zeros(7, 512)}, tmp_path / "topofr.pt")
    assert open_model(tmp_path / "topofr.pt", CPU).description.startswith("r18, ")
    initialize_backbone(build_backbone("r18"), tmp_path / "topofr.pt", None)
    torch.save(state | {"weight": torch.zeros(7, 99)}, tmp_path / "other.pt")
    with pytest.raises(ModelError, match=r"other\.pt: its 1\d\d weights are not those .*, or an ONNX file$"):
        open_model(tmp_path / "other.pt", CPU)


def test_a_folder_of_cvlface_opens(tmp_path):
    folder = tmp_path / "adaface" / "pretrained_model"
    folder.mkdir(parents=True)
    weights = {f"net.{name}": value for name, value in build_backbone("r18").state_dict().items()}
    torch.save(weights, folder / "model.pt")
    (folder / "model.yaml").write_text("color_space: RGB")
    assert open_model(tmp_path / "adaface", CPU).description.endswith("(CVLface, trained on RGB)")
    assert backbone_of(tmp_path / "adaface")["name"] == "r18"


def test_a_file_of_another_program_is_refused_with_the_way_by_onnx(tmp_path):
    # PaddlePaddle writes pickles of arrays.
    (tmp_path / "m.pdparams").write_bytes(pickle.dumps({"conv1.weight": np.zeros((4, 3), np.float32)}))
    with pytest.raises(
        ModelError, match=r"m\.pdparams: .* or give the ONNX file of a network of another program; no code"
    ):
        open_model(tmp_path / "m.pdparams", CPU)


def test_a_torchscript_program_is_named_and_the_way_out_too(tmp_path):
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(module, torch.zeros(1, 3, 8, 8)).save(str(tmp_path / "m.pt"))
    with pytest.raises(ModelError, match=r"m\.pt: .*TorchScript.*state_dict"):
        open_model(tmp_path / "m.pt", CPU)


@pytest.mark.slow
def test_weights_of_another_network_are_refused_with_their_differences(tmp_path):
    weights = build_backbone("iresnet", **SMALL).state_dict()
    other = build_backbone("iresnet", **(SMALL | {"embedding_size": 8}))
    with pytest.raises(ModelError, match=r"fc\.weight"):
        load_weights_into(other, weights, "m.pt")
    del weights["conv1.weight"]
    with pytest.raises(ModelError, match=r"1 missing \(conv1.weight\)"):
        load_weights_into(build_backbone("iresnet", **SMALL), weights, "m.pt")
    torch.save(weights, tmp_path / "m.pt")
    with pytest.raises(ModelError, match=r"m\.pt: .*\b114 .*r18, r34, r50"):
        open_model(tmp_path / "m.pt", CPU)


def with_head(state):
    named = {f"backbone.{name}": value for name, value in state.items()}
    return {"state_dict": named | {"head.weight": torch.ones(8, 3)}, "epoch": 3}


@pytest.mark.parametrize(
    "wrap",
    [
        with_head,
        lambda state: {"state_dict": data_parallel(with_head(state)["state_dict"])},
        lambda state: with_head({f"_orig_mod.module.{name}": value for name, value in state.items()}),
        *(
            lambda state, key=key: {"epoch": 3, key: state, "optimizer": {"state": {}}}
            for key in ("model", "net", "backbone", "model_state_dict")
        ),
    ],
)
def test_the_backbone_in_a_checkpoint_of_a_usual_loop_is_found(tmp_path, wrap):
    state = {"conv1.weight": torch.ones(2, 3, 1, 1), "bn1.bias": torch.zeros(2)}
    torch.save(wrap(state), tmp_path / "model.pt")
    found = read_weights(tmp_path / "model.pt").weights
    assert found.keys() == state.keys() and torch.equal(found["conv1.weight"], state["conv1.weight"])


@pytest.mark.parametrize("wrap", [data_parallel, lambda state: with_head(state)["state_dict"]])
def test_the_backbone_in_a_safetensors_file_of_another_program_is_found(tmp_path, wrap):
    state = {"conv1.weight": torch.ones(2, 3, 1, 1), "bn1.bias": torch.zeros(2)}
    save_file(wrap(state), tmp_path / "model.safetensors")
    assert read_weights(tmp_path / "model.safetensors")[0].keys() == state.keys()


def test_the_metadata_of_another_program_say_nothing_about_the_network(tmp_path):
    stated = {"format": "pt", "origin": "hub", "takes_fractions": "yes"}
    save_file({"conv1.weight": torch.ones(2, 3, 1, 1)}, tmp_path / "model.safetensors", stated)
    assert read_model(tmp_path / "model.safetensors").description == {}


def test_a_checkpoint_without_known_weights_is_refused_with_its_keys(tmp_path):
    torch.save({"student": {"w": torch.ones(1)}, "optimizer": {}, "epoch": 3}, tmp_path / "m.pt")
    with pytest.raises(ModelError, match=r"m\.pt: .*\(has student, optimizer, epoch\); save"):
        read_weights(tmp_path / "m.pt")


@pytest.mark.parametrize("value", [3, {}, {"a": 1}, [torch.ones(1)]])
def test_a_file_without_named_weights_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "m.pt")
    with pytest.raises(ModelError, match=r"m\.pt: .*model\.state_dict\(\)"):
        read_weights(tmp_path / "m.pt")
    with pytest.raises(ModelError, match="no such file"):
        read_weights(tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fc.weight", torch.int8), ("fc.weight", torch.complex64), ("bn1.num_batches_tracked", torch.complex64)],
)
def test_weights_that_are_not_real_numbers_are_refused(tmp_path, name, dtype):
    weights = build_backbone("iresnet", **SMALL).state_dict()
    weights[name] = weights[name].to(dtype)
    save_model(tmp_path / "m.safetensors", weights, describe_backbone("iresnet", **SMALL))
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ModelError, match=f"m.safetensors: .*{name} .*{kind}"):
        open_model(tmp_path / "m.safetensors", CPU)


def test_a_file_that_describes_a_huge_network_is_refused_before_memory_is_allocated(tmp_path):
    weights = build_backbone("iresnet", **SMALL).state_dict()
    wide = describe_backbone("iresnet", **(SMALL | {"embedding_size": 1 << 40}))
    save_model(tmp_path / "wide.safetensors", weights, wide)
    with pytest.raises(ModelError, match="of another shape"):
        open_model(tmp_path / "wide.safetensors", CPU)


@pytest.mark.parametrize("damage", ["", "manifest.json", "rank_00000.safetensors", "replicated.safetensors"])
def test_a_damaged_checkpoint_beside_the_model_file_of_a_run_is_said(tmp_path, capsys, damage):
    write_model(tmp_path / "model.safetensors", step=1)
    CheckpointWriter(tmp_path / "checkpoints", asynchronous=False).save(snapshot(1))
    if damage:
        os.truncate(tmp_path / "checkpoints" / "step_00000001" / damage, 50)
    assert open_model(tmp_path, torch.device("cpu")).description
    warning = capsys.readouterr().err
    assert (damage in warning and "damaged" in warning) if damage else not warning


def test_a_model_file_that_is_damaged_too_is_not_called_sound(tmp_path, capsys):
    write_model(tmp_path / "model.safetensors", step=1)
    CheckpointWriter(tmp_path / "checkpoints", asynchronous=False).save(snapshot(1))
    for file in ("model.safetensors", "checkpoints/step_00000001/manifest.json"):
        os.truncate(tmp_path / file, 50)
    with pytest.raises(
        ModelError, match=r"model\.safetensors: is not .* or is damaged or incomplete; copy it again$"
    ):
        open_model(tmp_path, CPU)
    assert "model.safetensors of the run is sound" not in capsys.readouterr().err
