import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest

from facetrain.cli.app import app
from tests.support.command import ROOT, facetrain, refusal
from tests.support.datasets import write_records

CONFIG = ROOT / "configs" / "wf42m_pfc02_r100.yaml"
FEW_BLOCKS = ("--set", "model.backbone=r18")  # 8 blocks are counted sooner than the 49 of r100
_SMALLEST = "{backbone: iresnet, layers: [1, 1, 1, 1], widths: [16, 16, 32, 32], embedding_size: 32}"
TINY = f"model: {_SMALLEST}\n"
AS_TINY = ("--set", f"model={_SMALLEST}")


def plan(*arguments):
    """Return the exit code, the output and the messages of `facetrain plan` in this process.

    It keeps the costs of a network, and imports torch once.
    """
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as messages:
        code = app(["plan", *map(str, arguments)], standalone_mode=False)
    return code or 0, output.getvalue(), messages.getvalue()


@pytest.mark.slow
def test_the_json_of_a_plan_has_memory_limits_and_time():
    arguments = ("plan", "--config", CONFIG, "--gpus", 8, "--memory", 80, "--gpu", "h100", *FEW_BLOCKS)
    done = facetrain(*arguments, "--json", fresh=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"] and not report["remarks"]
    assert report["total_bytes"] == sum(report["parts_bytes"].values())
    assert report["largest_batch"] > report["batch"] == 128
    assert report["hours"] > 0 and report["images_per_second"] > 1000


def test_for_a_run_that_does_not_fit_the_keys_that_save_memory_are_printed():
    code, printed, messages = plan("--config", CONFIG, "--gpus", 1, "--memory", 1.7, *AS_TINY)
    assert code == 1 and not messages, messages
    assert (
        " GiB of 1.7: does not fit" in printed
        and "\nneeds less memory, from cheap to expensive: head.momentum_dtype" in printed
    )


def test_the_memory_of_processes_on_a_cpu_is_planned_without_their_speed():
    sets = (*AS_TINY, "--set", "head.sample_rate=0.01", "--set", "train.compile=on")
    code, printed, messages = plan(
        "--config", CONFIG, "--gpus", 2, "--gpu-kind", "cpu", "--memory", 40, *sets
    )
    assert code == 0, messages
    assert "2 × cpu" in printed and "saving" in printed and "largest batch per process" in printed
    assert "the memory of a compiled network is not forecast" in printed
    assert "images/s" not in printed and "holds up to twice" in printed


def test_the_numbers_of_identities_and_images_are_read_from_the_dataset(tmp_path):
    write_records(tmp_path / "data", [n // 4 for n in range(40)])
    (tmp_path / "own.yaml").write_text(f"data: {{train: {tmp_path}/data}}\ntrain: {{batch_size: 8}}\n{TINY}")
    report = json.loads(plan("--config", tmp_path / "own.yaml", "--gpus", 1, "--json")[1])
    assert report["identities"] == 10
    assert report["hours"] * 3600 * report["images_per_second"] == pytest.approx(40 * 20, rel=0.01)


def test_a_v100_is_reported_to_lack_bf16():
    arguments = ("--config", CONFIG, "--gpus", 8, "--gpu", "v100", "--set", "head.sample_rate=0.02", *AS_TINY)
    _, printed, _ = plan(*arguments)
    assert "A v100 cannot multiply in bf16" in printed
    _, printed, _ = plan(*arguments, "--set", "train.precision=fp16")
    assert "8 × v100" in printed and "bf16" not in printed


NOT_DIVIDED = ("--gpus", 3, "--set", "train.batch_size=null", "--set", "train.global_batch_size=1024")
FEW_IMAGES = ("--gpus", 8, "--set", "data.num_images=1000", *AS_TINY)
STAGED = ("--set", "train.stages=[{until_epoch: 1, sample_rate: 0.5}]")
NO_PARAMETER = "model.lr_factors: no parameter's name starts with 'neck'; names start with one of: "
TOO_FEW = "has 1,000 images, fewer than one global batch of 1,024"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (NOT_DIVIDED, "cannot be divided among 3 ranks"),
        (FEW_IMAGES, TOO_FEW),
        ((*FEW_IMAGES, *STAGED), TOO_FEW),
        (("--gpus", 8, *AS_TINY, "--set", "model.lr_factors={neck: 0.1}"), NO_PARAMETER),
        (("--memory", "inf"), ": use a number of at most 1,000,000"),
        (("--memory", "1e300"), ": use a number of at most 1,000,000"),
        (("--gpu", "abacus"), "--gpu-kind abacus: unknown; use one of v100, a100, h100, h200, cpu"),
        (("--gpu", "cpu"), "also give --memory"),
        (
            ("--set", "data.num_classes=null", "--set", "data.train=/none"),
            "/none is not on this machine; give the number with --identities",
        ),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_line(options, message):
    error = refusal("plan", "--config", CONFIG, *options)
    assert error.exit_code == 2 and message in str(error) and "\n" not in str(error)


def plan_of(folder, *options):
    """Return the report of a run on one GPU, of which the folder has the config."""
    code, printed, messages = plan("--config", folder / "run.yaml", "--gpus", 1, "--json", *options)
    assert code == 0, messages
    return json.loads(printed)


def test_the_plan_of_a_run_in_stages_adds_up_their_times_and_takes_the_memory_of_the_largest(tmp_path):
    text = "data: {train: none, num_classes: 1000, num_images: 12800}\n" + TINY
    text += "train: {batch_size: 64, epochs: 4, stages: [{until_epoch: 3, batch_size: 128}]}\n"
    (tmp_path / "run.yaml").write_text(text)

    staged = plan_of(tmp_path)
    small, large = (
        plan_of(tmp_path, "--set", f"train={{batch_size: {batch}, epochs: {epochs}, stages: []}}")
        for batch, epochs in ((64, 1), (128, 3))
    )
    assert staged["batch"] == 128 and staged["parts_bytes"] == large["parts_bytes"]
    assert staged["hours"] == pytest.approx(small["hours"] + large["hours"])
    images = [report["hours"] * report["images_per_second"] for report in (small, large)]
    assert staged["images_per_second"] == pytest.approx(sum(images) / staged["hours"], rel=1e-3)
