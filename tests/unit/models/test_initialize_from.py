"""Backbone weights and class centers with which a fine-tuning run begins."""

import itertools
from collections import OrderedDict

import pytest
import torch
from torch import nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.own_network import OwnNetwork
from facetrain.backbone.zoo import build_backbone
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.errors import CheckpointError, ModelError
from facetrain.head.class_shard import shard_classes
from facetrain.models.initialize_from import initialize_backbone
from facetrain.models.known_identities import Names
from facetrain.models.model_file import describe_backbone, save_model
from facetrain.models.read_model import read_model
from facetrain.models.saved_centers import choose_centers_of, initialize_centers, read_centers
from tests.support.heads import make_head, margin_settings
from tests.support.snapshots import snapshot

CLASSES, WIDTH = 11, 6


def write_arcface_torch(folder, world_size, *, classes=CLASSES):
    """Write the files of arcface_torch with save_all_states; return the centers of all ranks."""
    torch.manual_seed(0)
    whole, backbone = torch.randn(classes, WIDTH), build_backbone("mbf").state_dict()
    for rank in range(world_size):
        shard = shard_classes(classes, rank, world_size)
        state = {
            "epoch": 3,
            "global_step": 300,
            "state_dict_backbone": backbone if rank == 0 else {"conv1.weight": torch.zeros(1)},
            "state_dict_softmax_fc": {"weight": whole[shard.start : shard.stop].clone()},
            "state_optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]},
            "state_lr_scheduler": {"last_epoch": 300},
        }
        torch.save(state, folder / f"checkpoint_gpu_{rank}.pt")
    return whole


def head_of(classes, rank=0, world_size=1, width=WIDTH):
    return make_head(
        embedding_size=width,
        num_classes=classes,
        margin=margin_settings("arcface"),
        rank=rank,
        world_size=world_size,
    )


def centers_of(head):
    return head.row_state()["weight"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_centers_of_all_ranks_of_arcface_torch_are_joined(tmp_path, world_size):
    whole = write_arcface_torch(tmp_path, world_size)
    found = read_centers(tmp_path / "checkpoint_gpu_0.pt")
    assert found.num_classes == CLASSES
    for start, stop in itertools.combinations(range(CLASSES + 1), 2):
        assert torch.equal(found.rows(start, stop), whole[start:stop])
    weights, _, _ = read_model(tmp_path / "checkpoint_gpu_0.pt")
    assert weights.keys() == build_backbone("mbf").state_dict().keys()


def test_missing_ranks_and_ranks_of_another_run_are_refused(tmp_path):
    write_arcface_torch(tmp_path, 3)
    (tmp_path / "checkpoint_gpu_1.pt").rename(tmp_path / "moved.pt")
    with pytest.raises(ModelError, match="ranks 0, 2"):
        read_centers(tmp_path / "checkpoint_gpu_0.pt")
    torch.save({"state_dict_softmax_fc": {"weight": torch.zeros(9, WIDTH)}}, tmp_path / "checkpoint_gpu_1.pt")
    with pytest.raises(ModelError, match=r"\[4, 9, 3\]"):
        read_centers(tmp_path / "checkpoint_gpu_0.pt")
    torch.save({"state_dict_backbone": {}}, tmp_path / "checkpoint_gpu_1.pt")
    with pytest.raises(ModelError, match=r"gpu_1\.pt"):
        read_centers(tmp_path / "checkpoint_gpu_0.pt")
    with pytest.raises(ModelError, match=r"moved\.pt: .*head\.init_from"):
        read_centers(tmp_path / "moved.pt")


def test_the_centers_of_a_run_are_read_by_class(tmp_path):
    (tmp_path / "run").mkdir()
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints", keep=1)
    writer.save(snapshot(1, rank=0, world_size=1))
    writer.finish()
    found = read_centers(tmp_path / "run")
    assert found.rows(0, found.num_classes)[:, 0].tolist() == [c + 1.0 for c in range(found.num_classes)]


def initialize(head, path, names, *, may_grow):
    """Load the centers of `path` into a head as the ranks of a run do; return the line about them."""
    choice = choose_centers_of(path, names, head.num_classes, may_grow=may_grow, min_images=1)
    initialize_centers(head, path, choice.number)
    return choice.remark


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("classes", [CLASSES, CLASSES + 8])
def test_known_identities_keep_their_centers_and_new_ones_get_random_centers(tmp_path, classes, world_size):
    whole = write_arcface_torch(tmp_path, 2)
    path = tmp_path / "checkpoint_gpu_0.pt"
    drawn = centers_of(head_of(classes)).clone()
    heads = [head_of(classes, rank, world_size) for rank in range(world_size)]
    for head in heads:
        remark = initialize(head, path, None, may_grow=classes > CLASSES)
        assert remark.startswith("class centers by number") and "assumed" in remark
    found = torch.cat([centers_of(head) for head in heads])
    assert torch.equal(found, torch.cat([whole, drawn[CLASSES:]]))


def test_centers_are_not_taken_by_number_if_one_of_the_runs_has_left_out_people(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints", asynchronous=False)
    meta = {"model": {"config": {"data": {"min_images_per_identity": 2}}}}
    writer.save(snapshot(0, num_classes=3, meta=meta))
    for classes, min_images in ((3, 1), (4, 2)):
        choice = choose_centers_of(tmp_path, None, classes, may_grow=True, min_images=min_images)
        assert choice.number.tolist()[:3] == [0, 1, 2]
    with pytest.raises(ModelError, match=r"data\.min_images_per_identity 2, and this run has 1"):
        choose_centers_of(tmp_path, None, 4, may_grow=True, min_images=1)


def write_named_run(folder, names):
    """Write a checkpoint whose class centers are the numbers of their classes; return its run folder."""
    writer = CheckpointWriter(folder / "run" / "checkpoints")
    (folder / "run").mkdir()
    tensors = {f"identities.{name}": value for name, value in Names.of(names).tensors().items()}
    writer.save(snapshot(0, num_classes=len(names), replicated=tensors))
    assert not writer.finish().failure
    return folder / "run"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_people_are_found_by_name_whatever_their_number_is(tmp_path, monkeypatch, world_size):
    monkeypatch.setattr("facetrain.head.class_shard._PIECE", 4)  # several pieces
    path = write_named_run(tmp_path, [f"p{number}" for number in range(CLASSES)])
    names = ["anna", *(f"p{number}" for number in (7, 0, 1, 2, 10, 4, 5, 6, 3)), "zoe"]
    drawn = centers_of(head_of(len(names), width=4)).clone()
    heads = [head_of(len(names), rank, world_size, width=4) for rank in range(world_size)]
    remarks = {initialize(head, path, Names.of(names), may_grow=True) for head in heads}
    found = torch.cat([centers_of(head) for head in heads])
    assert found[1:-1, 0].tolist() == [7, 0, 1, 2, 10, 4, 5, 6, 3]
    assert torch.equal(found[[0, -1]], drawn[[0, -1]])
    assert remarks == {"class centers by name: of 9 of 11 identities; 2 new, 2 removed"}


def test_centers_that_do_not_fit_the_head_are_refused_with_advice(tmp_path):
    write_arcface_torch(tmp_path, 1)
    path = tmp_path / "checkpoint_gpu_0.pt"
    with pytest.raises(ModelError, match="11 identities.* 12.*head.init_from: extend"):
        initialize(head_of(12), path, None, may_grow=False)
    with pytest.raises(ModelError, match="11 identities.* 10.*head.init_from: reinit"):
        initialize(head_of(10), path, None, may_grow=True)
    with pytest.raises(ModelError, match="6 numbers.* 8"):
        initialize(head_of(CLASSES, width=8), path, None, may_grow=False)


SHALLOW = {"name": "mbf_small", "layers": (1, 2, 1, 0), "embedding_size": 32, "image_size": 48}


def random_network(seed, **options):
    """Return a network whose weights and statistics are all random."""
    torch.manual_seed(seed)
    network = build_backbone(**options)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    return network


def test_a_smaller_network_takes_the_first_blocks_of_each_stage(tmp_path):
    published = {name: value for name, value in SHALLOW.items() if name != "layers"}
    deeper, path = random_network(0, **published).eval(), tmp_path / "model.safetensors"
    save_model(path, deeper.state_dict(), describe_backbone(**published))
    with pytest.raises(ModelError, match="unexpected"):
        initialize_backbone(build_backbone(**SHALLOW), path, None)
    backbone = build_backbone(**SHALLOW)
    initialize_backbone(backbone, path, list, first_blocks_of=SHALLOW)
    kept = deeper.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in backbone.state_dict().items())
    # Without the other blocks, the deeper network is the smaller one.
    for place, blocks in zip((3, 5, 7), SHALLOW["layers"][1:], strict=True):
        del deeper.layers[place].layers[blocks:]
    assert deeper.state_dict().keys() == backbone.state_dict().keys()


def test_other_differences_than_missing_blocks_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    wider = {"name": "iresnet", "layers": (1, 2, 1, 1), "widths": (8, 8, 8, 8), "embedding_size": 16}
    save_model(path, build_backbone(**wider).state_dict(), describe_backbone(**wider))
    for layers, widths in (((1, 1, 1, 1), (8, 8, 16, 8)), ((1, 3, 1, 1), (8, 8, 8, 8))):
        options = wider | {"layers": layers, "widths": widths}
        with pytest.raises(ModelError, match=r"model\.safetensors: .*weights \d+ "):
            initialize_backbone(build_backbone(**options), path, list, first_blocks_of=options)
    options = wider | {"layers": (1, 1, 1, 1)}
    initialize_backbone(build_backbone(**options), path, list, first_blocks_of=options)
    with pytest.raises(ModelError, match="mbf"):
        initialize_backbone(build_backbone(**options), tmp_path / "model.onnx", list, first_blocks_of=options)


def test_weights_of_another_published_network_are_named(tmp_path):
    torch.save(build_backbone("r18").state_dict(), tmp_path / "model.pt")
    with pytest.raises(ModelError, match=r"r18 .*512"):
        initialize_backbone(build_backbone("r34"), tmp_path / "model.pt", None)


def own_network(part, size=8):
    """Return a network of one's own whose first layer is in a part of this name."""
    layers = {part: nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 4, 16))), "flatten": nn.Flatten()}
    network = nn.Sequential(OrderedDict(layers, fc=nn.Linear(4, size)))
    return OwnNetwork(network, embedding_size=size, image_size=16)


@pytest.mark.parametrize(
    ("part", "prefix"),
    [
        *itertools.product(["stem", "net", "backbone"], ["", "module.", "network."]),
        *itertools.product(["module"], ["", "module."]),
    ],
)
def test_a_network_of_ones_own_takes_the_weights_of_its_module(tmp_path, part, prefix):
    backbone = own_network(part)
    saved = {
        f"{prefix}{name}": torch.full_like(value, 2.0)
        for name, value in backbone.network.state_dict().items()
    }
    torch.save(saved, tmp_path / "my.pt")
    initialize_backbone(backbone, tmp_path / "my.pt", None)
    assert all(bool((value == 2).all()) for value in backbone.state_dict().values())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_network_of_ones_own_takes_its_weights_out_of_a_model_with_a_classifier(tmp_path, prefix):
    saved, backbone = own_network("stem"), own_network("stem")
    named = {f"{prefix}backbone.{name}": value for name, value in saved.network.state_dict().items()}
    torch.save(
        named | {f"{prefix}fc.weight": torch.ones(99, 8)}, tmp_path / "my.pt"
    )  # named as our last layer
    initialize_backbone(backbone, tmp_path / "my.pt", None)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in backbone.state_dict().items())


class OwnBackbone(Backbone):
    def __init__(self, **options):
        super().__init__(**options)
        self.net = nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 4, 16)))


def test_a_backbone_of_ones_own_takes_its_weights_whatever_its_parts_are_called(tmp_path):
    saved, backbone = (OwnBackbone(embedding_size=8, image_size=16) for _ in range(2))
    torch.save(saved.state_dict(), tmp_path / "my.pt")
    initialize_backbone(backbone, tmp_path / "my.pt", None)
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in backbone.state_dict().items())


@pytest.mark.parametrize("part", ["stem", "net", "backbone"])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda saved: saved.pop("fc.bias"), r"1 missing \(network\.fc\.bias\)"),
        (lambda saved: saved.update(more=torch.ones(3)), r"1 unexpected \(network\.more\)"),
        (
            lambda saved: saved.update({"fc.weight": torch.ones(9, 4), "fc.bias": torch.ones(9)}),
            r"2 of another shape \(network\.fc\.weight, network\.fc\.bias\)",
        ),
    ],
)
def test_what_does_not_fit_a_network_of_ones_own_is_named(tmp_path, part, change, found):
    backbone = own_network(part)
    saved = backbone.network.state_dict()
    change(saved)
    torch.save(saved, tmp_path / "my.pt")
    with pytest.raises(ModelError, match=rf"my\.pt: does not fit the network: weights {found}$"):
        initialize_backbone(backbone, tmp_path / "my.pt", None)


def test_the_newest_checkpoint_of_a_run_that_is_gone_is_named(tmp_path):
    (tmp_path / "latest").write_text("step_00000005\n")
    with pytest.raises(CheckpointError, match="step_00000005"):
        read_centers(tmp_path / "latest")
