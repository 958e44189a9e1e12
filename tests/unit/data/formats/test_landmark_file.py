import cv2
import numpy as np
import pytest
import torch

from facetrain.data.augmentations.build import build_augment
from facetrain.data.dataset import SubsetDataset
from facetrain.data.formats.landmark_file import (
    landmarks_path,
    read_landmarks_beside,
    square_landmarks,
    without_gaps,
    write_landmarks,
)
from facetrain.data.images.augment import mirror_landmarks
from facetrain.data.images.decode import resize_square
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import GlobalSampler, SampleOrder
from facetrain.data.mixture import MixtureDataset
from facetrain.data.open_dataset import open_dataset, require_landmarks
from facetrain.data.settings import AugmentSettings
from facetrain.data.tools.landmark_table import read_landmark_table
from facetrain.data.tools.landmark_writer import write_dataset_landmarks
from facetrain.data.tools.pack import pack
from facetrain.errors import DataError
from facetrain.face_landmarks import ARCFACE_TEMPLATE, NORMALIZED_TEMPLATE
from tests.support.datasets import write_records
from tests.support.faults import make_read_only, small_disk
from tests.support.world import ONE_RANK
from tests.unit.data.tools.helpers import convert


def random_landmarks(count, seed=0):
    return np.random.default_rng(seed).uniform(0.2, 0.8, (count, 5, 2)).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    folder = write_records(tmp_path / "records", [n % 4 for n in range(12)])
    write_landmarks(folder / "landmarks.npy", random_landmarks(12))
    return folder


def dots(landmarks, side, width=None):
    """Draw a dot for each point on a square at the center of an image, and blur it."""
    image = np.zeros((side, width or side, 3), np.float32)
    for number, (x, y) in enumerate(landmarks):
        center = x * side + ((width or side) - side) / 2 - 0.5, y * side - 0.5
        rows, columns = np.mgrid[: image.shape[0], : image.shape[1]]
        dot = np.exp(-0.5 * ((columns - center[0]) ** 2 + (rows - center[1]) ** 2) / 9)
        image[..., number % 3] = np.maximum(image[..., number % 3], 255 * dot)
    return image.round().astype(np.uint8)


def dot_position(channel):
    """Return the center of the light of a channel, as fractions of the sides."""
    light = np.maximum(channel.astype(np.float64), 0)
    rows, columns = np.mgrid[: light.shape[0], : light.shape[1]]
    return np.array(
        [
            ((columns + 0.5) * light).sum() / light.sum() / light.shape[1],
            ((rows + 0.5) * light).sum() / light.sum() / light.shape[0],
        ]
    )


@pytest.mark.parametrize(
    "augmentations", [{"flip": 0.5}, {"crop": 1.0}, {"flip": 0.5, "crop": 0.7, "low_resolution": 0.5}]
)
def test_landmarks_move_with_the_image(augmentations):
    augment = build_augment(7, AugmentSettings(**({"flip": 0.0} | augmentations)))
    landmarks = torch.from_numpy(random_landmarks(12, seed=3) * 0.5 + 0.25)
    image = torch.from_numpy(np.stack([dots(points[:3], 96) for points in landmarks.numpy()]))
    sample = torch.arange(100, 112)
    seen = (augment(image, sample, 2).numpy() + 1) / 2
    moved = augment.move_landmarks(landmarks, sample, 2)
    flips = augment.flips(sample, 2)
    for row in range(12):
        order = [1, 0, 2] if flips is not None and flips[row] else [0, 1, 2]
        for point, channel in enumerate(order):
            np.testing.assert_allclose(dot_position(seen[row, channel]), moved[row, point], atol=0.006)


def test_the_mirror_image_exchanges_left_and_right():
    mirrored = mirror_landmarks(torch.from_numpy(NORMALIZED_TEMPLATE)[None])[0]
    assert mirrored[0, 0] == 1 - NORMALIZED_TEMPLATE[1, 0] and mirrored[0, 1] == NORMALIZED_TEMPLATE[1, 1]
    assert mirrored[3, 0] == 1 - NORMALIZED_TEMPLATE[4, 0]
    np.testing.assert_allclose(mirrored, NORMALIZED_TEMPLATE, atol=0.02)


@pytest.mark.parametrize("size", [(96, 140), (140, 96), (96, 96)])
def test_landmarks_are_fractions_of_what_the_network_sees(size):
    height, width = size
    pixel = np.array([[60.0, 50.0]])
    image = np.zeros((height, width, 3), np.uint8)
    cv2.circle(image, (60, 50), 3, (255, 0, 0), -1)
    seen = dot_position(resize_square(image, 112)[..., 0])
    np.testing.assert_allclose(seen, square_landmarks(pixel, height, width)[0], atol=0.01)


def test_the_loader_gives_each_image_its_landmarks(folder):
    landmarks = random_landmarks(12)
    landmarks[5] = np.nan
    write_landmarks(folder / "landmarks.npy", landmarks)
    dataset = open_dataset(folder)
    settings = LoaderSettings(2, 16, accumulate=2, workers=0, landmarks=True)
    sampler = GlobalSampler(12, SampleOrder(seed=1, global_batch_size=4))
    loader = Loader(dataset, sampler, settings, ONE_RANK, stop_step=3)
    batches = [batch for step in loader for batch in step]
    loader.close()
    assert sorted(torch.cat([batch.sample_B for batch in batches]).tolist()) == list(range(12))
    landmarks[5] = NORMALIZED_TEMPLATE
    for batch in batches:
        np.testing.assert_array_equal(batch.landmarks_B52, landmarks[batch.sample_B])


def test_a_replaced_image_has_its_own_landmarks(folder):
    data = bytearray((folder / "train.rec").read_bytes())
    broken = data.index(b"\x89PNG", data.index(b"\x89PNG", data.index(b"\x89PNG") + 1) + 1)
    data[broken : broken + 4] = b"oops"
    (folder / "train.rec").write_bytes(data)
    settings = LoaderSettings(12, 16, workers=0, skip_bad=True, landmarks=True)
    sampler = GlobalSampler(12, SampleOrder(seed=1, global_batch_size=12))
    loader = Loader(open_dataset(folder), sampler, settings, ONE_RANK, stop_step=1)
    ((batch,),) = list(loader)
    loader.close()
    row = batch.sample_B.tolist().index(2)
    np.testing.assert_array_equal(batch.landmarks_B52[row], random_landmarks(12)[3])


def test_subsets_and_mixtures_have_the_landmarks_of_their_images(folder, tmp_path):
    dataset, landmarks = open_dataset(folder), random_landmarks(12)
    chosen = SubsetDataset(dataset, [1, 3])
    np.testing.assert_array_equal(chosen.landmarks, landmarks[1::2])
    mixed = MixtureDataset([chosen, dataset], [1.0, 1.0])
    np.testing.assert_array_equal(mixed.landmarks, np.concatenate([landmarks[1::2], landmarks]))
    plain = open_dataset(write_records(tmp_path / "plain", [0, 1]))
    assert plain.landmarks is None
    assert MixtureDataset([dataset, plain], [1.0, 1.0]).landmarks is None


def test_landmarks_of_a_batch_of_a_mixture_are_read_where_each_dataset_has_mapped_them(folder):
    dataset, landmarks = open_dataset(folder), random_landmarks(12)
    read = MixtureDataset([SubsetDataset(dataset, [1, 3]), dataset], [1.0, 1.0]).landmark_reader()
    # A copy of all landmarks would not follow the file.
    changed = np.load(folder / "landmarks.npy", mmap_mode="r+")
    changed[3] = 0.5
    assert (read(np.array([13, 1, 7])) == [landmarks[7], changed[3], landmarks[1]]).all()


def test_written_datasets_keep_the_landmarks(folder, tmp_path):
    landmarks, before = random_landmarks(12), open_dataset(folder)
    convert(folder, tmp_path / "tar", "webdataset")
    written = open_dataset(tmp_path / "tar")
    for n in range(12):
        (m,) = (m for m in range(12) if before.read(m) == written.read(n))
        np.testing.assert_array_equal(written.landmarks[n], landmarks[m])
    pack(folder, tmp_path / "packed", image_size=16)
    np.testing.assert_array_equal(open_dataset(tmp_path / "packed").landmarks, landmarks)


def write_photographs(folder, points):
    for name in ("ann/1.png", "ann/2.png", "bob/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / name), dots((np.array(points) + 0.5) / 160, 160)[..., ::-1])


def write_list(path, points, names=("ann/1.png", "ann/2.png", "bob/1.png")):
    rows = [",".join([name, *(str(value) for value in np.ravel(points))]) for name in names]
    path.write_text("\n".join(rows))
    return read_landmark_table(path)


def test_packing_writes_the_landmarks_of_the_aligned_faces(tmp_path):
    points = ARCFACE_TEMPLATE * 1.2 + 10
    points[2] += [8, -6]  # not the template's nose: it stays displaced
    write_photographs(tmp_path / "photos", points)
    pack(tmp_path / "photos", tmp_path / "out", landmarks=write_list(tmp_path / "list.csv", points))
    dataset = open_dataset(tmp_path / "out")
    landmarks = dataset.landmarks
    assert landmarks.shape == (3, 5, 2)
    image = cv2.imdecode(np.frombuffer(dataset.read(0), np.uint8), cv2.IMREAD_COLOR_RGB)
    np.testing.assert_allclose(
        dot_position(np.maximum(image[..., 2].astype(int) - 40, 0)), landmarks[0, 2], atol=0.01
    )
    assert np.abs(landmarks[0, 2] - NORMALIZED_TEMPLATE[2]).max() > 0.02


def test_landmarks_of_an_existing_dataset_come_from_a_list(tmp_path):
    points = ARCFACE_TEMPLATE + 20
    write_photographs(tmp_path / "photos", points)
    finder = write_list(tmp_path / "list.csv", points, ["ann/1.png", "bob/1.png"])
    assert write_dataset_landmarks(tmp_path / "photos", finder) == (3, ["ann/2.png"])
    landmarks = open_dataset(tmp_path / "photos").landmarks
    np.testing.assert_allclose(landmarks[0], (points + 0.5) / 160, atol=1e-6)
    assert np.isnan(landmarks[1]).all()
    np.testing.assert_array_equal(without_gaps(landmarks)[1], NORMALIZED_TEMPLATE)
    for unfit in (random_landmarks(10), np.full((3, 5, 2), 80.0)):
        write_landmarks(tmp_path / "photos" / "landmarks.npy", unfit)
        with pytest.raises(DataError, match="facetrain data landmarks"):
            open_dataset(tmp_path / "photos").landmark_reader()
        write_dataset_landmarks(tmp_path / "photos", finder)
        np.testing.assert_array_equal(open_dataset(tmp_path / "photos").landmarks, landmarks)
    in_fractions = write_list(tmp_path / "list.csv", (points + 0.5) / 160, ["ann/1.png", "bob/1.png"])
    write_dataset_landmarks(tmp_path / "photos", in_fractions)
    np.testing.assert_allclose(open_dataset(tmp_path / "photos").landmarks, landmarks, atol=1e-6)
    with pytest.raises(DataError, match="3 images"):
        write_dataset_landmarks(tmp_path / "photos", write_list(tmp_path / "list.csv", points, ["carl"]))
    (tmp_path / "mixture.yaml").write_text("datasets: [{path: photos}]")
    with pytest.raises(DataError, match=r"mixture\.yaml: "):
        write_dataset_landmarks(tmp_path / "mixture.yaml", finder)


def test_a_folder_that_cannot_have_landmarks_is_refused_before_the_search(tmp_path):
    def find(name, image):
        pytest.fail("the search has begun")

    with small_disk(tmp_path / "photos", size_kib=1024):
        write_photographs(tmp_path / "photos", ARCFACE_TEMPLATE)
        make_read_only(tmp_path / "photos")
        with pytest.raises(DataError, match=r"photos/landmarks\.npy: cannot be written: .*Read-only file"):
            write_dataset_landmarks(tmp_path / "photos", find)


def test_the_landmarks_of_other_files_of_a_folder_are_refused(tmp_path):
    points, photos = ARCFACE_TEMPLATE + 20, tmp_path / "photos"
    write_photographs(photos, points)
    finder = write_list(tmp_path / "list.csv", points)
    write_dataset_landmarks(photos, finder)
    written = open_dataset(photos).landmarks
    (photos / "ann" / "1.png").rename(photos / "bob" / "2.png")
    with pytest.raises(
        DataError, match=r"landmarks\.npy: .*added, removed or renamed.*facetrain data landmarks"
    ):
        open_dataset(photos)
    (photos / "bob" / "2.png").rename(photos / "ann" / "1.png")
    np.testing.assert_array_equal(open_dataset(photos).landmarks, written)
    # Landmarks of another program have no digest.
    (photos / "landmarks.names.sha256").unlink()
    (photos / "ann" / "1.png").rename(photos / "bob" / "2.png")
    assert len(open_dataset(photos).landmarks) == 3


def test_a_training_set_without_landmarks_is_refused_with_the_command_that_writes_them(folder, tmp_path):
    require_landmarks(open_dataset(folder), str(folder), "vit_s_kprpe")
    plain = write_records(tmp_path / "plain", [0, 1])
    with pytest.raises(DataError, match="plain .*vit_s_kprpe.*data landmarks"):
        require_landmarks(open_dataset(plain), str(plain), "vit_s_kprpe")
    (tmp_path / "mixture.yaml").write_text("datasets: [{path: records}, {path: plain}]")
    mixture = open_dataset(tmp_path / "mixture.yaml")
    with pytest.raises(DataError, match=r"^mixture\.yaml, dataset 2 has no landmarks"):
        require_landmarks(mixture, "mixture.yaml", "vit_s_kprpe")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((11, 5, 2), np.float32), r"\(11, 5, 2\).*float32"),
        (np.zeros((12, 5, 2)), "float32"),
        (np.zeros((12, 10), np.float32), "float32"),
        (np.zeros(12, object), "12 images"),
        (np.full((12, 5, 2), 56, np.float32), "pixels"),
        (np.full((12, 5, 2), np.inf, np.float32), "pixels"),
    ],
)
def test_a_file_that_is_not_the_landmarks_of_the_dataset_is_refused(folder, array, message):
    np.save(folder / "landmarks.npy", array)
    with pytest.raises(DataError, match=message):
        require_landmarks(open_dataset(folder), str(folder), "vit_s_kprpe")


def test_the_file_is_beside_the_data(tmp_path):
    assert landmarks_path(tmp_path) == tmp_path / "landmarks.npy"
    assert landmarks_path(tmp_path / "train.rec") == tmp_path / "landmarks.npy"
    assert landmarks_path(tmp_path / "faces.lmdb") == tmp_path / "faces.lmdb.landmarks.npy"
    assert landmarks_path(tmp_path / "lfw.bin") == tmp_path / "lfw.landmarks.npy"
    assert read_landmarks_beside(tmp_path / "lfw.bin", 2) is None
