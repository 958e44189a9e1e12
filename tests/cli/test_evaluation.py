"""`facetrain eval` with all protocols, `search`, and the files that `embed` writes and `search` reads."""

import hashlib
import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from facetrain.backbone.zoo import build_backbone
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import write_subjects
from facetrain.embeddings.embedding_files import open_embeddings, save_embeddings
from facetrain.errors import RunError, UsageError
from facetrain.models.embedding_model import open_model
from facetrain.text import percent
from facetrain.verify import evaluate as evaluation
from facetrain.verify.calibration import MAX_IMAGES
from facetrain.verify.output import report
from tests.support.command import output_of, refusal, torchrun
from tests.support.datasets import write_records
from tests.support.faces import face
from tests.support.models import write_model
from tests.support.mxnet_files import write_iresnet
from tests.support.protocols import write_ijb, write_tinyface


def write_pairs(path, count):
    """Write pairs of faces, every second one of one person; return which are."""
    same = [n % 2 == 0 for n in range(count)]
    people = [(n % 10, n % 10 + (0 if one else 50)) for n, one in enumerate(same)]
    images = [face(person, 2 * n + k) for n, pair in enumerate(people) for k, person in enumerate(pair)]
    write_bin(path, images, same)
    return same


@pytest.mark.slow
def test_what_needs_a_model_is_refused_beside_scores_and_an_average_keeps_its_models(tmp_path):
    scores, model = tmp_path / "s.csv", tmp_path / "m.safetensors"
    scores.write_text("score,genuine\n0.1,0\n0.9,1\n")
    write_model(model)
    for option in ("--gallery-model", "--data-dir"):
        error = refusal(
            "eval", "--scores", scores, option, model if option == "--gallery-model" else tmp_path
        )
        assert option in str(error) and error.exit_code == 2
    assert "is an input" in str(refusal("average", model, model, "--output", model))


@pytest.mark.slow
def test_eval_runs_every_protocol_and_compares_two_models(model, tmp_path):
    same = write_pairs(tmp_path / "pairs.bin", 40)
    rows = [
        f"{'left' if n < 20 else 'right'},{(n // 2 + (k and not one)) % 6}"
        for n, one in enumerate(same)
        for k in range(2)
    ]
    (tmp_path / "pairs.groups.csv").write_text("\n".join(["part,subject", *rows]))
    write_ijb(tmp_path / "IJBC")
    write_tinyface(tmp_path / "tinyface")
    options = [part for name in ("pairs", "ijbc", "tinyface") for part in ("--target", name)]
    other = tmp_path / "other.safetensors"
    write_model(other)
    shown = output_of(
        "eval", model, *options, "--data-dir", tmp_path, "--against", other, "--bootstrap", 40,
        "--json", tmp_path / "found.json",
        "--report", tmp_path / "report",
    )  # fmt: skip
    page = (tmp_path / "report" / "report.html").read_text()
    assert all(f"<h2>{name}</h2>" in page for name in ("pairs", "ijbc", "ijbc_1n", "tinyface"))
    assert "part = left: 20 pairs" in shown and f"against {other}: iresnet" in shown
    assert len([line for line in shown.splitlines() if "impostor pairs; there are" in line]) == shown.count(
        "; also left out: tar@"
    )
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sets"].keys() == {"pairs", "ijbc", "ijbc_1n", "tinyface"}
    assert found["sets"]["pairs"]["tar@1e-02"] is None and found["sets"]["pairs"]["subjects"] == 6
    assert {group["value"] for group in found["sets"]["pairs"]["groups"]} == {"left", "right"}
    for name, result in found["sets"].items():
        assert result["intervals"] and result["subjects"] > 0, name
        assert found["differences"][name].keys() <= result["intervals"].keys()
    gap = found["differences"]["pairs"]["auc"]
    assert gap["difference"] == pytest.approx(gap["first"] - gap["second"]) and 0 < gap["p"] <= 1


@pytest.mark.slow
def test_a_gallery_of_another_model_is_in_the_results_of_an_evaluation(model, tmp_path):
    write_pairs(tmp_path / "pairs.bin", 20)
    old = tmp_path / "old.safetensors"
    write_model(old)
    command = ["eval", model, "--target", "pairs", "--data-dir", tmp_path, "--bootstrap", 40, "--json", "-"]
    alone, mixed, swapped = (
        json.loads(output_of(*command, *options))
        for options in ([], ["--gallery-model", old, "--against", old], ["--gallery-model", model])
    )
    assert (mixed["model"], mixed["gallery_model"]) == (str(model), str(old)) and "gallery_model" not in alone
    assert ", gallery by iresnet" in mixed["description"]
    assert mixed["sets"]["pairs"]["auc"] != alone["sets"]["pairs"]["auc"] == swapped["sets"]["pairs"]["auc"]
    # The other model of a comparison embeds both sides.
    old_alone = json.loads(output_of("eval", old, *command[2:]))["sets"]["pairs"]["auc"]
    assert mixed["differences"]["pairs"]["auc"]["second"] == old_alone


@pytest.mark.slow
def test_another_system_is_evaluated_alone_and_beside_a_model(model, tmp_path):
    same = write_pairs(tmp_path / "pairs.bin", 40)
    rows = [f"{90 - n if one else n},{int(one)},{'<i>' if n < 20 else 'new'}" for n, one in enumerate(same)]
    (tmp_path / "system.csv").write_text("\n".join(["score,genuine,camera", *rows]))
    shown = output_of(
        "eval", "--scores", tmp_path / "system.csv", "--bootstrap", 40, "--report", tmp_path / "report"
    )
    assert "auc              1.00000" in shown and "camera = new: 20 pairs" in shown
    page = (tmp_path / "report" / "report.html").read_text()
    assert "camera = &lt;i&gt;" in page and "<i>" not in page and "threshold (score)" in page
    digest = hashlib.sha256((tmp_path / "system.csv").read_bytes()).hexdigest()
    assert f"system.csv sha256:{digest}" in page
    shown = output_of(
            "eval", model, "--target", tmp_path / "pairs.bin", "--against", tmp_path / "system.csv",
            "--bootstrap", 40)  # fmt: skip
    assert f"against {tmp_path / 'system.csv'}" in shown and "1.00000 = " in shown


@pytest.mark.slow
def test_calibrated_thresholds_decide_and_travel_with_the_model(model, tmp_path):
    import onnxruntime

    for person in range(12):
        folder = tmp_path / "faces" / f"person{person}"
        folder.mkdir(parents=True)
        for k in range(6):
            (folder / f"{k}.png").write_bytes(face(person, 10 * person + k))
    one, other = (tmp_path / "faces" / name / "0.png" for name in ("person0", "person7"))
    assert json.loads(output_of("compare", model, one, other, "--json")).keys() == {"cosine", "quality"}
    shown = output_of("calibrate", model, "--target", tmp_path / "faces", "--fmr", 0.01, "--fmr", 0.1)
    assert "intervals rest on 12 subjects" in shown
    assert "2,376 impostor pairs of 12 people in faces" in shown and "FMR 0.01  cosine >= " in shown
    # Of the 23.76 that the rate allows.
    assert "uncertain: rests on 23 false accepts" in shown
    assert "for the sum of the embeddings of an image and of its mirror image" in shown
    here = ["--target", ".", "--fmr", 0.1, "--output", tmp_path / "here.safetensors"]
    assert "12 people in faces" in output_of("calibrate", model, *here, cwd=tmp_path / "faces")
    found = json.loads(output_of("compare", model, one, one, "--fmr", 0.01, "--json"))
    assert found["same"] is True and found["threshold"]["fmr"] == 0.01
    # At 0.01 the untrained network rejects most pairs of one person.
    default = json.loads(output_of("compare", model, one, one, "--json"))["threshold"]
    assert found["threshold"]["fnmr"] >= 0.5 and default["fmr"] == 0.1
    shown = output_of("compare", model, one, other, "--fmr", 0.1)
    assert "at FMR 0.1 (threshold " in shown and ("same person" in shown or "different people" in shown)
    rejected = percent(found["threshold"]["fnmr"])
    assert f"warning: at this threshold {rejected} of" in output_of("compare", model, one, one, "--fmr", 0.01)
    assert "warning" not in shown
    assert "stored are 0.1, 0.01" in str(refusal("compare", model, one, other, "--fmr", 0.001))
    output_of("export", model, "--opset", 17, "--output", tmp_path / "m.onnx")  # by the faster exporter
    metadata = onnxruntime.InferenceSession(str(tmp_path / "m.onnx")).get_modelmeta().custom_metadata_map
    assert [(each["fmr"], each["flip"]) for each in json.loads(metadata["thresholds"])] == [
        (0.01, True),
        (0.1, True),
    ]
    decided = json.loads(output_of("compare", tmp_path / "m.onnx", one, one, "--json"))
    assert decided["threshold"] == default


def test_thresholds_are_measured_on_known_people_and_stored_where_they_fit(model, tmp_path):
    write_bin(tmp_path / "pairs.bin", [face(n, n) for n in range(40)], [False] * 20)
    for arguments, message in (
        ([model, "--target", tmp_path / "pairs.bin"], "has no table pairs.subjects.csv"),
        ([tmp_path / "no", "--target", "x"], "no such file"),
        ([tmp_path / "pairs.bin", "--target", "x"], "give --output FILE.safetensors"),
        ([model, "--target", "x", "--output", "m.onnx"], "is written as .safetensors"),
        ([model, "--target", "x", "--output", "none/m.safetensors"], "there is no folder none"),
    ):
        assert message in str(refusal("calibrate", *arguments))
    write_subjects(tmp_path / "pairs.bin", [f"person {n}" for n in range(40)])
    write_iresnet(tmp_path, build_backbone("iresnet", layers=(1, 1, 1, 1), widths=(4, 4, 4, 4)))
    copy = tmp_path / "copy.safetensors"
    graph = [tmp_path / "model-symbol.json", "--target", tmp_path / "pairs.bin", "--fmr", 0.05]
    printed = output_of("calibrate", *graph)
    assert (
        "model-symbol.json: thresholds from" in printed and "not stored" in printed and "next:" not in printed
    )
    assert "MXNet files have no place for thresholds" in str(refusal("calibrate", *graph, "--output", copy))
    assert not copy.exists()
    error = refusal("calibrate", model, "--target", tmp_path / "pairs.bin")
    assert "0.001 needs 1,000 impostor pairs; 40 images of 40 people have 780; use" in str(error)
    output_of("calibrate", model, "--target", tmp_path / "pairs.bin", "--fmr", 0.05, "--output", copy)
    assert "thresholds" in open_model(copy, torch.device("cpu")).metadata
    assert "thresholds" not in open_model(model, torch.device("cpu")).metadata


@pytest.mark.parametrize("form", ["folder", "bin"])
def test_a_damaged_image_of_a_calibration_is_named_by_its_place(model, tmp_path, form):
    images, people = [face(n % 8, n) for n in range(24)], [f"{n % 8}" for n in range(24)]
    images[8], images[17] = images[0], b"no image"  # a copy before it
    if form == "folder":
        target = tmp_path / "people"
        for n, (image, person) in enumerate(zip(images, people, strict=True)):
            (target / person).mkdir(parents=True, exist_ok=True)
            (target / person / f"{n}.jpg").write_bytes(image)
    else:
        target = tmp_path / "people.bin"
        write_bin(target, images, [False] * 12)
        write_subjects(target, people)
    place = {"folder": f"{target}/1/17.jpg", "bin": f"{target}: image 17"}[form]
    refused = refusal("calibrate", model, "--target", target, "--fmr", 0.1)
    assert str(refused).startswith(f"{place}: its 8 bytes") and refused.exit_code == 2


def test_a_person_with_more_images_than_can_be_compared_is_refused(model, monkeypatch):
    labels = np.zeros(MAX_IMAGES + 1, int)
    people = [face(0)] * len(labels), labels
    monkeypatch.setattr("facetrain.verify.calibrate_model.read_known_people", lambda *_: people)
    error = refusal("calibrate", model, "--target", "faces", "--fmr", 0.1)
    assert "faces: every person has more than 8,000 images" in str(error) and error.exit_code == 2


def test_one_system_is_evaluated_at_a_time(model):
    for options, message in (
        ([model, "--scores", "a.csv"], "give one of MODEL and --scores"),
        ([model], "give the evaluation set with --target"),
        (["--scores", "a.csv", "--target", "lfw"], "facetrain eval MODEL --target lfw --against a.csv"),
        (["--scores", "a.csv", "--slices", "b.csv"], "b.csv needs a MODEL; add its columns to a.csv"),
        (["--scores", "a.csv", "--no-flip"], "a.csv: --no-flip needs a MODEL"),
        (["--scores", "a.csv", "--bf16"], "a.csv: --bf16 needs a MODEL"),
        (["--scores", "a.csv", "--device", "cpu"], "a.csv: --device cpu needs a MODEL"),
        (["--scores", "a.csv", "--batch-size", 7], "a.csv: --batch-size 7 needs a MODEL"),
    ):
        error = refusal("eval", *options)
        assert isinstance(error, UsageError) and message in str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "nothing"], "no such verification set"),
        (["--target", "pairs", "--slices", "absent.csv"], "absent.csv: no such file"),
        (["--target", "empty"], "unknown layout of an evaluation set; expected"),
        (["--target", "empty"], "; make pairs of a folder of images, or of a pair list"),
        (["--target", "pairs", "--against", "model.safetensors", "--bootstrap", 0], "remove --bootstrap 0"),
        (["--target", "pairs", "--against", "absent"], "absent: no such file"),
        (["--target", "pairs", "--gallery-model", "absent"], "absent: no such file"),
        (["--target", "pairs", "--data-dir", "s3://b/x"], "of each set, such as s3://b/x/lfw.bin"),
        (["--target", "pairs", "--device", "tpu"], "unknown device; choose one of auto, cpu, cuda"),
        (["--target", "pairs", "--json", "absent/scores.json"], "there is no folder absent"),
        (["--target", "pairs", "--report", "pairs.bin"], "pairs.bin: the folder of the report cannot be"),
        (["--target", "pairs", "--report", "/proc/page"], "/proc/page: the folder of the report cannot be"),
        (["--target", "pairs", "--report", "empty", "--json", "empty/report.json"], "given for two outputs"),
    ],
)
def test_an_evaluation_that_cannot_run_ends_with_a_one_line_error(
    model, tmp_path, monkeypatch, options, message
):
    write_pairs(tmp_path / "pairs.bin", 10)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    refused = refusal("eval", model, "--data-dir", tmp_path, *options)
    assert message in str(refused) and refused.exit_code == 2 and "\n" not in str(refused)
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("target", ["sorted.v2", "sorted.v2.bin"])
def test_names_of_sets_and_tables_may_have_dots_and_equals_signs(model, tmp_path, target):
    write_pairs(tmp_path / "sorted.v2.bin", 20)
    (tmp_path / "run=3").mkdir()
    (tmp_path / "run=3" / "table.csv").write_text("part\n" + "left\n" * 20)
    options = ["--target", target, "--slices", "run=3/table.csv", "--bootstrap", 0]
    assert "part = left: 20 pairs" in output_of("eval", model, *options, cwd=tmp_path)


def test_a_report_is_checked_first_and_the_results_are_printed_before_it(
    model, tmp_path, monkeypatch, capsys
):
    write_pairs(tmp_path / "pairs.bin", 20)

    def fail(*arguments, **options):
        raise RunError("no space left")

    monkeypatch.setattr(report, "write_report", fail)
    error = refusal(
        "eval", model, "--target", tmp_path / "pairs.bin", "--bootstrap", 0, "--report", tmp_path / "page",
        "--json", tmp_path / "found.json",
    )  # fmt: skip
    assert str(error) == "no space left" and "20 pairs" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["sets"]["pairs"]["pairs"] == 20
    monkeypatch.setattr(evaluation, "evaluate", fail)
    error = refusal("eval", model, "--target", tmp_path / "pairs.bin", "--report", "/proc/page")
    assert isinstance(error, UsageError)


@pytest.mark.slow
def test_search_finds_each_face_in_a_gallery_of_embeddings(model, tmp_path):
    pytest.importorskip("pyarrow")
    for part, count in (("gallery", 6), ("probe", 2)):
        (tmp_path / part).mkdir()
        for person in range(count):
            (tmp_path / part / f"{part}{person}.png").write_bytes(face(person, size=32))
    output_of("embed", model, tmp_path / "gallery", "--output", tmp_path / "gallery.parquet")
    embedded = open_embeddings(tmp_path / "gallery.parquet")
    assert embedded.embedding.shape == (6, 16)
    save_embeddings(tmp_path / "gallery.npz", embedded)
    found = output_of(
        "search", tmp_path / "gallery.parquet", tmp_path / "probe", "--model", model, "--top", 3, "--json"
    )
    for number, one in enumerate(json.loads(found)):
        assert (one["probe"], len(one["found"])) == (f"probe{number}.png", 3)
        assert one["found"][0]["name"] == f"gallery{number}.png"
        assert one["found"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    here = ["search", ".", tmp_path / "probe", "--model", model, "--top", 1]
    assert "gallery1.png" in output_of(*here, cwd=tmp_path / "gallery")
    files = (tmp_path / "gallery.npz", tmp_path / "gallery.parquet")
    found = json.loads(output_of("search", *files, "--threshold", 0.9999, "--json"))
    assert [one["found"][0]["name"] for one in found] == [f"gallery{n}.png" for n in range(6)]
    probe = tmp_path / "probe"
    for arguments, message in (
        (["embed", model, probe, "--output", tmp_path / "h.txt"], "use .npz or .parquet"),
        (["embed", model, probe, "--output", probe / "e.parquet"], "would be read as a Parquet dataset"),
        (["search", tmp_path / "gallery", probe], "add --model MODEL to embed its images"),
        (["search", *files, "--model", model], "are embedded already; remove it"),
        (["search", *files, "--detector", model], "are embedded already; remove it"),
        (["search", *files, "--device", "cpu"], "--device cpu: "),
        # Before the images are embedded: the file of the model is none either.
        (["search", probe, probe, "--model", files[0], "--map", files[1]], "not a map of `facetrain align`"),
    ):
        refused = refusal(*arguments)
        assert message in str(refused) and refused.exit_code == 2


@pytest.mark.slow
def test_a_gallery_of_an_old_model_is_searched_through_a_map(model, tmp_path):
    new, gallery = tmp_path / "new.safetensors", tmp_path / "gallery.npz"
    write_model(new)
    for person in range(12):
        (tmp_path / "people" / f"{person}").mkdir(parents=True)
        for image in range(4):
            (tmp_path / "people" / f"{person}" / f"{image}.png").write_bytes(face(person, image, size=32))
    people = tmp_path / "people"
    output_of("embed", model, people, "--output", gallery)
    found = json.loads(output_of("align", model, new, people, "--output", tmp_path / "map.npz", "--json"))
    assert (found["images"], found["people"]) == (48, 3) and 0 < found["cosine"] <= 1
    assert found["accuracy"].keys() == {"old × old", "new × new", "old × new", "mapped × new"}
    search = ["search", gallery, people, "--model", new, "--top", 1]
    refused = refusal(*search)
    assert "of another model" in str(refused)
    matches = json.loads(output_of(*search, "--map", tmp_path / "map.npz", "--json"))
    right = [one["found"][0]["name"].split("/")[0] == one["probe"].split("/")[0] for one in matches]
    assert len(right) == 48 and np.mean(right) > 0.5
    assert refusal("align", model, new, people, "--output", tmp_path / "map.txt").exit_code == 2
    assert "has no labels" in str(refusal("align", model, new, people / "0", "--output", tmp_path / "m.npz"))


@pytest.mark.slow
def test_ranks_embed_a_share_each_and_the_first_one_writes(model, tmp_path):
    for number in range(5):
        path = tmp_path / "images" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image" if number in (1, 3) else face(number, size=32))
    write_records(tmp_path / "data", [0, 0, 1, 1, 1], size=32)
    found = []
    for run in (output_of, partial(torchrun, 2)):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        printed = [
            run("embed", model, tmp_path / name, "--output", folder / file, "--device", "cpu", *options)
            for name, file, options in (("images", "e.npz", ["--skip-bad"]), ("data", "e.safetensors", []))
        ]
        rows, teacher = open_embeddings(folder / "e.npz"), load_file(folder / "e.safetensors")["embedding"]
        found.append((printed, rows, teacher, (folder / "e.npz.skipped.csv").read_text()))
    (_, one, plain, listed), (processes, two, shared, also_listed) = found
    for process in processes:
        assert process.returncode == 0 and process.stdout.count("of size 16") == 1, process.stderr
    assert list(one.name) == list(two.name) == ["0.png", "2.png", "4.png"] and listed == also_listed
    np.testing.assert_allclose(one.embedding, two.embedding, atol=1e-6)
    torch.testing.assert_close(plain, shared)
