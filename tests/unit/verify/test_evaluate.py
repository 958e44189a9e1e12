"""`evaluate` on sets of pairs with a small network."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from facetrain.data.formats.bin import write_bin
from facetrain.data.open_dataset import open_dataset
from facetrain.data.pair_folds import fold_order
from facetrain.embeddings.inference import Inference
from facetrain.errors import ModelError, UsageError
from facetrain.models.embedding_model import open_model
from facetrain.verify import evaluate as evaluate_module
from facetrain.verify import training_images
from facetrain.verify.evaluate import evaluate, evaluate_scores
from facetrain.verify.metrics.fold_accuracy import fold_accuracy
from facetrain.verify.output.formatting import format_evaluation
from facetrain.verify.protocol_options import EvaluationOptions
from tests.support.datasets import encoded_image, images_of, write_records
from tests.support.models import SMALL, write_model
from tests.support.protocols import write_ijb, write_tinyface

CPU = Inference("cpu", workers=1)


PAIRS = 20
IMAGES = [encoded_image(number, 32) for number in range(2 * PAIRS)]
WITHOUT_INTERVALS = EvaluationOptions(bootstrap=0)


def test_the_groups_beside_a_set_are_its_slices_unless_a_table_is_given(model, tmp_path):
    same = [number % 2 == 0 for number in range(PAIRS)]
    write_bin(tmp_path / "rfw.bin", IMAGES, same)
    # Groups a and b have pairs of both kinds; the last impostor pair is of two groups.
    groups = ["group", *"a" * PAIRS, *"b" * (PAIRS - 1), "a"]
    (tmp_path / "rfw.groups.csv").write_text("\n".join(groups) + "\n")

    def groups_of(slices=None, **more):
        options = {"options": replace(WITHOUT_INTERVALS, **more), "inference": CPU, "slices": slices}
        return evaluate(model, ["rfw"], tmp_path, **options).results["rfw"]

    result = groups_of()
    assert [(group.column, group.value, group.metrics["pairs"]) for group in result.groups] == [
        ("group", "a", 10), ("group", "a / b", 1), ("group", "b", 9),
    ]  # fmt: skip
    assert [summary.column for summary in result.group_summaries] == ["group"]
    assert not groups_of(slice_fmr=0.01).groups, "ten impostor pairs do not show this rate"
    (tmp_path / "table.csv").write_text("\n".join(["part", *["one"] * PAIRS]))
    result = groups_of(tmp_path / "table.csv")
    assert [(group.column, group.value) for group in result.groups] == [("part", "one")]
    write_bin(tmp_path / "other.bin", IMAGES, same)
    with pytest.raises(UsageError, match=r"table\.csv: .*rfw, other"):
        evaluate(model, ["rfw", "other"], tmp_path, slices=tmp_path / "table.csv", inference=CPU)


def test_another_system_is_drawn_with_the_subjects_of_the_table(model, tmp_path):
    same = [number % 2 == 0 for number in range(PAIRS)]
    write_bin(tmp_path / "pairs.bin", IMAGES, same)
    subject = [[f"{n % 5}", f"{n % 5 if one else n % 5 + 1}"] for n, one in enumerate(same)]
    (tmp_path / "table.csv").write_text("\n".join(["subject", *(side for pair in subject for side in pair)]))
    options = {"inference": CPU, "options": EvaluationOptions(bootstrap=50), "slices": tmp_path / "table.csv"}
    own = evaluate(model, ["pairs"], tmp_path, **options).results["pairs"]
    scored = [(pair.pair, pair.score, 1) for pair in own.hardest_genuine]
    scored += [(pair.pair, pair.score, 0) for pair in own.hardest_impostors]
    rows = [f"{score!r},{one}" for _, score, one in sorted(scored)]
    (tmp_path / "system.csv").write_text("\n".join(["score,genuine", *rows]))
    found = evaluate(model, ["pairs"], tmp_path, against=tmp_path / "system.csv", **options)
    assert found.results["pairs"].subjects == found.other_results["pairs"].subjects == 6
    for metric in ("auc", "eer"):
        one, other = (each["pairs"].replicates[metric] for each in (found.results, found.other_results))
        np.testing.assert_array_equal(one, other)


def test_another_system_has_the_folds_of_the_set(model, tmp_path):
    # Sorted pairs: both systems get the same folds, which have pairs of both kinds.
    same = [number < PAIRS // 2 for number in range(PAIRS)]
    write_bin(tmp_path / "pairs.bin", IMAGES, same)
    score = np.random.default_rng(0).normal(size=PAIRS).round(3)
    rows = [f"{one},{int(genuine)}" for one, genuine in zip(score, same, strict=True)]
    (tmp_path / "system.csv").write_text("\n".join(["score,genuine", *rows]))
    options = {"inference": CPU, "options": EvaluationOptions(bootstrap=40)}
    found = evaluate(model, ["pairs"], tmp_path, against=tmp_path / "system.csv", **options)
    other = found.other_results["pairs"]
    order = fold_order(np.array(same))
    expected = fold_accuracy(other.scale.distance(score[order]), np.array(same)[order]).mean
    assert other.metrics["accuracy"] == found.differences["pairs"]["accuracy"].second == expected


def test_the_other_ranks_wait_for_hours_while_the_leader_computes_metrics(model, tmp_path, monkeypatch):
    write_bin(tmp_path / "pairs.bin", IMAGES, [number % 2 == 0 for number in range(PAIRS)])
    join, waits = evaluate_module.join, []

    def recorded(device, timeout_s=0):
        waits.append(timeout_s)
        return join(device, timeout_s)

    monkeypatch.setattr(evaluate_module, "join", recorded)
    assert evaluate(model, ["pairs"], tmp_path, options=WITHOUT_INTERVALS, inference=CPU).results
    assert waits[0] >= 12 * 3600


def test_the_json_has_what_the_numbers_depend_on(tmp_path):
    write_model(tmp_path / "m.safetensors", step=20_000)
    write_bin(tmp_path / "pairs.bin", IMAGES, [number % 2 == 0 for number in range(PAIRS)])
    options = EvaluationOptions(slice_fmr=0.1, bootstrap=0, seed=3, flip=False)
    found = evaluate(
        tmp_path / "m.safetensors", ["pairs"], tmp_path, options=options, inference=CPU
    ).as_json()
    assert found["step"] == 20_000 and found["description"].endswith(", step 20,000")
    assert found["options"] == {"slice_fmr": 0.1, "bootstrap": 0, "seed": 3, "flip": False}


def test_the_precision_of_an_onnx_file_is_its_own(model, tmp_path):
    onnx = pytest.importorskip("onnx")
    image, embedding = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("image", ["batch", 3, 32, 32]), ("embedding", ["batch", 3072]))
    )
    node = onnx.helper.make_node("Flatten", ["image"], ["embedding"])
    graph = onnx.helper.make_graph([node], "g", [image], [embedding])
    opsets = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=opsets), tmp_path / "m.onnx")
    write_bin(tmp_path / "pairs.bin", IMAGES, [number % 2 == 0 for number in range(PAIRS)])
    options = {"options": EvaluationOptions(bootstrap=39), "inference": CPU}
    found = evaluate(model, ["pairs"], tmp_path, against=tmp_path / "m.onnx", **options)
    assert found.precision == "fp32" and found.against.endswith(", in the number formats of the file")
    found = evaluate(tmp_path / "m.onnx", ["pairs"], tmp_path, gallery_model=tmp_path / "m.onnx", **options)
    assert found.precision == "the number formats of the file, gallery in the number formats of the file"
    assert evaluate(tmp_path / "m.onnx", ["pairs"], tmp_path, against=model, **options).against.endswith(
        "in fp32"
    )


def test_a_gallery_model_with_embeddings_of_another_size_is_refused(model, tmp_path):
    write_bin(tmp_path / "pairs.bin", IMAGES, [number % 2 == 0 for number in range(PAIRS)])
    write_model(tmp_path / "other.safetensors", options=SMALL | {"embedding_size": 8})
    options = {"options": WITHOUT_INTERVALS, "inference": CPU}
    with pytest.raises(ModelError, match=r"size 8\b.*size 16\b"):
        evaluate(model, ["pairs"], tmp_path, gallery_model=tmp_path / "other.safetensors", **options)
    mixed = evaluate(model, ["pairs"], tmp_path, gallery_model=model, **options)
    assert mixed.results["pairs"].metrics["auc"] == pytest.approx(
        evaluate(model, ["pairs"], tmp_path, **options).results["pairs"].metrics["auc"]
    )


@pytest.mark.parametrize(
    ("images", "same", "message"),
    [
        ([1, 1, 2, 3], [True, False], "1 pair with the same image on both sides"),
        ([1, 2, 2, 1, 3, 4], [True, False, False], "1 pair listed both as genuine and as impostor"),
        (
            [1, 2, 2, 3, 3, 1],
            [True, True, False],
            "1 impostor pair of images that a chain of genuine pairs connects",
        ),
        ([1, 2, 3, 4], [True, True], "all pairs are of one kind"),
    ],
)
def test_a_set_with_useless_pairs_gives_a_warning(model, tmp_path, capsys, images, same, message):
    write_bin(tmp_path / "set.bin", [encoded_image(number, 32) for number in images], same)
    evaluate(model, ["set"], tmp_path, options=WITHOUT_INTERVALS, inference=CPU)
    err = capsys.readouterr().err
    assert f"warning: set: {message}" in err and err.count("labels must be corrected") <= 1


def test_templates_with_useless_pairs_or_weights_give_a_warning(model, tmp_path, capsys):
    lists = write_ijb(tmp_path / "ijbc", people=2) / "meta"
    evaluate(model, ["ijbc"], tmp_path, options=WITHOUT_INTERVALS, inference=CPU)
    assert "to be removed" not in capsys.readouterr().err
    with (lists / "ijbc_template_pair_label.txt").open("a") as file:
        file.write("100 100 1\n")
    scores = (lists / "ijbc_name_5pts_score.txt").read_text().splitlines()
    scores[1] = f"{scores[1].rpartition(' ')[0]} -0.5"
    (lists / "ijbc_name_5pts_score.txt").write_text("\n".join(scores))
    evaluate(model, ["ijbc"], tmp_path, options=WITHOUT_INTERVALS, inference=CPU)
    err = capsys.readouterr().err
    assert "warning: ijbc: 1 pair with the same template on both sides: to be removed" in err
    assert "warning: ijbc: 1 image with a detector score of 0 or less" in err


def test_the_fmr_of_slices_without_a_set_of_pairs_is_refused(model, tmp_path):
    write_tinyface(tmp_path / "faces", people=2)
    with pytest.raises(UsageError, match="--slice-fmr needs a set of pairs"):
        evaluate(model, ["faces"], tmp_path, options=EvaluationOptions(slice_fmr=0.01), inference=CPU)


def test_a_set_without_a_part_of_its_gallery_gives_a_warning(model, tmp_path, capsys):
    write_tinyface(tmp_path / "faces", people=2, distractors=0)
    lists = write_ijb(tmp_path / "ijbc", people=2) / "meta"
    names, options = ["faces", "ijbc"], {"options": WITHOUT_INTERVALS, "inference": CPU}
    (lists / "ijbc_1N_gallery_G2.csv").rename(lists / "G2.csv")
    evaluate(model, names, tmp_path, **options)
    err = capsys.readouterr().err
    assert "warning: faces: the gallery has no distractors (Gallery_Distractor/); do not compare" in err
    assert "warning: ijbc: the 1:N protocol has two galleries, and G1 is the only one; do not" in err
    (lists / "G2.csv").rename(lists / "ijbc_1N_gallery_G2.csv")
    write_tinyface(tmp_path / "faces", people=2, distractors=1)
    evaluate(model, names, tmp_path, **options)
    assert "published" not in capsys.readouterr().err


@pytest.mark.parametrize(("known", "number"), [(4, "4 of 4"), (1, "1 of 4"), (0, None)])
def test_a_set_of_training_images_gives_a_warning(tmp_path, capsys, known, number):
    train = write_records(tmp_path / "train", [0, 0, 1, 1], size=32)
    images = [image for _, image in images_of(open_dataset(train))]
    write_model(tmp_path / "m.safetensors", trained_on=[str(train)])
    write_bin(tmp_path / "set.bin", images[:known] + IMAGES[10 : 14 - known], [True, False])
    model = open_model(tmp_path / "m.safetensors", torch.device("cpu"))
    evaluate(model, ["set"], tmp_path, options=WITHOUT_INTERVALS, inference=CPU)
    warned = f"warning: set: {number} examined images are in {train}, and the accuracy on"
    assert (warned in capsys.readouterr().err) == (number is not None)


@pytest.mark.parametrize("role", ["against", "gallery_model"])
def test_a_set_of_training_images_of_the_second_model_gives_a_warning(model, tmp_path, capsys, role):
    train = write_records(tmp_path / "train", [0, 0, 1, 1], size=32)
    second = tmp_path / "second.safetensors"
    write_model(second, trained_on=[str(train)])
    write_bin(tmp_path / "set.bin", [image for _, image in images_of(open_dataset(train))], [True, False])
    options = {"options": WITHOUT_INTERVALS, "inference": CPU, role: second}
    evaluate(model, ["set"], tmp_path, **options)
    assert f"warning: set: 4 of 4 examined images are in {train}, and" in capsys.readouterr().err


def test_a_folder_of_many_people_is_not_compared_with_the_sets_and_this_is_said(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(training_images, "_MOST_FOLDERS", 2)
    for number in range(3):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
    (tmp_path / "mix.yaml").write_text("datasets: [{path: train}]")
    write_bin(tmp_path / "set.bin", IMAGES[:4], [True, False])
    for train in ("train", "mix.yaml"):
        write_model(tmp_path / "m.safetensors", trained_on=[str(tmp_path / train)])
        opened = open_model(tmp_path / "m.safetensors", torch.device("cpu"))
        evaluate(opened, ["set"], tmp_path, options=WITHOUT_INTERVALS, inference=CPU)
        assert f"warning: {tmp_path}/train: has more than 2 entries" in capsys.readouterr().err


def test_reversed_scores_give_a_warning(tmp_path):
    (tmp_path / "a.csv").write_text("score,genuine\n0.1,1\n0.2,1\n0.8,0\n0.9,0\n")
    evaluation = evaluate_scores(tmp_path / "a.csv", options=WITHOUT_INTERVALS)
    assert "  warning: AUC 0.000, below one half" in "\n".join(format_evaluation(evaluation))
