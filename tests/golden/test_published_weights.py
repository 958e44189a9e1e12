"""Weights of AdaFace, CVLface and timm: embeddings equal those of the original code.

`published_embeddings.json` was computed on 2026-11-22 with torch 2.13 by the code of mk-minchul/AdaFace (commit
c60eaa7), mk-minchul/CVLface (d3d09c9) and timm 1.0.31, in evaluation mode, from the weights of `weight_of` and the
images of `images`. `layout` is the SHA-256 of the names and shapes of the original state dict, `embedding` the first
16 numbers of the embedding of each image, and `norm` the length of the whole embedding. The images are RGB; AdaFace's
network got them with reversed channels, and CVLface's reverses them itself if its `color_space` is BGR. CVLface's
networks with KP-RPE (`kprpe`), on the path without compiled operators, got `landmarks` with them.
"""

import argparse
import hashlib
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from facetrain.backbone.zoo import build_backbone
from facetrain.errors import ModelError
from facetrain.models.embedding_model import open_model
from facetrain.models.identify_backbone import identify_backbone
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.published_weights import TIMM_FACES, convert_published
from facetrain.models.weight_files import read_weights
from tests.support.made_weights import DEPTHS, images, ir_layout, noise, weight_of

EXPECTED = json.loads(Path(__file__).with_name("published_embeddings.json").read_text())
OURS = {
    "adaface_ir_18": "ir18", "adaface_ir_50": "ir50", "adaface_ir_101": "ir101", "cvlface_ir18_RGB": "ir18",
    "cvlface_ir18_BGR": "ir18", "cvlface_ir50_RGB": "ir50", "cvlface_vit_small_RGB": "vit_s_patch8",
    "cvlface_vit_base_RGB": "vit_b_patch8", "cvlface_vit_kprpe_small_RGB": "vit_s_kprpe",
    "cvlface_vit_kprpe_base_RGB": "vit_b_kprpe", "cvlface_insightface_ir18_RGB": "r18",
}  # fmt: skip
"""Published network -> name of the backbone here, where it differs."""
TIMM = dict(zip(("timm_vit_t_patch8", "timm_vit_s_patch8_gap"), TIMM_FACES, strict=True))
"""Face networks of timm -> name and options of the backbone here."""
SMALL = (
    "cvlface_ir18_BGR", "cvlface_insightface_ir18_RGB", "cvlface_vit_small_RGB", "cvlface_vit_kprpe_small_RGB",
)  # fmt: skip
LARGE = (
    "adaface_ir_50", "adaface_ir_101", "cvlface_ir18_RGB", "cvlface_ir50_RGB", "cvlface_vit_base_RGB",
    "cvlface_vit_kprpe_base_RGB", "timm_vit_s_patch8_gap",
)  # fmt: skip
CPU = torch.device("cpu")


def landmarks():
    return torch.from_numpy(0.5 + 0.5 * noise("landmarks", 2 * 5 * 2)).reshape(2, 5, 2).float()


def backbone_layout(name, **options):
    with torch.device("meta"):
        state = build_backbone(name, **options).state_dict()
    return {key.removeprefix("network."): tuple(value.shape) for key, value in state.items()}


def original_layout(case):
    """Names and shapes of the state dict that the original code has."""
    program, _, network = case.partition("_")
    if program == "adaface":
        return ir_layout(DEPTHS[network.removeprefix("ir_")])
    if program == "timm":
        name, own = TIMM[case]
        return backbone_layout(name, own=own)
    if network.startswith("ir"):
        inner = ir_layout(DEPTHS[network.removeprefix("ir").partition("_")[0]])
    else:
        inner = backbone_layout(OURS[case])
    return {f"net.{name}": shape for name, shape in inner.items()}


def original_weights(case):
    return {name: weight_of(name, shape) for name, shape in original_layout(case).items()}


def assert_embeddings_are_the_originals(case, network):
    with torch.no_grad():
        inputs = (images(), landmarks()) if "kprpe" in case else (images(),)
        embedding = network.eval()(*inputs)
    expected = torch.tensor(EXPECTED[case]["embedding"])
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(embedding[:, :16], expected, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(embedding.norm(dim=1), torch.tensor(EXPECTED[case]["norm"]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", EXPECTED)
def test_the_names_and_shapes_are_those_of_the_original_code(case):
    layout = original_layout(case)
    lines = "\n".join(sorted(f"{name} {list(shape)}" for name, shape in layout.items()))
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == EXPECTED[case]["layout"]


def converted_and_identified(case, weights, folder):
    """Return the weights by our names, and the description of the backbone."""
    if case.startswith("adaface"):
        weights = {f"model.{name}": weight for name, weight in weights.items()}
    else:
        (folder / "model.yaml").write_text(f"name: any\ncolor_space: '{case.rpartition('_')[2]}'\n")
    converted = convert_published(weights, folder / "model.pt").weights
    return converted, identify_backbone(converted, "m.pt")["backbone"]


@pytest.mark.parametrize("case", EXPECTED)
def test_the_network_is_identified_by_its_names_and_shapes(tmp_path, case):
    with torch.device("meta"):
        weights = {name: torch.zeros(shape) for name, shape in original_layout(case).items()}
    _, backbone = converted_and_identified(case, weights, tmp_path)
    name, own = TIMM.get(case, (OURS.get(case, case), None))
    assert backbone == {"name": name, "embedding_size": 512, "image_size": 112} | (
        {"own": own} if own else {}
    )


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.slow) for case in SMALL),
        *(pytest.param(case, marks=pytest.mark.long) for case in LARGE),
    ],
)
def test_embeddings_are_those_of_the_original_code(tmp_path, case):
    converted, backbone = converted_and_identified(case, original_weights(case), tmp_path)
    network = build_backbone(**backbone)
    prefix = "network." if case in TIMM else ""
    network.load_state_dict({f"{prefix}{key}": value for key, value in converted.items()})
    assert_embeddings_are_the_originals(case, network)


def lightning_module(name):
    """A class that pickles under the name of one of PyTorch Lightning's."""
    module, _, attribute = name.rpartition(".")
    made = type(attribute, (), {"__module__": module, "__qualname__": attribute})
    for parent in (".".join(module.split(".")[: n + 1]) for n in range(module.count(".") + 1)):
        sys.modules.setdefault(parent, types.ModuleType(parent))
    setattr(sys.modules[module], attribute, made)
    return made


@pytest.fixture
def without_lightning():
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("pytorch_lightning"):
            del sys.modules[name]


def lightning_checkpoint(weights, *, callback):
    return {
        "epoch": 25,
        "pytorch-lightning_version": "1.4.4",
        "state_dict": {f"model.{name}": weight for name, weight in weights.items()}
        | {"head.kernel": torch.zeros(512, 3), "head.t": torch.zeros(1)},
        "callbacks": {callback: {"best_model_score": torch.tensor(0.9), "dirpath": Path("runs")}},
        "optimizer_states": [{"state": {0: {"momentum_buffer": torch.zeros(3)}}}],
        "hyper_parameters": argparse.Namespace(arch="ir_18", m=0.4),
    }


def test_a_lightning_checkpoint_of_adaface_opens_for_rgb_images(tmp_path, without_lightning):
    callback = lightning_module("pytorch_lightning.callbacks.model_checkpoint.ModelCheckpoint")
    path = tmp_path / "adaface_ir18.ckpt"
    torch.save(lightning_checkpoint(original_weights("adaface_ir_18"), callback=callback), path)
    for name in [name for name in sys.modules if name.startswith("pytorch_lightning")]:
        del sys.modules[name]
    opened = open_model(path, CPU)
    assert opened.description == "ir18, 24,021,376 parameters (AdaFace, trained on BGR)"
    assert opened.preprocessing["channels"] == "RGB"
    assert opened.metadata["origin"] == "AdaFace, trained on BGR"
    assert_embeddings_are_the_originals("adaface_ir_18", opened.network)
    assert not any(name.startswith("pytorch_lightning") for name in sys.modules)


def test_other_objects_in_a_lightning_checkpoint_are_refused_by_name(tmp_path, without_lightning):
    callback = lightning_module("pytorch_lightning.callbacks.surprise.Surprise")
    torch.save(lightning_checkpoint({}, callback=callback), tmp_path / "m.ckpt")
    with pytest.raises(ModelError, match=r"objects of pytorch_lightning\.callbacks\.surprise\.Surprise"):
        read_weights(tmp_path / "m.ckpt")


def test_a_hugging_face_folder_of_timm_opens_and_initializes_a_run(tmp_path):
    save_file(original_weights("timm_vit_t_patch8"), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(
        '{"pretrained_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}'
    )
    opened = open_model(tmp_path, CPU)
    assert opened.description == "timm/vit_tiny_patch16_224, 5,512,640 parameters"
    assert_embeddings_are_the_originals("timm_vit_t_patch8", opened.network)
    options = {"name": TIMM["timm_vit_t_patch8"][0], "own": TIMM["timm_vit_t_patch8"][1]}
    options |= {"embedding_size": 512, "image_size": 112}
    backbone = build_backbone(**options)
    initialize_backbone(backbone, tmp_path, images)
    assert_embeddings_are_the_originals("timm_vit_t_patch8", backbone)
    for stated, message in (
        ('{"mean": [0.485, 0.456, 0.406]}', "takes? .pixels − 127.5"),
        ('{"mean": 0.5}', r"pretrained_cfg\.mean is 0\.5, not three numbers"),
        ('{"mean": "a\\nb"}', r"pretrained_cfg\.mean is a\\nb, not three numbers"),
        ("[0.5]", "pretrained_cfg is not a list of settings"),
    ):
        (tmp_path / "config.json").write_text(f'{{"pretrained_cfg": {stated}}}')
        with pytest.raises(ModelError, match=message):
            open_model(tmp_path, CPU)


def meta_weights(prefix):
    with torch.device("meta"):
        return {f"{prefix}{name}": torch.zeros(shape) for name, shape in ir_layout(DEPTHS["18"]).items()}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("m.yaml", "color_space: BGR\n"),
        ("pretrained_model/model.yaml", "color_space: BGR\n"),
        ("config.json", '{"conf": {"color_space": "BGR"}}'),
    ],
)
@pytest.mark.parametrize("prefix", ["model.net.", "net.", ""])
def test_the_color_order_is_read_from_the_file_beside_the_weights(tmp_path, file, content, prefix):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    assert convert_published(meta_weights(prefix), tmp_path / "m.safetensors").program.endswith("BGR")


def test_a_stated_color_order_counts_more_than_that_of_the_program(tmp_path):
    (tmp_path / "config.json").write_text('{"color_space": "RGB"}')  # perhaps of another model in the folder
    for other in (
        "epochs: 20",
        "",
        "- a list",
        "conf: &conf {epochs: 20}\nmore: *conf",
        "a: !!python/tuple [1]",
    ):
        (tmp_path / "m.yaml").write_text(other)
        assert (
            convert_published(meta_weights("model."), tmp_path / "m.ckpt").program
            == "AdaFace, trained on BGR"
        )
    for stated in ("color_space: RGB", "conf:\n  name: any\ncolor_space: RGB"):
        (tmp_path / "m.yaml").write_text(stated)
        assert (
            convert_published(meta_weights("model."), tmp_path / "m.ckpt").program
            == "AdaFace, trained on RGB"
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "does not state whether its network takes RGB or BGR"),
        ({"net.blocks.0.attn.rpe_k.lookup_table_weight": torch.zeros(1)}, "relative position"),
    ],
)
def test_unknown_color_orders_and_variants_are_refused(tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        convert_published(meta_weights("net.") | change, tmp_path / "m.pt")


@pytest.mark.parametrize("content", ["color_space: GRB", "- a", "{", "conf: 3"])
def test_a_damaged_file_beside_the_weights_is_refused(tmp_path, content):
    (tmp_path / "m.yaml").write_text(content)
    with pytest.raises(ModelError, match="m.yaml"):
        convert_published(meta_weights("net."), tmp_path / "m.pt")
