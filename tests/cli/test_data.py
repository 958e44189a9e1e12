"""`facetrain data …`: output and exit codes."""

import json
import signal
import time

import pytest

from facetrain.data.image_header import encoded_image_size
from facetrain.data.open_dataset import open_dataset
from tests.support.command import facetrain, start
from tests.support.datasets import encoded_image, write_records


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", [identity for identity in range(20) for _ in range(2)])


def run(*arguments):
    process = facetrain("data", *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_transformed_datasets_report_their_size(data, tmp_path):
    two = json.loads(run("split", data, "--output", tmp_path / "two", "--validation", 0.25, "--json"))
    assert [one["identities"] for one in two] == [15, 5]
    one = json.loads(run("merge", two[0]["folder"], two[1]["folder"], "--output", tmp_path / "one", "--json"))
    assert one == {"folder": str(tmp_path / "one"), "identities": 20, "images": 40}
    assert "40 images of 20 identities" in run("shuffle", tmp_path / "one", "--output", tmp_path / "mixed")
    few = run(
        "subset", tmp_path / "mixed", "--output", tmp_path / "few", "--identities", 3, "--max-images", 1
    )
    assert "3 images of 3 identities" in few
    assert "3 images of 3 identities" in run("unpack", tmp_path / "few", "--output", tmp_path / "images")
    assert open_dataset(tmp_path / "images").num_images == 3


def test_pairs_are_sampled_from_a_dataset(data, tmp_path):
    made = json.loads(run("pairs", data, "--output", tmp_path / "val.bin", "--count", 20, "--json"))
    assert (made["pairs"], made["same"]) == (20, 10) and (tmp_path / "val.bin").exists()


def test_a_check_of_a_damaged_dataset_exits_with_2_and_can_repair_it(data, tmp_path):
    assert "no faults" in run("check", data, "--near-duplicates")
    rec = (data / "train.rec").read_bytes()
    (data / "train.rec").write_bytes(rec[:-3000])
    process = facetrain("data", "check", data, "--json")
    assert process.returncode == 2 and process.stderr == ""
    assert json.loads(process.stdout)["damaged"] is True
    assert "damaged records" in run("check", data, "--repair", tmp_path / "clean")
    assert "no faults" in run("check", tmp_path / "clean")


def test_errors_are_one_line(data, tmp_path):
    for arguments, message in (
        (("merge", data, tmp_path / "none", "--output", tmp_path / "out"), "no such folder"),
        (("merge", data, "--output", tmp_path / "out"), "two or more datasets"),
        (("shuffle", data, "--output", data), "already exists"),
        (("pairs", data, "--output", tmp_path / "x.bin", "--seed", -1), "greater than or equal to 0"),
        (("index", data / "train.rec"), "replace it with --overwrite"),
        (("pairs", data, "--output", tmp_path / "x.bin", "--count", 30), "multiple of 20"),
    ):
        process = facetrain("data", *arguments)
        lines = process.stderr.splitlines()
        assert process.returncode == 2 and len(lines) == 1, process.stderr
        assert lines[0].startswith("error: ") and message in lines[0]
    assert not (tmp_path / "out").exists()


def test_inspect_writes_sheets_of_augmentations_and_of_one_identity(data, tmp_path):
    (tmp_path / "run.yaml").write_text(f"data: {{train: {data}, image_size: 32, augment: {{gray: 1}}}}\n")
    run("inspect", data, "--augment", tmp_path / "run.yaml", "--sheet", tmp_path / "seen.png")
    assert encoded_image_size((tmp_path / "seen.png").read_bytes()) == (8 * 32, 8 * 32)
    found = json.loads(run("inspect", data, "--identity", 3, "--sheet", tmp_path / "one.png", "--json"))
    assert len(found["images"]) == 2 and encoded_image_size((tmp_path / "one.png").read_bytes()) == (
        224,
        112,
    )
    process = facetrain("data", "inspect", data, "--augment", tmp_path / "run.yaml")
    assert process.returncode == 2 and "--augment needs --sheet" in process.stderr


def test_pack_reads_a_list_file_and_aligns_by_landmarks(tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(12):
        (tmp_path / "images" / f"{number}.png").write_bytes(encoded_image(number))
    (tmp_path / "all.lst").write_text("".join(f"{n}\t{n % 4}.0\t{n}.png\n" for n in range(12)))
    (tmp_path / "points.csv").write_text("".join(f"{n}.png,4,6,11,6,8,8,5,11,10,11\n" for n in range(1, 12)))
    asked = ("pack", tmp_path / "all.lst", "--images", tmp_path / "images", "--output", tmp_path / "out")
    asked = (*asked, "--landmarks", tmp_path / "points.csv", "--skip-bad", "--json")
    packed = json.loads(run(*asked))
    assert (packed["identities"], packed["images"]) == (4, 11) and "'0.png'" in packed["skipped"][0]["reason"]
    assert encoded_image_size(open_dataset(tmp_path / "out").read(0)) == (112, 112)
    process = facetrain("data", *asked, "--detector", tmp_path / "yunet.onnx")
    assert process.returncode == 2 and "give one of them" in process.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_leaves_no_files(tmp_path, number, code):
    data = write_records(tmp_path / "data", [n // 4 for n in range(3000)])
    process = start("data", "pack", data, "--output", tmp_path / "out", "--image-size", 512, "--workers", 1)
    until = time.monotonic() + 60
    while not any(path.name.startswith(".out.") for path in tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
