"""Scores of embeddings with a list of pairs, or with the pairs of a set."""

import json

import numpy as np
import pytest

from facetrain.embeddings.embedding_files import Embeddings, save_embeddings
from facetrain.errors import DataError
from facetrain.verify.evaluate import evaluate_scores
from facetrain.verify.options import EvaluationOptions
from facetrain.verify.output.formatting import format_evaluation
from facetrain.verify.protocols import results_from_embeddings, scores_result
from facetrain.verify.score_files import read_scored_pairs, scores_of_set
from facetrain.verify.sets.pair_set import PairSet
from tests.support.score_files import write

FAST = EvaluationOptions(bootstrap=50)


def test_embeddings_with_a_pair_list_are_scored_by_their_cosines(tmp_path):
    random = np.random.default_rng(0)
    label = np.repeat(np.arange(20), 3)
    embedding = (random.normal(size=(20, 8))[label] + random.normal(size=(60, 8))).astype(np.float32)
    names = [f"{one}/{n}.jpg" for n, one in enumerate(label)]
    save_embeddings(tmp_path / "system.npz", Embeddings(embedding, names, label))
    first, second = random.integers(0, 60, (2, 400))
    pairs = {"first": [names[n] for n in first], "second": [names[n] for n in second]}
    path = write(tmp_path / "pairs.csv", pairs | {"genuine": (label[first] == label[second]).astype(int)})
    table = read_scored_pairs(tmp_path / "system.npz", path)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    np.testing.assert_allclose(table.scored.score_P, (unit[first] * unit[second]).sum(1), atol=1e-6)
    assert table.scored.subjects == 20 and (table.scored.subject_N == label).all()
    found = evaluate_scores(tmp_path / "system.npz", pair_list=path, options=FAST)
    assert found.results["system"].metrics["pairs"] == 400


def test_people_of_the_file_who_are_in_no_pair_do_not_narrow_the_intervals(tmp_path):
    random = np.random.default_rng(0)
    label = np.repeat(np.arange(20), 2)
    embedding = random.normal(size=(20, 8))[label] + 0.1 * random.normal(size=(40, 8))
    first, second = np.arange(40), np.concatenate([np.arange(40) ^ 1, (np.arange(40) + 2) % 40])
    genuine = [1] * 40 + [0] * 40
    path = write(tmp_path / "pairs.csv", {"first": [*first, *first], "second": second, "genuine": genuine})
    found = []
    for others in (0, 500):
        people = np.concatenate([random.permutation(others) + 20, label])
        unit = np.concatenate([random.normal(size=(others, 8)), embedding])
        names = [f"other {n}" for n in range(others)] + [str(n) for n in range(40)]
        save_embeddings(tmp_path / "a.npz", Embeddings(unit, names, people))
        found.append(evaluate_scores(tmp_path / "a.npz", pair_list=path, options=FAST).results["a"])
    few, many = found
    assert few.subjects == many.subjects == 20 and few.metrics["eer"] == 0
    assert few.interval == many.interval and few.interval["eer"][1] > 0.1


def test_an_embedding_of_zeros_has_the_lowest_score_with_every_image(tmp_path):
    unit = np.eye(4)[[0, 0, 1, 1, 2, 2]]
    unit[[3, 5]] = 0
    names = [str(n) for n in range(6)]
    save_embeddings(tmp_path / "a.npz", Embeddings(unit, names, np.full(6, -1)))
    path = write(tmp_path / "pairs.csv", {"first": [0, 2, 3], "second": [1, 3, 5], "genuine": [1, 1, 0]})
    assert read_scored_pairs(tmp_path / "a.npz", path).scored.score_P.tolist() == [1, -1, -1]
    target = PairSet("pairs", [bytes([n]) for n in range(6)], np.array([True, True, False]))
    assert scores_of_set(tmp_path / "a.npz", target).score_P.tolist() == [1, -1, -1]
    found = evaluate_scores(tmp_path / "a.npz", pair_list=path, against=tmp_path / "a.npz", options=FAST)
    warning = "  warning: embeddings of zeros: 2; their score is −1 with every other image"
    assert list(format_evaluation(found)).count(warning) == 2, "one for each system"
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_the_embeddings_of_a_set_give_the_accuracy_of_the_set(tmp_path, is_sorted):
    random = np.random.default_rng(0)
    same = np.arange(200) < 100 if is_sorted else np.arange(200) % 2 == 0
    plain = random.normal(size=(400, 8)).astype(np.float32)
    plain[1::2][same] += 2 * plain[0::2][same]
    target = PairSet("pairs", [bytes([n % 256, n // 256]) for n in range(400)], same)
    save_embeddings(tmp_path / "a.npz", Embeddings(plain, [""] * 400, np.full(400, -1)))
    found = scores_result(scores_of_set(tmp_path / "a.npz", target), {}, FAST, folds_of_set=True)
    (expected,) = results_from_embeddings(target, (plain, plain), FAST).values()
    shared = found.metrics.keys() & expected.metrics.keys()
    assert {name: found.metrics[name] for name in shared} == pytest.approx(
        {name: expected.metrics[name] for name in shared}, abs=1e-6
    )
    assert "accuracy" in shared and found.interval["auc"] == pytest.approx(expected.interval["auc"])


def test_a_pair_list_that_names_a_missing_or_ambiguous_image_is_refused(tmp_path):
    save_embeddings(tmp_path / "a.npz", Embeddings(np.eye(3), ["x", "y", "y"], np.arange(3)))
    missing, ambiguous = "row 2: the image 'z' has no embedding", "'y' has more than one embedding"
    for first, message in (("z", missing), ("y", ambiguous)):
        path = write(tmp_path / "pairs.csv", {"first": [first], "second": ["x"], "genuine": [0]})
        with pytest.raises(DataError, match=message):
            read_scored_pairs(tmp_path / "a.npz", path)
