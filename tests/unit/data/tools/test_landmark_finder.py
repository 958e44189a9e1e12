import shutil
import unicodedata

import cv2
import numpy as np
import pytest

from facetrain.data.images.align import align
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.landmark_table import read_landmark_table
from facetrain.data.tools.landmark_writer import write_dataset_landmarks
from facetrain.data.tools.pack import pack
from facetrain.data.tools.yunet import YuNet, _Face, select_face
from facetrain.errors import DataError, ImageError
from facetrain.face_landmarks import ARCFACE_TEMPLATE
from tests.support.detector import write_detector
from tests.support.memory import resident_peak
from tests.unit.data.tools.helpers import merge

POINTS = ARCFACE_TEMPLATE * 1.5 + [20, 8]
NAMES = ["ann/1.png", "ann/2.png", "bob/1.png"]


def write_photograph(path, points=POINTS, size=(240, 200)):
    """Draw colored dots where the landmarks are."""
    image = np.full((*size[::-1], 3), 60, np.uint8)
    for number, (x, y) in enumerate(points):
        cv2.circle(image, (round(x), round(y)), 5, (255, 40 * number, 0), -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), image[..., ::-1])
    return image


@pytest.fixture
def dataset(tmp_path):
    for name in NAMES:
        write_photograph(tmp_path / "dataset" / name)
    return tmp_path / "dataset"


def row(name, points=POINTS):
    return ",".join([name, *(f"{value:.3f}" for value in points.reshape(-1))])


def write_csv(path, names):
    path.write_text("\n".join(map(row, names)))
    return read_landmark_table(path)


@pytest.fixture
def find(tmp_path):
    pytest.importorskip("onnx")
    return YuNet(write_detector(tmp_path / "yunet.onnx"))


def gray(height, width, *blocks, value=255):
    """Return a gray image with bright blocks, (top, left, side); the test detector finds one of 32 pixels."""
    image = np.full((height, width, 3), 60, np.uint8)
    for top, left, side in blocks:
        image[top : top + side, left : left + side] = value
    return image


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("header", ["", "name,x1,y1,x2\n"])
def test_a_list_of_landmarks_is_read_with_and_without_a_header(tmp_path, header, encoding):
    (tmp_path / "a.csv").write_text(header + row("ann/1.png"), encoding=encoding)
    found = read_landmark_table(tmp_path / "a.csv")
    np.testing.assert_allclose(found("ann/1.png", None), POINTS, atol=1e-3)
    assert found("bob/1.png", None) is None


@pytest.mark.parametrize(("listed", "asked"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_landmarks_are_found_by_a_name_in_another_form_of_unicode(tmp_path, listed, asked):
    found = write_csv(tmp_path / "a.csv", [unicodedata.normalize(listed, "Zoë/é.png")])
    assert found(unicodedata.normalize(asked, "Zoë/é.png"), None) is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ann/1.png,1,2,3\n", "line 1: 'ann/1.png' needs ten numbers"),
        ("\n" + row("x", POINTS * [1, np.nan]), "line 2: a point of 'x' is not finite"),
        ("x" + ",9" * 9 + "," + "9" * 5000, "line 1: a point of 'x' is not finite"),
        (
            row("x") + "\n" + row('"y') + "\n" + row("z"),
            "a.csv: line 2: unexpected end of data; close every quote",
        ),
        ("", "the file has no landmarks"),
        (b"\xff\xfe", "a.csv: "),
        (None, "No such file"),
        (
            "\n".join([row("ann/1.png"), row("bob/1.png"), "", row("ann/1.png", POINTS + 90)]),
            "a.csv, line 4: 'ann/1.png' has landmarks in an earlier entry; keep one face per image",
        ),
    ],
)
def test_a_file_without_valid_landmarks_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_landmark_table(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("written", "order"),
    [
        (lambda points: points[[1, 0, 2, 4, 3]], "left and right"),
        (lambda points: points[:, ::-1], "x and y"),
        (lambda points: points.T, "all x before all y"),
    ],
)
@pytest.mark.parametrize("scale", [1, 1 / np.array([240, 200])])
def test_landmarks_in_another_order_are_refused(tmp_path, written, order, scale):
    rng = np.random.default_rng(0)
    faces = [(POINTS + rng.normal(0, 3, POINTS.shape)) * scale for _ in range(9)]
    faces[0] = faces[0][[1, 0, 2, 4, 3]]  # a fault of one line says nothing of the others
    for name, points in (("right", faces), ("wrong", [written(face) for face in faces])):
        lines = [",".join([f"{at}.png", *map(str, face.reshape(-1))]) for at, face in enumerate(points)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    assert len(read_landmark_table(tmp_path / "right.csv")) == len(faces)
    with pytest.raises(DataError, match=rf"wrong\.csv: .*{order}.*x1,y1"):
        read_landmark_table(tmp_path / "wrong.csv")


def test_the_landmarks_of_a_list_of_photos_in_another_order_are_refused(dataset, tmp_path):
    for name, points in (("right", POINTS.T), ("wrong", POINTS)):
        numbers = "\t".join(map(str, [0, 0, 240, 200, *points.reshape(-1)]))
        faces = f"0\tann/1.png\t0\t{numbers}\n0\tbob/1.png\t1\t{numbers}\n1\tann/2.png\t0\n"
        (dataset / f"{name}.lst").write_text(faces)
    pack(dataset / "right.lst", tmp_path / "right")
    with pytest.raises(DataError, match=r"wrong\.lst: .*each x before its y.*x1 … x5 y1"):
        pack(dataset / "wrong.lst", tmp_path / "wrong")


def test_packed_faces_are_aligned_to_the_template(dataset, tmp_path):
    listed = write_csv(tmp_path / "a.csv", NAMES)
    pack(dataset, tmp_path / "out", landmarks=listed)
    source = open_dataset(tmp_path / "out")
    image = decode_rgb(source.read(2), location="x")
    assert image.shape == (112, 112, 3)
    expected = align(write_photograph(tmp_path / "again.png"), POINTS, 112)
    assert np.abs(image.astype(int) - expected).mean() < 3
    for number, (x, y) in enumerate(ARCFACE_TEMPLATE):
        assert (
            image[round(y), round(x), 0] > 200 and abs(int(image[round(y), round(x), 1]) - 40 * number) < 40
        )


def test_images_without_landmarks_are_an_error_or_left_out(dataset, tmp_path):
    listed = write_csv(tmp_path / "a.csv", ["ann/1.png", "bob/1.png"])
    with pytest.raises(ImageError, match=r"2\.png"):
        pack(dataset, tmp_path / "strict", landmarks=listed)
    checked, written = [], []
    packed = pack(
        dataset,
        tmp_path / "out",
        skip_bad=True,
        landmarks=listed,
        checking=lambda *report: checked.append(report),
        progress=lambda *report: written.append(report),
    )
    assert (packed.identities, packed.images, len(packed.skipped)) == (2, 2, 1)
    assert (checked, written) == ([(1, 3), (2, 3), (3, 3)], [(1, 2), (2, 2)])


@pytest.mark.parametrize("has_names", [False, True])
def test_images_of_a_packed_dataset_keep_their_names_or_are_named_by_numbers(dataset, tmp_path, has_names):
    pack(dataset, tmp_path / "records", image_size=200)
    if not has_names:
        (tmp_path / "records" / "names.csv").unlink()
    listed = write_csv(tmp_path / "a.csv", NAMES if has_names else ["0", "1", "2"])
    assert pack(tmp_path / "records", tmp_path / "out", landmarks=listed).images == 3


def test_landmarks_of_a_name_that_two_images_have_are_refused(dataset, tmp_path):
    merge([dataset, shutil.copytree(dataset, tmp_path / "copy")], tmp_path / "twice")
    points = write_csv(tmp_path / "a.csv", NAMES)
    with pytest.raises(DataError, match="--detector"):
        pack(tmp_path / "twice", tmp_path / "out", landmarks=points)
    with pytest.raises(DataError, match="--detector"):
        write_dataset_landmarks(tmp_path / "twice", points)


def test_the_detector_selects_the_large_face_near_the_center(find):
    assert find("x", gray(256, 640)) is None
    image = gray(256, 640, (0, 0, 32), (128, 320, 32))
    expected = ARCFACE_TEMPLATE - 56 + [336, 144]
    np.testing.assert_allclose(find("x", image), expected, atol=0.1)
    assert find.several_faces == {"x": 2}
    large = cv2.resize(image, None, fx=2, fy=2, interpolation=cv2.INTER_NEAREST)
    np.testing.assert_allclose(find("large", large), expected * 2, atol=1)
    find("one.png", gray(256, 640, (128, 320, 32)))
    assert "one.png" not in find.several_faces


def face(x, y, side, score=0.9):
    """Return a square face with its center at (x, y) as the detector does."""
    return np.array([x - side / 2, y - side / 2, side, side, *[0] * 10, score], np.float32)


def test_a_small_face_in_the_background_is_not_selected():
    person, background = face(120, 120, 200), face(330, 250, 17)
    # area − 2 · squared distance is negative for the person, who is off the center, and positive for the background.
    selected, rivals = select_face(np.stack([background, person]), 640, 480)
    assert (selected == person).all() and rivals == 0


def test_a_doubtful_face_is_not_selected_and_the_center_decides_among_similar_ones():
    doubtful, left, right = face(320, 240, 300, score=0.4), face(150, 240, 100), face(400, 240, 80, score=0.6)
    selected, rivals = select_face(np.stack([doubtful, left, right]), 640, 480)
    assert (selected == right).all() and rivals == 1


def test_a_dataset_is_aligned_by_the_detector_without_output_from_opencv(find, tmp_path, capfd):
    (tmp_path / "dataset" / "ann").mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "dataset" / "ann" / "1.png"), gray(192, 192, (96, 64, 32)))
    pack(tmp_path / "dataset", tmp_path / "out", landmarks=find)
    packed = decode_rgb(open_dataset(tmp_path / "out").read(0), location="x")[..., 0]
    rows, columns = np.nonzero(packed > 200)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == pytest.approx((40, 71, 40, 71), abs=1)
    assert not any(capfd.readouterr())


def test_the_detector_needs_no_functions_of_opencv_5(find, tmp_path, monkeypatch):
    monkeypatch.delattr(cv2.utils, "logging", raising=False)
    assert YuNet(tmp_path / "yunet.onnx")("x", np.zeros((64, 64, 3), np.uint8)) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file; `facetrain get yunet` downloads"), (b"nonsense", "not a model")],
)
def test_a_file_that_is_not_a_detector_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(DataError, match=rf"bad\.onnx: {message}"):
        YuNet(tmp_path / "bad.onnx")


def test_a_face_that_is_missed_is_searched_again_with_a_lower_score(find):
    # The test detector gives 244 a score of 0.45: between the two thresholds.
    points = find("dim.png", gray(128, 128, (32, 32, 32), value=244))
    assert find.fallbacks == {"dim.png": "lower score"}
    np.testing.assert_allclose(points, ARCFACE_TEMPLATE - 56 + [48, 48], atol=0.1)
    assert find("none.png", np.zeros((128, 128, 3), np.uint8)) is None and len(find.fallbacks) == 1


def test_the_attempts_add_a_border_first_then_lower_the_score_then_do_both(find, monkeypatch):
    searched = []

    def detect(image, min_score, *, factor=None):
        searched.append((image.shape[0], min_score, factor))

    monkeypatch.setattr(find, "_detect", detect)
    assert find("x", np.zeros((160, 80, 3), np.uint8)) is None
    both_sizes = [(160, 2.0), (160, None), (320, None)]
    assert searched == [(side, score, factor) for score in (0.6, 0.3) for side, factor in both_sizes]


@pytest.mark.parametrize(("share", "factor"), [(0.6, 2), (0.4, None)])
def test_a_face_that_fills_the_image_is_located_in_a_copy_of_320_pixels(find, monkeypatch, share, factor):
    def detect(image, min_score, *, factor=None):
        return _Face(np.full((5, 2), factor or np.nan), share * 160, rivals=0)

    monkeypatch.setattr(find, "_detect", detect)
    np.testing.assert_equal(find("x", np.zeros((160, 80, 3), np.uint8)), np.full((5, 2), factor or np.nan))


def test_landmarks_of_an_enlarged_image_are_those_of_the_image_itself(find):
    face = find._detect(gray(160, 160, (64, 64, 16)), 0.6, factor=2)
    np.testing.assert_allclose(face.points, (ARCFACE_TEMPLATE - 56 + 144) / 2, atol=0.1)
    assert face.size == pytest.approx(56, abs=0.1)


@pytest.mark.parametrize("shape", [(60_000, 1), (1, 600), (2, 20_000_000)])
def test_no_face_is_searched_in_a_line_of_pixels(find, shape):
    with resident_peak() as peak:
        assert find("x", np.zeros((*shape, 3), np.uint8)) is None
    assert peak.bytes < 300 << 20


def test_a_face_in_a_long_image_is_found_with_a_border(find, monkeypatch):
    detect = find._detect

    def detect_in_padded(image, min_score, *, factor=None):
        return detect(image, min_score, factor=factor) if image.shape[:2] == (832, 1280) else None

    monkeypatch.setattr(find, "_detect", detect_in_padded)
    points = find("x", gray(3000, 10_000, (1000, 5000, 1000)))
    assert find.fallbacks == {"x": "padded image"}
    scale = 10_000 / 640 * 2  # the block is 32 pixels wide in the image that is searched
    np.testing.assert_allclose(points, (ARCFACE_TEMPLATE - 56) * scale + [5500, 1500], atol=5)


def test_the_center_is_taken_where_no_face_is_found_at_all(find, tmp_path):
    image = np.zeros((112, 312, 3), np.uint8)
    write_photograph(tmp_path / "dataset" / "ann" / "1.png")
    with pytest.raises(ImageError, match="--skip-bad"):
        pack(tmp_path / "dataset", tmp_path / "out", landmarks=find)
    find = YuNet(tmp_path / "yunet.onnx", center_crop=True)
    np.testing.assert_allclose(find("none.png", image), np.add(ARCFACE_TEMPLATE, [100, 0]), atol=1e-3)
    assert find.fallbacks == {"none.png": "center crop"}
