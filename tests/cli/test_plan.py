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
def test_the_json_of_a_plan_has_memory_and_limits():
    arguments = ("plan", "--config", CONFIG, "--gpus", 8, "--memory", 80, "--gpu", "h100", *FEW_BLOCKS)
    done = facetrain(*arguments, "--json", fresh=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"] and not report["remarks"]
    assert report["total_bytes"] == sum(report["parts_bytes"].values())
    assert report["largest_batch"] > report["batch"] == 128


def test_for_a_run_that_does_not_fit_the_keys_that_save_memory_are_printed():
    code, printed, messages = plan("--config", CONFIG, "--gpus", 1, "--memory", 1.7, *AS_TINY)
    assert code == 1 and not messages, messages
    assert (
        " GiB of 1.7: does not fit" in printed
        and "\nneeds less memory, from cheap to expensive: head.momentum_dtype" in printed
    )


def test_a_process_on_a_cpu_is_measured(tmp_path):
    write_records(tmp_path / "data", [n // 4 for n in range(40)], size=32)
    text = f"data: {{train: {tmp_path}/data, image_size: 32}}\ntrain: {{batch_size: 8}}\neval: {{targets: []}}\n{TINY}"
    (tmp_path / "own.yaml").write_text(text)
    arguments = ("--config", tmp_path / "own.yaml", "--gpus", 1, "--gpu-kind", "cpu", "--memory", 16)
    code, printed, _ = plan(*arguments, "--json")
    report = json.loads(printed)
    assert code == 0 and report["identities"] == 10, "as in the dataset"
    # This process has torch and the tests in its memory, beside what the step takes.
    assert sum(report["parts_bytes"].values()) * 0.5 < report["total_bytes"] < 8 * 2**30
    assert any("peak of a process" in remark for remark in report["remarks"])


NOT_DIVIDED = ("--gpus", 3, "--set", "train.batch_size=null", "--set", "train.global_batch_size=1024")
NO_PARAMETER = "model.lr_factors: no parameter's name starts with 'neck'; names start with one of: "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (NOT_DIVIDED, "cannot be divided among 3 ranks"),
        (("--gpus", 8, *AS_TINY, "--set", "model.lr_factors={neck: 0.1}"), NO_PARAMETER),
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


def test_the_plan_of_a_run_in_stages_takes_the_memory_of_the_largest(tmp_path):
    text = "data: {train: none, num_classes: 1000, num_images: 12800}\n" + TINY
    text += "train: {batch_size: 64, epochs: 4, stages: [{until_epoch: 3, batch_size: 128}]}\n"
    (tmp_path / "run.yaml").write_text(text)

    def planned(*options):
        return json.loads(plan("--config", tmp_path / "run.yaml", "--gpus", 1, "--json", *options)[1])

    staged, large = planned(), planned("--set", "train={batch_size: 128, epochs: 3, stages: []}")
    assert staged["batch"] == 128 and staged["parts_bytes"] == large["parts_bytes"]
