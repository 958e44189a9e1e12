"""`facetrain data …`: output and exit codes."""

import json
import lzma
import re
import shlex
import signal

import pytest
import typer

from facetrain.cli.data.inspect import check, inspect
from facetrain.cli.options import local_dataset, local_file
from facetrain.data.formats.bin import read_bin, write_bin
from facetrain.data.images.header import read_header
from facetrain.data.open_dataset import open_dataset
from facetrain.files import scratch_path
from tests.support.command import facetrain, output_of, refusal, start
from tests.support.datasets import damage_records, encoded_image, write_records
from tests.support.object_store import upload
from tests.support.waiting import wait_until


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", [identity for identity in range(20) for _ in range(2)])


def run(*arguments):
    return output_of("data", *arguments)


def test_transformed_datasets_report_their_size(data, tmp_path):
    two = json.loads(run("split", data, "--output", tmp_path / "two", "--validation", 0.25, "--json"))
    assert [one["identities"] for one in two] == [15, 5]
    one = json.loads(run("merge", two[0]["folder"], two[1]["folder"], "--output", tmp_path / "one", "--json"))
    assert one == {"folder": str(tmp_path / "one"), "identities": 20, "images": 40, "skipped": [],
                   "empty_identities": 0, "lost_identities": [], "is_reordered": False, "without_landmarks": [],
                   "resized": 0, "mixture_settings": []}  # fmt: skip
    images = run("convert", tmp_path / "one", "--to", "folder", "--output", tmp_path / "images")
    assert "40 images of 20 identities" in images and open_dataset(tmp_path / "images").num_images == 40


def test_a_split_says_which_share_is_enough_for_pairs(tmp_path):
    data = write_records(tmp_path / "data", [identity for identity in range(56) for _ in range(2)])
    few = run("split", data, "--output", tmp_path / "few", "--validation", 0.2)
    assert "11 identities for validation have two images or more; `facetrain data pairs` needs 20" in few
    assert few.endswith("split with --validation 0.36\n")
    enough = run("split", data, "--output", tmp_path / "enough", "--validation", 0.36)
    assert len(enough.splitlines()) == 2
    validation = tmp_path / "enough" / "validation"
    made = run("pairs", validation, "--output", tmp_path / "val.bin", "--count", 20, "--json")
    assert (json.loads(made)["pairs"], json.loads(made)["same"]) == (20, 10)


def test_a_pair_list_becomes_a_bin(tmp_path):
    for name, image, number in (("Ann", 1, 1), ("Ann", 2, 2), ("Bob", 1, 3)):
        path = tmp_path / "lfw" / "lfw" / name / f"{name}_{image:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded_image(number))
    (tmp_path / "lfw" / "pairs.txt").write_text("1\t1\nAnn\t1\t2\nAnn\t1\tBob\t1\n")
    listed = (tmp_path / "lfw" / "pairs.txt", "--images", tmp_path / "lfw" / "lfw")
    made = json.loads(run("pairs", *listed, "--output", tmp_path / "lfw.bin", "--json"))
    assert (made["pairs"], made["same"]) == (2, 1) and (tmp_path / "lfw.subjects.csv").exists()
    (tmp_path / "lfw" / "pairs.txt").write_text("10\t300\nAnn\t1\t2\nAnn\t1\tBob\t1\n")
    cut = facetrain("data", "pairs", *listed, "--output", tmp_path / "cut.bin")
    assert "pairs.txt: its first line announces 6,000 pairs, and it has 2;" in cut.stderr
    assert "2 pairs, 1 of one person" in run(
        "pairs", tmp_path / "lfw.bin", "--output", tmp_path / "again.bin"
    )
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "lfw.bin").read_bytes()
    run("pairs", tmp_path / "lfw.bin", "--output", tmp_path / "small.bin", "--reduce-to", 16)
    assert read_header(read_bin(tmp_path / "small.bin")[0][0])[1:] == (16, 16)
    for option in ("--count", "--seed", "--image-size"):
        given = ("--output", tmp_path / "more.bin", option, 40)
        assert f"{option} needs" in str(refusal("data", "pairs", tmp_path / "lfw.bin", *given))
    same = ("--output", tmp_path / "lfw.bin", "--reduce-to", 16)
    assert "lfw.bin: already exists; remove it" in str(refusal("data", "pairs", tmp_path / "lfw.bin", *same))
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "lfw.bin").read_bytes()


def test_convert_says_that_it_renumbers_labels_with_gaps(data, tmp_path):
    gaps = write_records(tmp_path / "gaps", [0, 3, 3, 6])
    first, *others = run("convert", gaps, "--to", "webdataset", "--output", tmp_path / "a").splitlines()
    assert first == f"{tmp_path / 'a'}: 4 images of 3 identities"
    assert others[0] == "  identities without images: 4, left out"
    renumbered = f"  the labels after them are renumbered, so that a run on {gaps} cannot continue on "
    assert len(others) == 2 and others[1].startswith(renumbered)
    assert renumbered in run("merge", gaps, data, "--output", tmp_path / "m")
    (tmp_path / "mix.yaml").write_text("datasets: [{path: data}, {path: gaps}]")
    mixed = run("convert", tmp_path / "mix.yaml", "--to", "recordio", "--output", tmp_path / "mixed")
    assert f"renumbered, so that a run on {tmp_path / 'mix.yaml'} cannot continue" in mixed
    kept = run("merge", data, gaps, "--output", tmp_path / "n")  # of the first dataset
    assert "identities without images: 4" in kept and "renumbered" not in kept
    assert open_dataset(tmp_path / "a").labels.tolist() == [0, 1, 1, 2]
    facts = json.loads(run("convert", gaps, "--to", "recordio", "--output", tmp_path / "b", "--json"))
    assert facts["empty_identities"] == 4
    assert len(run("convert", data, "--to", "webdataset", "--output", tmp_path / "c").splitlines()) == 1


def test_convert_names_the_settings_of_a_mixture_that_it_leaves_out(data, tmp_path):
    (tmp_path / "mixture.yaml").write_text("datasets: [{path: data, weight: 2}]")
    text = run("convert", tmp_path / "mixture.yaml", "--to", "recordio", "--output", tmp_path / "copy")
    assert "  settings of the mixture, left out: weight; to keep them, train on the mixture" in text


def test_an_unfinished_copy_of_a_killed_command_is_named(data, tmp_path, capfd):
    killed = scratch_path(tmp_path / "copy")
    killed.mkdir()
    (tmp_path / ".copy.2024.tmp").mkdir()  # of something else
    for output, warnings in (("copy", 1), ("other", 0)):
        assert "needs two or more datasets" in str(
            refusal("data", "merge", data, "--output", tmp_path / output)
        )
        warned = capfd.readouterr().err
        assert warned.count("warning: ") == warned.count(f"{killed}: unfinished output") == warnings


def test_a_check_of_a_damaged_dataset_exits_with_2_and_can_repair_it(data, tmp_path):
    assert "no faults" in run("check", data)
    damage_records(data / "train.rec", (0, 1))
    process = facetrain("data", "check", data, "--json")
    assert process.returncode == 2 and process.stderr == ""
    assert json.loads(process.stdout)["damaged"] is True
    repaired = run("check", data, "--repair", tmp_path / "clean")
    assert "cannot be read or decoded: 2" in repaired
    assert repaired.endswith("38 images written\n  all images of 1 identity were left out: 0\n")
    assert "no faults" in run("check", tmp_path / "clean")


TWICE, SUFFIX = "same: is given for two outputs", "s.png: a contact sheet is an .html file"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("clean m data --report same --sheet same", TWICE),
        ("clean m data --output same --report same", TWICE),
        ("clean m data --sheet s.png", SUFFIX),
        ("inspect data --sheet s.png", SUFFIX),
        ("merge data --output out", "two or more datasets"),
        ("pairs data --output none/x.bin", "there is no folder none"),
        ("pairs data --output x.txt", "a verification set is a .bin file"),
        ("pairs data --output x.bin --reduce-to 16", "--reduce-to needs"),
        ("pairs data --output x.bin --image-size 96", "--image-size needs"),
        ("pairs list.txt --images photos --output x.bin --image-size 96", "--image-size needs --landmarks"),
        ("pairs . --images . --output x.bin", ".: is a folder; --images needs a pair list"),
        ("pairs list.txt --images photos --output x.bin --seed 1", "--seed needs"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused_before_anything_is_read(line, message):
    refused = refusal("data", *line.split())
    assert message in str(refused) and refused.exit_code == 2


@pytest.mark.parametrize(
    "taken", ["v.bin", "v.xz", "v.bin.xz", "v.groups.csv", "v.subjects.csv", "v.landmarks.npy"]
)
def test_pairs_are_not_written_beside_files_of_their_name(tmp_path, taken):
    (tmp_path / taken).touch()
    refused = refusal("data", "pairs", tmp_path / "data", "--output", tmp_path / "v.bin")
    assert f"{taken}: already exists" in str(refused) and refused.exit_code == 2


def test_pack_warns_if_one_folder_has_the_images_of_all_people(tmp_path):
    for number in range(3):
        path = tmp_path / "celeba" / "img_align_celeba" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded_image(number))
    (tmp_path / "celeba" / "people.txt").write_text("000000.jpg 5\n000001.jpg 7\n000002.jpg 5\n")
    done = facetrain("data", "pack", tmp_path / "celeba", "--output", tmp_path / "one")
    assert done.returncode == 0 and "3 images of 1 identity" in done.stdout
    assert "all images are of one identity" in done.stderr and "--images FOLDER" in done.stderr
    unlisted = ("data", "pack", tmp_path / "celeba", "--images", path.parent, "--output", tmp_path / "two")
    assert "--images is the folder of the paths in a list file" in str(refusal(*unlisted))
    listed = ("data", "pack", tmp_path / "celeba" / "people.txt", "--images", path.parent)
    done = facetrain(*listed, "--output", tmp_path / "two")
    assert "3 images of 2 identities" in done.stdout and "one identity" not in done.stderr


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
    assert read_header(open_dataset(tmp_path / "out").read(0))[1:] == (112, 112)
    process = facetrain("data", *asked, "--detector", tmp_path / "yunet.onnx")
    assert process.returncode == 2 and "give one of them" in process.stderr


def test_images_that_a_list_of_landmarks_does_not_have_are_told(data, tmp_path):
    points = tmp_path / "points.csv"
    points.write_text("39,4,6,11,6,8,8,5,11,10,11\n")
    printed = run("landmarks", data, "--landmarks", points)
    assert f"{points} has no landmarks of 39 images" in printed and "face found" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupted_command_leaves_no_files(tmp_path, number, code):
    data = write_records(tmp_path / "data", [n // 4 for n in range(3000)])
    process = start("data", "pack", data, "--output", tmp_path / "out", "--image-size", 512, "--workers", 1)
    wait_until(lambda: any(path.name.startswith(".out.") for path in tmp_path.iterdir()), process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.fixture
def photos(tmp_path):
    """A folder as a user has it: Latin-1 and spaces in names, several formats, files that are no images."""
    for identity, names in {"Ann Lee": ["a.png", "B.PNG", "c.txt"], "Bö": ["1.png", ".DS_Store"]}.items():
        (tmp_path / "my photos" / identity).mkdir(parents=True)
        for number, name in enumerate(names):
            (tmp_path / "my photos" / identity / name).write_bytes(encoded_image(number))
    return tmp_path / "my photos"


def test_pack_says_what_it_leaves_out_and_what_to_do_next(photos, tmp_path):
    output = run("pack", photos, "--output", tmp_path / "out")
    assert "3 images of 2 identities" in output and "left out 2 files" in output
    assert "  3 images were resized to 112 × 112 pixels (--image-size)\n" in output
    assert "files of other types: 1 (Ann Lee/c.txt)" in output and "hidden files: 1 (Bö/.DS_Store)" in output
    assert f"facetrain data inspect {tmp_path / 'out'} --sheet" in output
    assert f"facetrain finetune {tmp_path / 'out'} --model MODEL\n" in output
    assert (tmp_path / "out" / "skipped.csv").exists()


def test_the_next_commands_work_for_a_folder_that_begins_with_a_dash(photos, tmp_path):
    packed = facetrain("data", "pack", photos, "--output=-my out", cwd=tmp_path)
    assert packed.returncode == 0, packed.stderr
    commands = [line for line in packed.stdout.splitlines() if line.startswith("  facetrain data ")]
    assert len(commands) == 2 and "./-my out" in packed.stdout
    inspected = facetrain(*shlex.split(commands[0])[1:], cwd=tmp_path)
    assert inspected.returncode == 0 and (tmp_path / "faces.html").exists(), inspected.stderr


@pytest.mark.slow
def test_inspect_takes_a_rec_and_a_bin(photos, data, tmp_path):
    assert "left out 2 files (--json lists them):" in run("inspect", photos)
    run("pack", photos, "--output", tmp_path / "out")
    assert "3 images of 2 identities" in run("inspect", tmp_path / "out" / "train.rec")
    run("pairs", data, "--output", tmp_path / "val.bin", "--count", 20)
    found = run("inspect", tmp_path / "val.bin", "--sheet", tmp_path / "pairs.html")
    assert "20 pairs, 10 of one person" in found and "16×16 (40)" in found
    assert "pair 0 same, pair 1 different, pair 2 " in (tmp_path / "pairs.html").read_text()
    assert json.loads(run("inspect", tmp_path / "val.bin", "--json"))["formats"] == {"PNG": 40}


def test_a_sheet_shows_pairs_of_both_kinds_of_a_set_in_which_they_alternate(tmp_path):
    write_bin(tmp_path / "set.bin", [encoded_image(1)] * 400, [True, False] * 100)
    run("inspect", tmp_path / "set.bin", "--sheet", tmp_path / "pairs.html")
    shown = re.findall(r"pair \d+ (same|different)", (tmp_path / "pairs.html").read_text())
    assert len(shown) == 40 and 10 < shown.count("same") < 30


def test_a_set_of_a_store_is_downloaded_for_inspect(object_store, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    write_bin(tmp_path / "lfw.bin", [encoded_image(n) for n in range(4)], [True, False])
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets" / "lfw.XZ").write_bytes(lzma.compress((tmp_path / "lfw.bin").read_bytes()))
    images, same = read_bin(local_dataset(f"{upload(tmp_path / 'sets')}/lfw.XZ"))
    assert len(images) == 4 and same.tolist() == [True, False]


def test_inspect_and_check_name_a_dataset_of_a_store_by_its_address(
    object_store, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    damage_records(data / "train.rec", (3,))
    address = upload(data)
    inspect(local_dataset(address), as_json=True)
    with pytest.raises(typer.Exit):
        check(local_file(address), as_json=True)
    inspected, checked = map(json.loads, capsys.readouterr().out.splitlines())
    assert inspected["folder"] == address
    assert checked["faults"][0]["message"].startswith(f"{address}/train.rec")
    with pytest.raises(typer.Exit):
        check(local_file(address))
    assert capsys.readouterr().out.startswith(f"{address}: 39 images")


def test_inspect_says_why_images_have_no_format(tmp_path):
    write_bin(tmp_path / "raw.bin", [bytes(16 * 16 * 3)] * 4, [True, False])
    found = run("inspect", tmp_path / "raw.bin")
    assert "formats of 4 images: unknown (4)" in found and "768 bytes are not an image (JPEG, PNG" in found
    assert "768 bytes" in json.loads(run("inspect", tmp_path / "raw.bin", "--json"))["unreadable"]
