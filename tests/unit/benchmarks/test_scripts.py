"""Benchmarks of the developers in tiny sizes: their reports have the numbers that the docs quote."""

import json
import multiprocessing

import pytest

from benchmarks.backbone import measure_backbones
from benchmarks.checkpoint import measure_checkpoints
from benchmarks.formats import measure_formats
from benchmarks.head import measure_heads
from benchmarks.index import measure_index
from benchmarks.scaling import arguments, fit_step_seconds, gradient_bytes
from benchmarks.search import measure_search
from benchmarks.shuffle import measure_shuffle
from benchmarks.verification import Part, measure_verification
from tests.support.command import ROOT, TORCHRUN, refusal, start
from tests.support.ranks import PRELOADED


@pytest.fixture
def forked(monkeypatch):
    """Measure in processes that are forked from one which has imported torch, in place of new ones."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forks = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forks)


@pytest.mark.slow
def test_each_format_is_read_into_batches_and_compared_with_the_decoder():
    report = measure_formats(images=4, rounds=1)
    decoder = report.pop("cv2.imdecode")["microseconds"]
    assert {"recordio", "image folder", "webdataset"} <= report.keys()
    for row in report.values():
        assert row["share_of_decoder"] == pytest.approx(decoder / row["microseconds"])


def test_the_model_recovers_the_numbers_that_its_steps_were_made_from():
    size = gradient_bytes("mbf_small")
    made = {n: 0.5 * max(n / 2, 1) + 2 * (n - 1) / n * size / 1e9 for n in (1, 2, 4)}
    assert fit_step_seconds(made, 2, size) == pytest.approx(made)
    slower = made | {2: 1.1 * made[2]}
    assert made[2] < fit_step_seconds(slower, 2, size)[2] < slower[2]


@pytest.mark.slow
def test_the_traffic_of_the_head_follows_the_formula_at_any_number_of_classes():
    # Also: a script takes its parameters as options, and prints JSON.
    options = ("--batch-size", 8, "--embedding-size", 16)
    process = start(
        "--nproc-per-node", 2, "-m", "benchmarks.head_traffic", *options, module=TORCHRUN, cwd=ROOT
    )
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    report = json.loads(stdout)
    assert report["ranks"] == 2
    assert report["few_classes"] == report["many_classes"] == report["formula"]


def test_a_dataset_is_opened_without_and_with_the_cached_index():
    report = measure_index(images=1000, identities=100)
    assert report["first"]["images"] == report["again"]["images"] == 1000
    assert report["again"]["identities"] == 100


def test_checkpoints_are_measured_in_both_modes(tmp_path):
    report = measure_checkpoints(gigabytes=0.01, saves=1, folder=tmp_path, prepare_seconds=0)
    assert report["synchronous_s"] > 0 and report["asynchronous_saved_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_shuffling_by_blocks_shares_more_identities_between_batches_than_a_full_shuffle():
    report = measure_shuffle(images=300_000, steps=5)
    shared = {
        mode: statistics["identities_shared_with_the_batch_before"] for mode, statistics in report.items()
    }
    assert shared["blocks"] > shared["full"]


def test_fold_accuracies_equal_those_of_the_published_loop():
    report = measure_verification(Part.folds, pairs=600, rounds=1)
    assert report["equal"] and report["pairs"] == 600


@pytest.mark.slow
def test_a_search_is_measured_in_a_gallery_of_any_size(forked, tmp_path):
    report = measure_search(entries=70_000, size=8, probes=4, folder=tmp_path)
    assert report["exact"]["queries_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_head_is_measured_in_its_variants(forked):
    names = ["head_fp32", "head_sampled_1pct_disk"]  # each in a process of its own
    variants = measure_heads(names, identities=3000, embedding_size=32, batch_size=16, steps=2)
    baseline, head = variants["head_fp32"], variants["head_sampled_1pct_disk"]
    assert head["times_head_fp32"] == round(baseline["step_s"] / head["step_s"], 2)
    assert len(variants) == 2 and baseline["peak_bytes"] > 3000 * 32 * 8


@pytest.mark.long
def test_a_backbone_is_measured_with_pytorchs_defaults_and_with_facetrains_settings():
    report = measure_backbones(["plain", "facetrain"], "mbf", batch_size=4, image_size=16, steps=1, rounds=2)
    plain, tuned = report["variants"]["plain"], report["variants"]["facetrain"]
    assert plain["times_plain"] == 1 and len(plain["rounds"]) == 2
    assert tuned["times_plain"] == tuned["images_per_s"] / plain["images_per_s"]
    assert report["threads"] >= 1 and tuned["peak_gib"] > 0.1


def test_the_command_of_the_scaling_benchmark_has_options_that_exist():
    assert "train.batch_size" in str(refusal(*arguments(1, 2, ["train.batch_size=none"])))
