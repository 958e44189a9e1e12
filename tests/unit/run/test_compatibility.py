"""A checkpoint's tensors and the config of the run that continues from it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from facetrain.config.changes import ConfigChange
from facetrain.config.loading import build_config, plain_config
from facetrain.config.paths import with_absolute_paths, with_downloads
from facetrain.errors import ConfigError
from facetrain.remote.catalog import catalog
from facetrain.run.folder.compatibility import (
    check_compatibility,
    check_initial,
    check_meaning,
    describe_initial,
    differences,
    find_config_changes,
)


def mobile(layers):
    return build_config(
        {"data": {"train": "x"}, "model": {"backbone": "mbf", "layers": layers}, "train": {"max_steps": 9}},
        "x",
    )


def check(before, now):
    """Check that a run with `now` as `model.layers` can continue from a checkpoint that was trained with `before`."""
    meta = {"model": {"config": plain_config(mobile(before))}}
    saved = SimpleNamespace(folder=Path("step_00000004"), step=4, meta=meta)
    check_compatibility(saved, mobile(now), total_steps=9)


def test_the_published_numbers_of_blocks_may_be_written_out_or_left_out():
    check(None, [1, 4, 6, 2])
    check([1, 4, 6, 2], None)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (None, [2, 8, 12, 4], r"with \[1, 4, 6, 2\], .* with \[2, 8, 12, 4\]; keep .* by distill\.teacher$"),
        ([2, 8, 12, 4], None, r"with \[2, 8, 12, 4\], .* with \[1, 4, 6, 2\]; keep"),
    ],
)
def test_other_numbers_of_blocks_than_the_published_ones_are_refused_with_the_key(before, now, message):
    with pytest.raises(ConfigError, match=rf"^model\.layers: .* {message}"):
        check(before, now)


@pytest.mark.parametrize(("before", "now"), [(None, 2), (1, 2), (2, None)])
def test_another_stride_of_the_stem_is_refused_with_the_key_and_1_may_be_left_out(before, now):
    def iresnet(stride):
        model = {"backbone": "iresnet", "layers": [1] * 4, "widths": [8] * 4, "stem_stride": stride}
        return build_config({"data": {"train": "x"}, "model": model, "train": {"max_steps": 9}}, "x")

    meta = {"model": {"config": plain_config(iresnet(before))}}
    saved = SimpleNamespace(folder=Path("step_00000004"), step=4, meta=meta)
    with pytest.raises(ConfigError, match=r"^model\.stem_stride: "):
        check_compatibility(saved, iresnet(now), total_steps=9)
    if before != 2:
        check_compatibility(saved, iresnet(1 if before is None else None), total_steps=9)


ADAMW = {"name": "adamw"}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ({"momentum": 0.9}, {"momentum": 0.5}, None),
        ({"momentum": 0.9} | ADAMW, {"momentum": 0} | ADAMW, None),
        (
            {},
            {"momentum": 0},
            r"momentum: .* with a value above 0, and cannot continue with 0; keep .* with model\.init_from$",
        ),
        ({"muon": {}}, {"muon": {"lr": 0.01}}, None),
        # SGD with momentum has one moment for each weight, as Muon, but it is a sum.
        ({}, {"muon": {}}, "muon: .* with null, and cannot continue with Muon; keep null"),
        ({"muon": {}}, {}, "muon: .* with Muon, and cannot continue with null; keep Muon"),
        (ADAMW, {"muon": {}} | ADAMW, "muon: .* with null, and cannot continue with Muon; keep null"),
        ({"muon": {}, "momentum": 0}, {"momentum": 0}, "muon: .* with Muon, and cannot continue with null"),
    ],
)
def test_an_optimizer_with_other_moments_is_refused_with_the_key(before, now, message):
    configs = [
        build_config({"data": {"train": "x"}, "optim": optim, "train": {"max_steps": 9}}, "x")
        for optim in (before, now)
    ]
    meta = {"model": {"config": plain_config(configs[0])}}
    saved = SimpleNamespace(folder=Path("step_00000004"), step=4, meta=meta)
    with pytest.raises(ConfigError, match=rf"^optim\.{message}") if message else nullcontext():
        check_compatibility(saved, configs[1], total_steps=9)


def test_a_checkpoint_with_a_config_of_another_version_is_refused_and_one_without_is_not_compared():
    config = build_config({"data": {"train": "x"}, "seed": 1}, "x")

    def changes(meta):
        return find_config_changes(SimpleNamespace(folder=Path("step_00000004"), meta=meta), config)

    assert changes({}) == []
    assert [each.key for each in changes({"config": "data: {train: x}"})] == ["seed"]
    message = r"^step_00000004: its config: train\.new_key is not a key; .*with the version of facetrain that wrote it"
    with pytest.raises(ConfigError, match=message):
        changes({"config": "data: {train: x}\ntrain: {new_key: 1}"})


def test_a_number_that_is_not_one_has_not_changed():
    nan = float("nan")
    assert not list(
        differences({"bound": nan, "list": [nan]}, {"bound": float("nan"), "list": [float("nan")]})
    )
    assert [change.key for change in differences({"bound": nan}, {"bound": 1.0})] == ["bound"]


def test_the_advice_for_a_changed_value_is_one_that_set_takes():
    change = ConfigChange(key="head.margin.options.bound", before=1.0, now=float("inf"))
    with pytest.raises(ConfigError, match=r"with --set head\.margin\.options\.bound=\.inf$"):
        check_meaning(SimpleNamespace(folder="step_00000004"), [change], frozenset())


def test_a_teacher_may_have_moved_but_its_loss_stays():
    checkpoint = SimpleNamespace(folder="step_00000004")
    moved = [ConfigChange(key=f"distill.{key}", before="old", now="new") for key in ("teacher", "cache")]
    check_meaning(checkpoint, moved, frozenset())
    for key in ("distill", "distill.weight"):
        with pytest.raises(ConfigError, match=rf"^{key}: 1\.0 → null: step_00000004 "):
            check_meaning(checkpoint, [*moved, ConfigChange(key=key, before=1.0, now=None)], frozenset())


@pytest.mark.parametrize("key", ["model.init_from", "model.init_blocks", "head.init_from"])
def test_another_first_model_is_refused_if_the_command_line_sets_it(key):
    changes = [ConfigChange(key=key, before="old", now="new")]
    with pytest.raises(ConfigError, match=rf"^{key}: \"old\" → \"new\": .* or start a new run$"):
        check_initial(changes, {key})
    check_initial(changes, {"train.epochs"})
    check_initial([], {key})


@pytest.mark.parametrize(
    ("begun", "written", "lines"),
    [
        ("hf://org/net@0123abc", "hf://org/net", []),
        ("hf://org/net@0123abc", "hf://org/net@main", []),
        ("https://host/net.onnx#sha256=00", "https://host/net.onnx", []),
        (f"{catalog()['w600k_mbf'].address}#sha256=00", "w600k_mbf", []),
        (None, "hf://o/n", ['model.init_from: "hf://o/n" has no effect: the run has begun with null']),
        ("/a.pt", "/b.pt", ['model.init_from: "/b.pt" has no effect: the run has begun with "/a.pt"']),
    ],
)
def test_another_first_model_has_no_effect_on_a_run_and_the_one_that_began_it_no_line(begun, written, lines):
    values = {"data": {"train": "/x"}, "model": {"init_from": written}, "eval": {"targets": []}}
    config = with_absolute_paths(with_downloads(build_config(values, "x"), has_weights=True))
    change = ConfigChange(key="model.init_from", before=begun, now=config.model.init_from)
    assert describe_initial([change]) == lines
