"""The commands around training: what they write, and what they say."""

import json
from dataclasses import replace

import numpy as np
import pytest

from facetrain.cli.app import app
from facetrain.embeddings.embedding_files import save_embeddings
from facetrain.embeddings.embedding_map import EmbeddingMap, save_map
from facetrain.embeddings.embeddings import Embeddings
from tests.support.command import facetrain, output_of, refusal
from tests.support.datasets import encoded_image, write_records


def test_drawn_people_are_a_dataset_that_can_be_scored(model, tmp_path):
    drawn = json.loads(
        output_of(
            "data", "synth", "--output", tmp_path / "data", "--identities", 2, "--images-per-identity", 2,
            "--eval-identities", 5, "--eval-pairs", 20, "--image-size", 32, "--workers", 1, "--json",
        )
    )  # fmt: skip
    assert (drawn["images"], drawn["pairs"]) == (4, 20)
    scored = output_of("eval", model, "--target", "synth", "--data-dir", tmp_path / "data")
    assert "synth" in scored and "20 pairs" in scored


def test_a_face_is_like_itself_and_its_embeddings_have_names(model, tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(encoded_image(number, 32))
    same = json.loads(output_of("compare", model, tmp_path / "1.png", tmp_path / "1.png", "--json"))
    assert same["cosine"] == pytest.approx(1, abs=1e-5)
    refused = refusal("compare", model, tmp_path / "1.png", tmp_path / "2.png", "--min-quality", 1e9)
    assert f"1.png: quality {same['quality'][0]:.4g}, less" in str(refused) and refused.exit_code == 2
    write_records(tmp_path / "data", [0, 0, 1], size=32)
    output_of("embed", model, tmp_path / "data", "--output", tmp_path / "e.npz")
    with np.load(tmp_path / "e.npz", allow_pickle=False) as file:
        found = dict(file)
    assert (
        found["embedding"].shape == (3, 16)
        and found["quality"].shape == (3,)
        and found["label"].tolist() == [0, 0, 1]
    )
    assert "key 2" in str(found["name"][1])
    np.testing.assert_allclose(np.linalg.norm(found["embedding"], axis=1), 1, rtol=1e-5)


def printed_by(capfd, *arguments):
    """Run `facetrain ARGUMENTS` in this process, which saves seconds; return what it prints."""
    capfd.readouterr()
    app([*map(str, arguments)], standalone_mode=False)
    return capfd.readouterr()


def test_embeddings_of_all_images_have_no_table_of_an_earlier_call_beside_them(model, tmp_path, capfd):
    (tmp_path / "photo.png").write_bytes(encoded_image(1, 32))
    table = tmp_path / "e.npz.skipped.csv"
    table.write_text("of an earlier call")
    printed_by(capfd, "embed", model, tmp_path / "photo.png", "--output", tmp_path / "e.npz")
    assert not table.exists()


@pytest.mark.slow
def test_a_bad_photo_ends_no_command_that_may_skip_it(model, tmp_path, capfd):
    (tmp_path / "photos").mkdir()
    for name, content in (("0.png", b"no image"), ("1.png", encoded_image(1, 32))):
        (tmp_path / "photos" / name).write_bytes(content)
    search = ("search", tmp_path / "photos", tmp_path / "photos" / "1.png", "--model", model, "--json")
    embed = ("embed", model, tmp_path / "photos", "--output", tmp_path / "e.npz")
    for command in (search, embed):
        refused = str(refusal(*command))
        assert "0.png" in refused and refused.endswith("; leave out such images with --skip-bad")
    searched = printed_by(capfd, *search, "--skip-bad")
    assert [entry["name"] for entry in json.loads(searched.out)[0]["found"]] == ["1.png"]
    assert f"warning: left out {tmp_path / 'photos' / '0.png'}: " in searched.err
    shown = printed_by(capfd, *embed, "--skip-bad").out
    assert "1 embedding" in shown and "left out 1 image" in shown
    assert "images that cannot be read: 1 (0.png)" in shown
    table = (tmp_path / "e.npz.skipped.csv").read_text()
    assert table.splitlines()[1].startswith("0.png,unreadable,")
    (tmp_path / "photos" / "0.png").unlink()
    printed_by(capfd, *embed, "--skip-bad")
    assert not (tmp_path / "e.npz.skipped.csv").exists()
    assert "a row for every image" in str(
        refusal(*embed[:-1], tmp_path / "teacher.safetensors", "--skip-bad")
    )


@pytest.mark.slow
@pytest.mark.parametrize(("gallery", "rows"), [("new", {0, 2}), ("old", {0, 1, 2})])
def test_a_search_leaves_out_images_of_low_quality_and_says_how_many(tmp_path, gallery, rows):
    faces = Embeddings(np.eye(3), ["a", "b", "c"], np.arange(3), quality=np.array([3.0, 1.0, 2.0]))
    files = {name: tmp_path / f"{name}.npz" for name in ("new", "old")}
    save_embeddings(files["new"], faces)
    save_embeddings(files["old"], replace(faces, quality=None))
    done = facetrain("search", files[gallery], files["new"], "--min-quality", 2, "--json")
    found = {each["probe"]: {entry["row"] for entry in each["found"]} for each in json.loads(done.stdout)}
    assert found == {"a": rows, "c": rows}
    assert "new.npz: 1 of 3 images left out; quality below 2" in done.stderr
    assert ("old.npz: has no column `quality`; all its images" in done.stderr) == (gallery == "old")
    message = {"old": "has no column `quality`; embed", "new": "no image has a quality of 4 or"}[gallery]
    assert message in str(refusal("search", files["new"], files[gallery], "--min-quality", 4))


@pytest.mark.parametrize(("of_gallery", "found"), [(False, 3), (True, 2), (None, 2)])
def test_qualities_without_mirror_images_leave_out_no_entry_for_probes_with_them(
    tmp_path, capfd, of_gallery, found
):
    faces = Embeddings(np.eye(3), ["a", "b", "c"], np.arange(3), quality=np.array([3.0, 1.0, 2.0]))
    for name, flip in (("gallery", of_gallery), ("probes", True)):
        save_embeddings(tmp_path / f"{name}.npz", replace(faces, flip=flip))
    done = printed_by(
        capfd, "search", tmp_path / "gallery.npz", tmp_path / "probes.npz", "--min-quality", 2, "--json"
    )
    assert [len(each["found"]) for each in json.loads(done.out)] == [found] * 2
    reason = f"gallery.npz: has qualities without mirror images, whose scale is not that of {tmp_path}/probes"
    assert (reason in done.err) == (of_gallery is False)


@pytest.mark.parametrize("by", ["--map", "--other-model"])
def test_qualities_of_another_model_leave_out_no_entry_of_a_gallery(tmp_path, capfd, by):
    old, new = np.eye(3, dtype=np.float32)[:2]
    faces = Embeddings(np.eye(3), ["a", "b", "c"], np.arange(3), quality=np.array([3.0, 1.0, 2.0]))
    gallery, probes, map_file = (tmp_path / name for name in ("old.npz", "new.npz", "map.npz"))
    save_embeddings(gallery, replace(faces, model=old))
    save_embeddings(probes, replace(faces, model=new))
    save_map(map_file, EmbeddingMap(np.eye(3, dtype=np.float32), np.zeros(3, np.float32), old, new))
    option = (by, map_file) if by == "--map" else (by,)
    done = printed_by(capfd, "search", gallery, probes, *option, "--min-quality", 2, "--json")
    assert [(each["probe"], len(each["found"])) for each in json.loads(done.out)] == [("a", 3), ("c", 3)]
    assert "old.npz: has qualities of another model" in done.err and "new.npz: 1 of 3 images" in done.err
