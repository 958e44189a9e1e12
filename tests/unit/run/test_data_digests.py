"""Digests of the training data, by which a resumed run notices another dataset or other landmarks."""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from facetrain.config.loading import build_config
from facetrain.data.dataset import FaceDataset
from facetrain.data.mixture import MixtureDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import ConfigError
from facetrain.run.folder import data_digests
from facetrain.run.folder.accepted import Accepted
from facetrain.run.folder.data_digests import (
    changed_inputs,
    check_inputs,
    digest_inputs,
    digest_landmarks,
    digest_records,
    digest_samples,
    digest_set,
)
from tests.support.datasets import write_records


def checkpoint_of(**meta):
    return SimpleNamespace(folder=Path("step_5"), meta=meta, manifest=SimpleNamespace(num_classes=3))


def digests_of(dataset, landmarks, mixture=(), **others):
    return {"dataset": dataset, "landmarks": landmarks, "mixture": list(mixture)} | others


def check(digests, set_keys=(), num_classes=3, **meta):
    check_inputs(checkpoint_of(**meta), digests, num_classes, set(set_keys))


def digest_of_landmarks(point_N52):
    return digest_landmarks(
        SimpleNamespace(num_images=len(point_N52), landmark_reader=lambda: point_N52.__getitem__)
    )


def test_landmarks_have_a_digest_of_their_numbers_and_gaps():
    points = np.random.default_rng(0).uniform(0, 1, (9, 5, 2)).astype(np.float32)
    digests = {digest_landmarks(FaceDataset())}
    assert digests == {""}
    for index in (None, 0, 8):
        changed = points.copy()
        if index is not None:
            changed[index, 2, 1] = np.nan
        digests.add(digest_of_landmarks(changed))
    assert len(digests) == 4
    assert digest_of_landmarks(points[::2][::-1].copy()) == digest_of_landmarks(points[::2][::-1])


def test_other_landmarks_are_refused_unless_the_command_line_sets_the_data():
    saved = {"dataset": "d", "landmarks": "a"}
    check(digests_of("d", "a"), **saved)
    for now in ("b", ""):
        with pytest.raises(
            ConfigError,
            match=rf'^data.train: step_5 was trained with other landmarks .*: "a" → "{now}"; restore',
        ):
            check(digests_of("d", now), **saved)
    for key in ("data.train", "data"):
        check(digests_of("d", "b"), [key], **saved)
    with pytest.raises(ConfigError, match="other landmarks"):
        check(digests_of("d", "b"), ["data.workers", "data.bad_records", "data.augment.flip"], **saved)
    check(digests_of("d", "b"), dataset="d")  # from before landmarks had a digest
    with pytest.raises(ConfigError, match=r"other images, another order"):
        check(digests_of("e", "a"), **saved)


def test_data_with_another_number_of_identities_is_refused_also_if_the_command_line_sets_it():
    for set_keys in ((), ("data.train",)):
        with pytest.raises(
            ConfigError, match=r"^data\.train, data\.min_images.* has 3 identities, and .* has 4;"
        ):
            check(digests_of("e", "a"), set_keys, num_classes=4, dataset="d", landmarks="a")


def test_an_edited_weight_list_or_path_of_a_mixture_is_refused_with_both_values():
    entries = [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 0.5, "mask": "12"}]
    saved = {"dataset": "d", "landmarks": "", "mixture": entries}
    check(digests_of("d", "", entries), **saved)
    for change in ({"weight": 0.25}, {"mask": "13"}, {"path": "c"}):
        now = [entries[0], entries[1] | change]
        message = f"mixture: {json.dumps(entries[1:])} → {json.dumps(now[1:])}; "
        with pytest.raises(ConfigError, match=f"{re.escape(message)}.*--set data.train=VALUE"):
            check(digests_of("d", "", now), **saved)
        check(digests_of("d", "", now), ["data.train"], **saved)
    message = f"mixture: {json.dumps(entries)} → {json.dumps(entries[::-1])}; "
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(digests_of("d", "", entries[::-1]), **saved)
    check(digests_of("d", "", entries), dataset="d")  # from before the mixture was recorded
    with pytest.raises(ConfigError, match="in the mixture: "):
        check(digests_of("d", "", entries), **saved | {"mixture": [3]})


def test_of_several_sets_only_those_that_differ_are_named():
    saved = {"set lfw": "1", "set agedb": "2", "set removed": "3"}
    with pytest.raises(ConfigError, match='other verification sets: agedb "2" → "4"; restore'):
        check({"set lfw": "1", "set agedb": "4", "set new": "5"}, **saved)


def test_a_mixture_describes_its_entries_by_the_content_of_their_lists(tmp_path):
    for name in ("a", "b"):
        write_records(tmp_path / name, [0, 0, 1, 1, 2, 2], size=16)
    (tmp_path / "keep.txt").write_text("0\n1\n")
    mixture = tmp_path / "mix.yaml"
    described, config = [], build_config({"data": {"train": "mix.yaml"}}, "test")
    for weight, identities in ((1, "0\n1\n"), (0.5, "0\n1\n"), (0.5, "0\n2\n")):
        (tmp_path / "keep.txt").write_text(identities)
        mixture.write_text(f"datasets: [{{path: a, identities: keep.txt}}, {{path: b, weight: {weight}}}]\n")
        described.append(digest_inputs(config, open_dataset(mixture), []))
    assert len({digests["dataset"] for digests in described}) == 1, "the labels alone do not show the change"
    first, second, third = (digests["mixture"] for digests in described)
    assert first[0] == second[0] != third[0]
    assert (first[1], second[1], third[1]) == (
        {"path": "b", "weight": 1.0},
        *[{"path": "b", "weight": 0.5}] * 2,
    )


def test_images_of_other_sizes_or_at_other_places_have_another_digest_in_every_kind_of_dataset(tmp_path):
    def digests(folder):
        mixture = tmp_path / f"{folder.name}.yaml"
        mixture.write_text(f"datasets: [{{path: {folder}}}, {{path: {tmp_path / 'beside'}, weight: 0.5}}]\n")
        whole, few = (open_dataset(folder, min_images_per_identity=least) for least in (1, 3))
        return [digest_records(source) for source in (whole, few, open_dataset(mixture))]

    labels = [0, 0, 0, 1, 1, 2, 2, 2]
    for name, size in (("same", 16), ("again", 16), ("other", 17), ("beside", 16)):
        write_records(tmp_path / name, labels, size=size)
    same, again, other = (digests(tmp_path / name) for name in ("same", "again", "other"))
    assert same == again and len({*same, *other}) == 6
    unknown = SimpleNamespace(num_images=3, places=lambda index: None)
    assert digest_records(unknown) == "", "a dataset whose places are unknown"


@pytest.mark.parametrize("count", [1, 256, 511, 100_000])
def test_other_bytes_in_any_large_part_of_a_dataset_give_another_digest(count):
    def digest(changed):
        def read(number):
            return b"changed" if number in changed else b"%d" % number

        return digest_samples(SimpleNamespace(num_images=count, files=[], read=read))

    bounds = np.linspace(0, count, min(count, 200) + 1).astype(int).tolist()
    assert digest(()) not in {digest(range(*part)) for part in pairwise(bounds)}


def test_images_on_a_disk_count_also_in_a_mixture_with_a_dataset_in_a_store(monkeypatch):
    content = {"stored": b"a", "local": b"b"}
    stored, local = (
        SimpleNamespace(
            num_images=3,
            num_classes=1,
            labels=np.zeros(3, np.int32),
            files=(),
            read=lambda _, name=name: content[name],
        )
        for name in content
    )
    monkeypatch.setattr(data_digests, "object_versions", lambda part: [] if part is local else ["a version"])
    mixture = MixtureDataset([stored, local], [1.0, 1.0])
    before = digest_samples(mixture)
    content["stored"] = b"c"  # its version tells
    assert before and digest_samples(mixture) == before and digest_samples(stored) == ""
    content["local"] = b"d"
    assert digest_samples(mixture) != before


def test_objects_are_compared_with_a_checkpoint_that_has_the_same_kind_of_versions(tmp_path, monkeypatch):
    source = open_dataset(write_records(tmp_path / "data", [0, 1, 2]))
    monkeypatch.setattr(data_digests, "object_versions", lambda part: [["gs://faces/train.rec", "1700", 3]])
    now = digest_inputs(build_config({"data": {"train": "x"}}, "x"), source, [])
    check(now, objects="of the etag")
    with pytest.raises(ConfigError, match="other objects in the store"):
        check(now, object_versions="of another generation")


def test_the_images_of_a_mixture_on_a_disk_are_sampled_as_those_of_one_dataset():
    sizes = (1000, 3000)
    parts = [
        SimpleNamespace(
            num_images=size,
            num_classes=1,
            labels=np.zeros(size, np.int32),
            files=[],
            read=lambda index, size=size: b"%d %d" % (size, index),
        )
        for size in sizes
    ]
    places = [(size, index) for size in sizes for index in range(size)]
    whole = SimpleNamespace(num_images=4000, files=[], read=lambda number: b"%d %d" % places[number])
    assert digest_samples(MixtureDataset(parts, [1.0, 1.0])) == digest_samples(whole)


def test_other_images_or_labels_of_a_verification_set_give_another_digest():
    images, same = [b"abc", b"d", b"ef", b"g"], np.array([True, False])
    pairs = [
        (images, same),
        (images, ~same),
        ([b"abcd", b"", b"ef", b"g"], same),
        ([*images[:3], b"h"], same),
    ]
    assert len({digest_set(SimpleNamespace(images=one, same=flags)) for one, flags in pairs}) == 4


@pytest.mark.parametrize(
    ("name", "before", "now", "message", "key"),
    [
        ("samples", "a", "b", "data.train: step_5 .* other images: some have other bytes", "data.train"),
        ("records", "a", "b", "data.train: step_5 was trained with other images: some have", "data"),
        ("set lfw", "a", "b", "eval.targets: .* verification sets: ", "eval.dir"),
        ("teacher_cache", "a", "b", "distill.cache: .* other embeddings of the teacher", "distill.cache"),
    ],
)
def test_other_images_sets_or_embeddings_of_a_teacher_are_refused_unless_set(name, before, now, message, key):
    saved = {"dataset": "d", "landmarks": "", name: before}
    with pytest.raises(ConfigError, match=f"^{message}.*; restore them.*--set"):
        check(digests_of("d", "", **{name: now}), **saved)
    check(digests_of("d", "", **{name: now}), [key], **saved)
    assert [*changed_inputs(checkpoint_of(**saved), digests_of("d", "", **{name: now}))] == [
        message.partition(":")[0]
    ]
    check(digests_of("d", "", **{name: before}), **saved)
    check(digests_of("d", "", **{name: now}), dataset="d")  # from before it had a digest


def test_another_list_of_verification_sets_is_no_other_content():
    check(digests_of("d", "", **{"set cfp": "b"}), dataset="d", **{"set lfw": "a"})


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ("model.backbone", "model.backbone"),
        ("data.augment.own[1].type", "data.augment.own"),
        ("log.sinks[0]", "log.sinks"),
    ],
)
def test_other_code_is_refused_by_the_key_that_names_it(changed, key):
    before = {
        "code model.backbone": "1",
        "code head.margin.type": "2",
        "code data.augment.own[1].type": "3",
        "code log.sinks[0]": "4",
    }
    now = before | {f"code {changed}": "5"}
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(key)}: step_5 .* source files .*--set {re.escape(key)}="
    ):
        check(now, **before)
    check(now, [key], **before)
    with pytest.raises(ConfigError, match="source files"):
        check(now, ["head.margin.type", "head.sample_rate"], **before)


def test_code_that_the_config_no_longer_names_or_names_only_now_is_no_other_code():
    backbone, sink = {"code model.backbone": "1"}, {"code log.sinks[0]": "2"}
    check(backbone, **backbone, **sink)
    check(backbone | sink, **backbone)


def test_parts_that_differ_are_all_named_and_those_of_older_checkpoints_are_compared():
    before, now = (
        {"model.backbone": "1", "log.sinks[0]": "2"},
        {"code model.backbone": "3", "code log.sinks[0]": "4"},
    )
    with pytest.raises(ConfigError) as raised:
        check(now | {"set lfw": "5"}, code=before, sets={"lfw": "6"})
    assert str(raised.value).startswith(
        "model.backbone, log.sinks: step_5 was trained with other source files"
    )
    assert 'model.backbone "1" → "3", log.sinks[0] "2" → "4"; ' in str(raised.value)
    assert str(raised.value).endswith(" with --set model.backbone=VALUE --set log.sinks=VALUE")
    with pytest.raises(ConfigError, match="verification sets"):
        check({"set lfw": "5"}, sets={"lfw": "6"})


def test_a_change_of_one_part_that_was_accepted_stays_so_when_another_part_changes():
    checkpoint = checkpoint_of(**{"code model.backbone": "1", "code log.sinks[0]": "2"})
    accepted = Accepted.of(checkpoint, "5f3a", (), {"code model.backbone": "3", "code log.sinks[0]": "2"})
    now = accepted.new_inputs({"code model.backbone": "3", "code log.sinks[0]": "4"})
    check_inputs(checkpoint, now, 3, {"log.sinks"})
    with pytest.raises(ConfigError, match=r"^log\.sinks: "):
        check_inputs(checkpoint, now, 3, set())
