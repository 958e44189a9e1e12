"""Summary of a finished run."""

import re
from types import SimpleNamespace

import pytest

from facetrain.config.loading import build_config
from facetrain.run.summary import Ending, more_steps, print_lines, summarize
from facetrain.telemetry.jsonl import JsonLines

CONFIG = build_config({"data": {"train": "x"}}, "test")


def test_numbers_that_are_not_finite_are_in_the_summary(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(10, {"loss": float("nan")})
    lines.write(20, {"lfw/accuracy": 0.5, "lfw/auc": float("nan"), "lfw/pairs": 600.0})
    lines.write(
        30, {"loss": float("inf"), "lfw/accuracy": 0.9999995, "agedb/accuracy": 0.6, "agedb/pairs": 20.0}
    )
    lines.close()
    text = summarize(tmp_path, CONFIG, Ending(has_learned=False))
    assert "  loss      nan at step 10 → inf at step 30\n" in text
    assert "  lfw       accuracy 50.00% at step 20 → 99.999950% (AUC nan), 600 pairs\n" in text
    assert text.index("  agedb ") < text.index("  lfw "), "in order, whatever set was the first"
    assert "  did not learn in its first steps: see the warning in " in text
    assert text.count("did not learn") == 1


@pytest.mark.parametrize("is_part", [True, False])
def test_a_run_that_is_a_part_of_another_command_suggests_no_next_one(tmp_path, is_part):
    text = summarize(tmp_path, CONFIG, Ending(is_part=is_part))
    assert ("facetrain resume" in text) == ("next:" in text) == (not is_part)


@pytest.mark.parametrize(
    ("margin_weight", "line"), [(0, "distill loss 0.000412 at step 10"), (1, "loss      5.0000 at step 10")]
)
def test_the_summary_has_the_loss_that_is_trained(tmp_path, margin_weight, line):
    distill = {"teacher": "x", "loss": "cosine", "margin_weight": margin_weight}
    config = build_config({"data": {"train": "x"}, "distill": distill}, "test")
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write(10, {"loss": 5.0, "distill_loss": 4.12e-4})
    lines.close()
    text = summarize(tmp_path, config, Ending())
    assert f"  {line}\n" in text


@pytest.mark.parametrize(
    ("losses", "grows"),
    [
        ([40.0, 8.0, 71.0], True),
        ([40.0, "nan"], True),
        (["nan", 40.0], False),
        ([40.0, 69.0], False),
        ([0.1, 0.9], False),
        ([5.0], False),
    ],
)
def test_a_run_whose_loss_has_grown_did_not_learn(tmp_path, losses, grows):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step, loss in enumerate(losses):
        lines.write(step, {"loss": float(loss)})
    lines.close()
    text = summarize(tmp_path, CONFIG, Ending())
    assert ("\n  did not learn: the loss has grown or is not finite; lower " in text) == grows


def test_the_summary_names_what_the_run_has_written_and_why_it_has_ended(tmp_path):
    ending = Ending(early="no gain since step 8", skipped=["a.jpg", "b.jpg"])
    assert "report.html" not in summarize(tmp_path, CONFIG, Ending())
    (tmp_path / "report.html").touch()
    (tmp_path / "tensorboard").mkdir()
    lines = summarize(tmp_path, CONFIG, ending).splitlines()
    assert "  no gain since step 8" in lines and f"  report    {tmp_path / 'report.html'}" in lines
    (skipped,) = (line for line in lines if "2 images could not be read" in line)
    assert skipped.endswith("the first: a.jpg")
    assert lines[-1] == f"  tensorboard --logdir {tmp_path / 'tensorboard'}"


@pytest.mark.parametrize(
    ("target", "options"),
    [("lfw", " --data-dir sets"), ("/sets/lfw.bin", ""), ("hf://org/repo/lfw.bin", "")],
)
def test_the_next_commands_find_the_sets_and_allow_the_code_of_the_run(tmp_path, target, options):
    own = {"backbone": "mine:Network", "options": {"size": 1}}
    config = build_config(
        {"data": {"train": "x"}, "model": own, "eval": {"dir": "sets", "targets": [target]}}, "test"
    )
    text = summarize(tmp_path, config, Ending("--set train.max_steps=MORE"))
    allow, folder = " --allow-code", re.escape(str(tmp_path))
    assert f"  facetrain eval {tmp_path} --target {target}{options}{allow}\n" in text
    assert f"  facetrain resume {tmp_path} --set train.max_steps=MORE{allow}\n" in text
    assert re.search(f"\n  facetrain export {folder} --output .*{allow}$", text)


def test_only_a_resume_needs_the_code_of_a_margin(tmp_path):
    head = {"margin": {"type": "mine:margin"}}
    config = build_config({"data": {"train": "x"}, "head": head, "eval": {"targets": ["lfw"]}}, "test")
    commands = summarize(tmp_path, config, Ending("MORE")).split("next:\n")[1].splitlines()
    assert [line.split()[1] for line in commands if "--allow-code" in line] == ["resume"], commands


@pytest.mark.parametrize(
    ("early_stop", "step", "max_steps", "keys"),
    [
        ("", 40, None, ["train.epochs"]),
        ("", 40, 50, ["train.epochs"]),
        ("", 39, 39, ["train.max_steps"]),
        ("", 40, 40, ["train.epochs", "train.max_steps"]),
        ("no gain", 20, 39, ["train.stop_early.patience"]),
        ("no gain", 40, None, ["train.epochs", "train.stop_early.patience"]),
    ],
)
def test_the_keys_that_lengthen_a_run_are_those_that_have_ended_it(early_stop, step, max_steps, keys):
    schedule = SimpleNamespace(total_steps=min(max_steps or 40, 40), steps_of_all_epochs=40)
    options = more_steps(schedule, step, early_stop, max_steps=max_steps)
    assert options == " ".join(f"--set {key}=MORE" for key in keys)


def test_no_name_in_the_summary_controls_the_terminal(capsys):
    print_lines("a\x1b[2J\nb")
    assert capsys.readouterr().out == "a\\x1b[2J\nb\n"
