import hashlib
import json
import pickle
import resource

import numpy as np
import pytest

from facetrain.data.dataset import FaceDataset, ImageSubset, SubsetDataset, evenly_spread
from facetrain.data.loading.sampler import MixtureSampler, SampleOrder, build_sampler, epoch_size
from facetrain.data.mixture import DatasetHead, MixtureDataset, images_per_epoch
from facetrain.data.mixture_file import read_identities
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of, write_records
from tests.support.memory import traced_peak


def mixture(tmp_path, text):
    write_records(tmp_path / "one", [0, 0, 1, 1, 1, 2])
    write_records(tmp_path / "two", [0, 1, 1, 1])
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    return path


def test_a_mixture_keeps_identities_apart_and_can_exclude_some(tmp_path):
    path = mixture(tmp_path, "datasets: [{path: one, without: drop.txt}, {path: two, identities: keep.txt}]")
    (tmp_path / "drop.txt").write_text("1\n")
    (tmp_path / "keep.txt").write_text("1\n")
    dataset = open_dataset(path)
    assert dataset.labels.tolist() == [0, 0, 1, 2, 2, 2] and dataset.num_classes == 3
    assert [data for _, data in images_of(dataset)] == [encoded_image(n) for n in (1, 2, 6, 2, 3, 4)]
    assert "two" in dataset.location(3) and "key 2" in dataset.location(3)
    # A reading process gets the images without the labels.
    sent = pickle.loads(pickle.dumps(dataset))
    assert [sent.read(number) for number in range(6)] == [data for _, data in images_of(dataset)]
    assert not hasattr(sent, "labels") and not hasattr(sent.datasets[0], "identities")
    assert sent.location(3) == dataset.location(3)


def test_a_mixture_may_have_as_many_open_files_as_the_system_permits(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
        open_dataset(mixture(tmp_path, "datasets: [{path: one}, {path: two}]"))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_mixture_describes_its_choices_by_their_contents(tmp_path):
    (tmp_path / "drop.txt").write_text("1\n")
    np.save(tmp_path / "mask.npy", np.array([True] * 4))
    text = "datasets: [{path: one, without: drop.txt}, {path: two, weight: 0.5, mask: mask.npy}]"
    digest = [
        hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()[:32] for name in ("drop.txt", "mask.npy")
    ]
    assert open_dataset(mixture(tmp_path, text)).entries == [
        {"path": "one", "weight": 1.0, "without": digest[0]},
        {"path": "two", "weight": 0.5, "mask": digest[1]},
    ]


def test_identity_lists_of_a_mixture_use_the_numbers_before_small_identities_are_dropped(tmp_path):
    write_records(tmp_path / "three", [0, 1, 1, 2, 2, 2])
    (tmp_path / "drop.txt").write_text("1\n")
    path = mixture(tmp_path, "datasets: [{path: three, without: drop.txt}]")
    left = open_dataset(path, min_images_per_identity=2)
    assert [data for _, data in images_of(left)] == [encoded_image(n) for n in (4, 5, 6)]


def test_a_long_list_of_identities_takes_little_memory(tmp_path):
    count = 1 << 16
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(count))) + "\n")
    with traced_peak() as peak:
        numbers = read_identities(tmp_path / "keep.txt", count)
    assert numbers.tolist() == list(range(count)) and peak.bytes < 48 * count


@pytest.mark.parametrize("text", ["", " \n", "2 0\r\n\t1 \n\n", "\ufeff2\u00a00 1"])
def test_a_list_of_identities_may_have_any_white_space(tmp_path, text):
    (tmp_path / "keep.txt").write_text(text, encoding="utf-8")
    assert read_identities(tmp_path / "keep.txt", 3).tolist() == ([2, 0, 1] if text.strip() else [])


def test_a_dataset_can_be_listed_twice_with_different_identities_or_heads(tmp_path):
    (tmp_path / "some.txt").write_text("0\n2\n")
    text = "datasets: [{path: one, identities: some.txt}, {path: one, without: some.txt, weight: 2}]"
    assert open_dataset(mixture(tmp_path, text)).labels.tolist() == [0, 0, 1, 2, 2, 2]
    text = "{heads: separate, datasets: [{path: one}, {path: one}]}"
    assert open_dataset(mixture(tmp_path, text)).num_classes == 6


def test_a_mixture_has_the_files_of_all_its_datasets_and_those_that_they_leave_out(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.png").write_bytes(encoded_image(0))
        (tmp_path / f"{name}.txt").write_text(f"{name}.png 0\n" * 2)
    (tmp_path / "mix.yaml").write_text("datasets: [{path: one.txt}, {path: two.txt}]")
    mixed, *parts = (open_dataset(tmp_path / name) for name in ("mix.yaml", "one.txt", "two.txt"))
    assert mixed.files == [*parts[0].files, *parts[1].files] and len(set(mixed.files)) == 2
    assert [file.name for file in mixed.skipped] == [
        f"{part.path}/{file.name}" for part in parts for file in part.skipped
    ]
    assert len(mixed.skipped) == 2
    assert MixtureDataset([*parts, parts[0]], [1, 1, 1]).skipped == mixed.skipped
    # Once, also in a mixture of mixtures and of chosen images.
    chosen = ImageSubset(parts[0], np.array([0]))
    assert MixtureDataset([mixed, chosen], [1, 1]).skipped == [*mixed.skipped, mixed.skipped[0]]


@pytest.mark.parametrize(
    "names", [("one", "one/ms1m.rec"), ("one", "link/ms1m.rec"), ("faces", "link/../faces")]
)
def test_a_dataset_is_listed_once_whatever_its_path(tmp_path, names):
    path = mixture(tmp_path, f"datasets: [{{path: {names[0]}}}, {{path: {names[1]}}}]")
    (tmp_path / "one" / "train.rec").rename(tmp_path / "one" / "ms1m.rec")
    (tmp_path / "one" / "train.idx").rename(tmp_path / "one" / "ms1m.idx")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    for person in "ab":
        (tmp_path / "faces" / person).mkdir(parents=True)
        (tmp_path / "faces" / person / "1.png").write_bytes(encoded_image(1))
    with pytest.raises(DataError, match=f"{names[1]} is listed twice with the same identities"):
        open_dataset(path)


def test_an_epoch_shows_each_dataset_as_often_as_its_weight(tmp_path):
    dataset = open_dataset(mixture(tmp_path, "datasets: [{path: one, weight: 0.5}, {path: two, weight: 2}]"))
    assert epoch_size(dataset) == 11
    sampler = build_sampler(dataset, SampleOrder(seed=1, global_batch_size=1))
    first, second = (np.array([sampler.batch(11 * e + t)[0][0] for t in range(11)]) for e in range(2))
    for epoch in (first, second):
        assert np.bincount(epoch, minlength=10)[6:].tolist() == [2, 2, 2, 2]
        assert (epoch < 6).sum() == 3
    # The half that the first epoch left out is the second epoch's.
    assert sorted([*first[first < 6], *second[second < 6]]) == list(range(6))


def test_the_images_of_an_epoch_are_rounded_to_the_nearest_number():
    assert images_per_epoch([10, 10, 3], [0.29, 0.22, 1.5]).tolist() == [3, 2, 4]


@pytest.mark.parametrize("mode", ["full", "blocks"])
def test_an_image_that_an_epoch_shows_again_has_other_draws(mode):
    order = SampleOrder(seed=1, global_batch_size=4, mode=mode, block=2, window=4)
    sampler = MixtureSampler([10, 6, 3], [0.7, 2, 3.4], order)
    for epoch in range(4):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        batches = [sampler.batch(step) for step in steps]
        repeats = [np.zeros_like(index) if repeat is None else repeat for index, repeat in batches]
        shown = [*zip(np.concatenate([index for index, _ in batches]), np.concatenate(repeats), strict=True)]
        assert len(set(shown)) == len(shown) > len({index for index, _ in shown})
        assert all(
            0 <= repeat <= np.ceil([0.7, 2, 3.4])[np.searchsorted([10, 16], n, "right")]
            for n, repeat in shown
        )


def mixture_in_blocks(seed=1):
    return MixtureSampler(
        [1000, 300], [0.5, 2], SampleOrder(seed=seed, global_batch_size=11, mode="blocks", block=16, window=4)
    )


def test_every_pass_over_a_dataset_has_another_order():
    sampler = MixtureSampler([40], [0.5], SampleOrder(seed=1, global_batch_size=20))
    halves = [frozenset(sampler.batch(epoch)[0].tolist()) for epoch in range(6)]
    assert len(set(halves)) == 6


def test_datasets_of_the_same_size_have_different_orders():
    sampler = MixtureSampler([40, 40], [0.5, 0.5], SampleOrder(seed=1, global_batch_size=40))
    shown = sampler.batch(0)[0]
    assert {*shown[shown < 40]} != {*(shown[shown >= 40] - 40)}


def test_a_mixture_in_blocks_shows_every_image_as_often_as_its_weight():
    sampler = mixture_in_blocks()
    assert sampler.num_images == 1100 and sampler.steps_per_epoch == 100
    first, second = (np.concatenate([sampler.batch(100 * e + t)[0] for t in range(100)]) for e in range(2))
    for epoch in (first, second):
        assert (np.bincount(epoch[epoch >= 1000] - 1000, minlength=300) == 2).all()
        assert len(np.unique(epoch[epoch < 1000])) == 500
    assert sorted([*first[first < 1000], *second[second < 1000]]) == list(range(1000))
    assert not np.array_equal(sampler.batch(0)[0], mixture_in_blocks(seed=2).batch(0)[0])


def test_a_mixture_in_blocks_prefetches_the_blocks_that_it_reads():
    sampler, asked, read = mixture_in_blocks(), set(), []
    for step in range(100):
        for start, count in sampler.ranges_to_prefetch(step, is_first_step=step == 0):
            asked |= set(range(start, start + count))
        batch = sampler.batch(step)[0].tolist()
        assert asked.issuperset(batch)
        read += batch
    full = MixtureSampler([1000, 300], [0.5, 2], SampleOrder(seed=1, global_batch_size=11))
    windows = [read[start : start + 64] for start in range(0, 1024, 64)]
    scattered = np.concatenate([full.batch(step)[0] for step in range(100)]).tolist()

    def neighbors(numbers):
        return sum(number + 1 in numbers for number in numbers)

    mixed = [scattered[start : start + 64] for start in range(0, 1024, 64)]
    assert sum(map(neighbors, windows)) > 0.8 * 1024 and sum(map(neighbors, mixed)) < 0.2 * 1024


class RecordingDataset(FaceDataset):
    """a dataset that records its prefetch requests."""

    def __init__(self, num_images):
        self.num_images, self.num_classes = num_images, 1
        self.labels = np.zeros(num_images, np.int64)
        self.asked = []

    def prefetch(self, first, count):
        self.asked.append((first, count))


def test_labels_that_no_number_of_32_bits_can_hold_stay_apart_and_in_order(tmp_path):
    for name, labels in (("a", (0, 2_000_000_000)), ("b", (3, 1_900_000_000))):
        (tmp_path / f"{name}.txt").write_text("".join(f"{n}.png {label}\n" for n, label in enumerate(labels)))
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(encoded_image(n))
    (tmp_path / "m.yaml").write_text("datasets:\n- path: a.txt\n- path: b.txt\n")
    assert open_dataset(tmp_path / "m.yaml").labels.tolist() == [
        0,
        2_000_000_000,
        2_000_000_004,
        3_900_000_001,
    ]


def test_the_places_of_images_are_those_in_the_files_of_their_datasets(tmp_path):
    (tmp_path / "drop.txt").write_text("1\n")
    mixed = open_dataset(mixture(tmp_path, "datasets: [{path: one, without: drop.txt}, {path: two}]"))
    one, two = open_dataset(tmp_path / "one"), open_dataset(tmp_path / "two")
    expected = [*one.places(np.array([0, 1, 5])).tolist(), *two.places(np.arange(4)).tolist()]
    assert mixed.places(np.arange(7)[::-1]).tolist() == expected[::-1]
    assert MixtureDataset([one, RecordingDataset(2)], [1, 1]).places(np.arange(8)) is None


def test_photos_of_one_dataset_have_landmarks_and_the_images_of_the_others_none(tmp_path):
    path = mixture(tmp_path, "datasets: [{path: two}, {path: photos.lst}]")
    (tmp_path / "a.png").write_bytes(encoded_image(0))
    (tmp_path / "photos.lst").write_text("0\ta.png\t0\t" + "\t".join(map(str, range(14))) + "\n")
    points = (mixed := open_dataset(path)).photo_landmarks
    assert (SubsetDataset(mixed, [2]).photo_landmarks == points[4:]).all()
    assert np.isnan(points[:4]).all() and points[4].tolist() == [[x, x + 5] for x in range(4, 9)]


def test_prefetching_reaches_the_datasets_of_a_mixture_and_of_a_subset():
    one, two = RecordingDataset(10), RecordingDataset(20)
    MixtureDataset([one, two], [1, 1]).prefetch(6, 9)
    assert (one.asked, two.asked) == ([(6, 4)], [(0, 5)])
    whole = RecordingDataset(12)
    whole.labels = np.arange(12) // 2
    SubsetDataset(whole, [1, 2, 5]).prefetch(1, 5)
    assert whole.asked == [(3, 3), (10, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("datasets: 3", "datasets is 3"), ("run: {name: photos}", "mix.yaml: datasets is missing$"),
        ("[1", "mix.yaml: "), ("datasets: [{path: three}]", "no such folder or file"),
        ("datasets: [{path: one, wait: 1}]", r"datasets\.0\.wait"),
        ("datasets: [{path: mix.yaml}]", "is itself a mixture"),
        ("datasets: [{path: one}, {path: two}, {path: ./one, identities: two.txt}]",
         "./one"),
        ("datasets: [{path: one, without: zero.txt}, {path: one, without: two.txt}]", "one is listed twice"),
        ("datasets: [{path: one}, {path: two/../one}]", "two/../one is listed twice"),
        ("datasets: [{path: 's3://me:word@bucket/x'}]", r"mix\.yaml: s3://bucket/x: give its credentials by the env"),
        ("datasets: [{path: one}, {path: one/train.rec}]", "one/train.rec is listed twice"),
        ("datasets:\n- path: one\n  path: two\n", "line 3"),
        ("datasets: [{path: one, weight: -1}]", r"datasets\.0\.weight is -1"),
        ("datasets: [{path: two}, {path: one, weight: 0.08}]",
         "0.08.* 0.17"),
        ("datasets: [{path: one, identities: none.txt}]", "none.txt: No such file"),
        ("datasets: [{path: one, identities: words.txt}]", "words.txt: "),
        ("datasets: [{path: one, identities: underscore.txt}]", "underscore.txt: '0_1'"),
        ("datasets: [{path: one, mask: twice.npy}]", "twice.npy: a number occurs twice"),
        ("datasets: [{path: one, mask: twice.npy, identities: far.txt}]", "give either `mask:`"),
        ("datasets: [{path: one, mask: twice.npy, without: far.txt}]", "give either `mask:`"),
        ("datasets: [{path: one, identities: far.txt}]", "far.txt: .*3"),
        ("datasets: [{path: one, identities: negative.txt}]", "negative.txt: .*-1"),
        ("datasets: [{path: one, identities: huge.txt}]", "huge.txt: "),
        ("datasets: [{path: one, without: far.txt}]", "far.txt: .*3"),
        ("datasets: [{path: one, without: two.txt, identities: two.txt}]", "leave no identity of one"),
        ("datasets: [!!python/object/apply:os.getcwd []]", "mix.yaml: "),
    ],
)  # fmt: skip
def test_an_invalid_mixture_file_is_refused(tmp_path, text, message):
    (tmp_path / "far.txt").write_text("0\n3\n")
    (tmp_path / "negative.txt").write_text("0\n-1\n")
    (tmp_path / "huge.txt").write_text(f"0\n{10**20}\n")
    (tmp_path / "words.txt").write_text("ann\n")
    (tmp_path / "underscore.txt").write_text("0_1\n")
    np.save(tmp_path / "twice.npy", np.array([0, 0, 1], np.uint64))
    (tmp_path / "zero.txt").write_text("0\n")
    (tmp_path / "two.txt").write_text("2\n")
    with pytest.raises(DataError, match=message):
        open_dataset(mixture(tmp_path, text))


def test_a_choice_of_identities_without_images_alone_is_refused(tmp_path):
    path = mixture(tmp_path, "datasets: [{path: one, identities: four.txt}]")
    (tmp_path / "one" / "property").write_text("5,16,16\n")
    (tmp_path / "four.txt").write_text("4\n")
    with pytest.raises(DataError, match="leave no identity of one"):
        open_dataset(path)
    (tmp_path / "four.txt").write_text("4\n1\n")
    assert (found := open_dataset(path)).labels.tolist() == [0, 0, 0] and found.num_classes == 2


def test_a_subset_has_labels_in_order_sizes_of_its_images_and_nothing_to_fetch_again(tmp_path):
    one = open_dataset(write_records(tmp_path, [0, 0, 1, 1, 1, 2]))
    subset = SubsetDataset(one, [2, 0])
    assert subset.labels.tolist() == [0, 0, 1]
    assert (subset.sizes(np.arange(3)) == one.sizes(np.array([0, 1, 5]))).all()
    assert (one.sizes(np.array([5])) != one.sizes(np.array([2]))).any(), "another image has another range"
    assert not subset.forget(0)


def test_images_are_chosen_at_equal_distances():
    assert [evenly_spread(*each) for each in ((10, 4), (3, 9), (0, 4))] == [[0, 2, 5, 7], [0, 1, 2], []]


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "no\nsuch\x1b[2J"},
        {"path": "bad\n.tar"},
        {"path": "bad\n.yaml"},
        {"path": "one", "mask": "no\nsuch.npy"},
        {"path": "one", "without": "no\nsuch.txt"},
    ],
)
def test_a_path_in_a_mixture_cannot_break_the_line_of_a_message(tmp_path, entry):
    path = mixture(tmp_path, json.dumps({"datasets": [entry]}))
    (tmp_path / "bad\n.tar").write_bytes(b"nonsense")
    with pytest.raises(DataError) as caught:
        open_dataset(path)
    assert str(caught.value).isprintable() and "\\n" in str(caught.value)


def test_a_mixture_has_a_head_per_dataset_on_request(tmp_path):
    joined = open_dataset(mixture(tmp_path, "datasets: [{path: one}, {path: two}]"))
    assert joined.heads is None
    text = "{heads: separate, datasets: [{path: one, loss_weight: 2}, {path: two, margin: {m2: 0.4}}]}"
    separate = open_dataset(mixture(tmp_path, text))
    assert separate.heads == (DatasetHead({}, 2.0), DatasetHead({"m2": 0.4}, 1.0))
    assert separate.labels.tolist() == joined.labels.tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{heads: own, datasets: [{path: one}]}", "heads is 'own'"),
        ("{head: separate, datasets: [{path: one}]}", "head is 'separate'"),
        ("datasets: [{path: one, margin: {m2: 0.4}}]", "need `heads: separate`"),
        ("datasets: [{path: one, loss_weight: 2}]", "need `heads: separate`"),
        (
            "{heads: separate, datasets: [{path: one, margin: 0.4}]}",
            "margin is 0.4",
        ),
        (
            "{heads: separate, datasets: [{path: one, loss_weight: 0}]}",
            "loss_weight is 0",
        ),
    ],
)
def test_wrong_heads_of_a_mixture_are_errors(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        open_dataset(mixture(tmp_path, text))


def test_an_identity_without_a_name_is_named_by_its_dataset_and_its_number_there(tmp_path):
    for name, identities in (("five", 5), ("filtered", 20)):
        write_records(tmp_path / name, [*range(identities), identities - 1])
    (tmp_path / "named" / "007").mkdir(parents=True)
    (tmp_path / "named" / "007" / "1.png").write_bytes(encoded_image(0))
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(9, 20))))
    (tmp_path / "drop.txt").write_text("0 2")
    entries = ["five/train.rec\n    without: drop.txt", "filtered\n    identities: keep.txt", "named"]
    (tmp_path / "mix.yaml").write_text("datasets:\n" + "".join(f"  - path: {entry}\n" for entry in entries))
    source = open_dataset(tmp_path / "mix.yaml")
    names = ["five_1", "five_3", "five_4", *(f"filtered_{number}" for number in range(9, 20)), "007"]
    assert list(source.identity_names()) == [source.identity_name(label) for label in range(15)] == names
    assert list(SubsetDataset(source, [1, 14]).identity_names()) == ["five_3", "007"]
    # Of the filtered identities of a dataset, too, it is the number in the whole dataset.
    (tmp_path / "mix.yaml").write_text("datasets: [{path: five/, without: drop.txt}]")
    assert list(open_dataset(tmp_path / "mix.yaml", min_images_per_identity=2).identity_names()) == ["five_4"]


def test_a_dataset_that_is_named_by_its_split_is_told_from_others_by_the_folder_around_it(tmp_path):
    for folder in ("casia/train", "glint/train", "ms1m-train"):
        write_records(tmp_path / folder, [0])
    (tmp_path / "mix.yaml").write_text(
        "datasets: [{path: casia/train/train.rec}, {path: glint/train}, {path: ms1m-train}]"
    )
    names = open_dataset(tmp_path / "mix.yaml").identity_names()
    assert list(names) == ["casia_train_0", "glint_train_0", "ms1m-train_0"]


def test_folders_that_are_named_by_their_numbers_keep_these_names_in_a_subset(tmp_path):
    for name in ("0", "1", "2"):
        (tmp_path / "people" / name).mkdir(parents=True)
        (tmp_path / "people" / name / "a.png").write_bytes(encoded_image(int(name)))
    write_records(tmp_path / "numbered", range(3))
    subsets = [SubsetDataset(open_dataset(tmp_path / name), [1, 2]) for name in ("people", "numbered")]
    # Labels of records are counted anew; the folder 1 stays the folder 1.
    assert [[subset.identity_name(label) for label in range(2)] for subset in subsets] == [
        ["1", "2"],
        ["0", "1"],
    ]
    assert [subset.identity_names() is None for subset in subsets] == [False, True]
