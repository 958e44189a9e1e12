"""Bad input: one line with the fault, its place and the remedy, and the right exit code."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from facetrain import __main__
from facetrain.cli.app import _exit_with_error, app, end_with
from facetrain.device import gpu_driver
from facetrain.device.gpu_driver import has_gpu_driver
from facetrain.distributed.devices import pick_device, require_device
from facetrain.distributed.topology import topology
from facetrain.errors import UsageError
from facetrain.text import printable
from tests.support.command import ROOT, environment, facetrain, refusal, start, torchrun

WRONG = [
    (["--set", "data.train=/nowhere"], "/nowhere"),
    (["--set", "optim.weight_decy=1"], "weight_decay"),
    (["--run-dir", __file__], "--run-dir"),
    (["--nnodes", "2"], "--rdzv-endpoint"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "message"), WRONG)
def test_an_impossible_request_ends_with_2_and_one_line(describe, options, message):
    # One in a process of its own, as a user starts it.
    process = facetrain("train", "--config", describe(), *options, fresh="--nnodes" in options)
    assert process.returncode == 2, process.stderr
    lines = [line for line in process.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], process.stderr


def test_another_system_than_linux_ends_with_2_and_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2 and capsys.readouterr().err == (
        "error: facetrain runs on Linux; on Windows, use WSL 2\n"
    )


# It waits a second for the others instead of ten minutes.
IMPATIENT = """
from facetrain.distributed import world

world.ARRIVAL_S = 1.0
"""


@pytest.mark.slow
@pytest.mark.skipif(has_gpu_driver(), reason="torch's errors are kept: only they name a collective of NCCL")
def test_a_rank_of_another_launcher_that_finds_no_other_rank_ends_with_1_and_one_line(describe, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(IMPATIENT)
    alone = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    process = start("train", "--config", describe(), **alone, PYTHONPATH=f"{tmp_path}:{ROOT}")
    _, stderr = process.communicate()
    assert process.returncode == 1, stderr
    assert len(stderr.splitlines()) == 1, stderr
    assert stderr.startswith("error: rank 1 could not join the process group at 127.0.0.1:1: ")
    assert "check that this address is right" in stderr


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (
            "train --preset quickstart --nproc-per-node auto --nnodes 4 --max-restarts 3",
            "--nnodes 4 --max-restarts 3",
        ),
        ("resume run --nproc-per-node 9", "--nproc-per-node 9"),
        ("bench train --nproc-per-node 9", "--nproc-per-node 9"),
    ],
)
def test_options_about_processes_are_refused_where_another_launcher_starts_them(command, names, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    refused = refusal(*command.split())
    assert isinstance(refused, UsageError) and str(refused).startswith(f"{names}: has no effect with RANK")


@pytest.mark.parametrize(
    "line",
    [
        "eval m --target s",
        "search faces faces --model m",
        "data clean m faces",
        "bench loader",
    ],
)
def test_without_a_gpu_the_advice_names_the_option_of_the_command(line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = refusal(*line.split(), "--device", "cuda")
    assert error.exit_code == 2 and "--device cpu" in str(error)


@pytest.mark.parametrize(
    ("count", "advice"),
    [
        (0, "this machine has 0; use a machine with a GPU, or train.device: cpu"),
        (
            2,
            "this machine has 2; start at most 2 processes on it, let CUDA_VISIBLE_DEVICES show each all GPUs, or use "
            "train.device: cpu",
        ),
    ],
)
def test_a_rank_without_a_gpu_gets_the_advice_of_its_command(count, advice, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UsageError, match=f"local rank 2 has no GPU: {advice}"):
        pick_device("cuda", 2, cpu_setting="train.device: cpu")


@pytest.mark.parametrize(
    "line",
    [
        "embed same faces --output same",
        "eval same --target s --json same",
        "export same --format onnx --output same",
        "export same --format onnx --output m.onnx --model-card same",
        "data clean m same --sheet same",
    ],
)
def test_no_output_replaces_an_input(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suffixes = {
        "export same": ".safetensors",
        "embed same": ".safetensors",
    }
    same = "same" + suffixes.get(" ".join(line.split()[:2]), ".html")
    (tmp_path / same).write_text("mine")
    (tmp_path / "link").symlink_to(same)
    refused = refusal(*(word.replace("same", same) for word in line.split()))
    assert refused.exit_code == 2 and same in str(refused) and (tmp_path / same).read_text() == "mine"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("train", "--config"),
        ("trian", "Did you mean 'train'?"),
        ("eval m --target t --batch-size 0", "--batch-size"),
    ],
)
def test_a_line_that_cannot_be_parsed_ends_with_2_and_one_line(line, named):
    process = facetrain(*line.split(), fresh=True)
    assert process.returncode == 2 and not process.stdout
    assert process.stderr.startswith("error: facetrain") and process.stderr.count("\n") == 1
    assert named in process.stderr


@pytest.mark.parametrize("command", ["resume", "report", "runs"])
def test_a_name_that_is_too_long_for_the_system_ends_with_2_and_one_line(command):
    done = facetrain(command, "x" * 300)
    assert done.returncode == 2 and done.stderr.startswith("error: xxx"), done.stderr
    assert done.stderr.endswith(": File name too long\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--config", "NAME"],
        ["train", "--preset", "quickstart", "--run-dir", "NAME"],
        ["train", "--data", "NAME"],
        ["resume", "NAME", "--nproc-per-node", "2"],
    ],
    ids=" ".join,
)
def test_a_name_that_is_not_utf_8_is_refused_before_a_process_starts(words):
    refused = refusal(*(word.replace("NAME", os.fsdecode(b"x\xff")) for word in words))
    message = printable(str(refused))
    assert type(refused) is UsageError and "x\\xff" in message
    assert message.endswith(": a name that is not UTF-8; rename the file or folder")


@pytest.mark.parametrize(
    "words",
    [
        ["embed", "NAME/model.safetensors", "DATASET", "--output", "x.npz"],
        ["embed", "NAME/model.onnx", "DATASET", "--output", "x.npz"],
        ["average", "model.safetensors", "model.safetensors", "--output", "NAME/x.safetensors"],
        ["calibrate", "model.safetensors", "--target", "DATASET", "--output", "NAME/x.safetensors"],
        ["export", "model.safetensors", "--output", "NAME/x.onnx"],
        ["finetune", "NAME", "--model", "model.safetensors", "--output", "out"],
    ],
    ids=" ".join,
)
def test_a_path_that_a_model_file_cannot_have_is_refused_before_the_work(
    model, dataset, tmp_path, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"x\xff")
    shutil.copytree(dataset, name)
    for file in ("model.safetensors", "model.onnx"):
        shutil.copy(model, os.path.join(name, file))
    before = sorted(tmp_path.rglob("*"))
    refused = refusal(
        *(word.replace("NAME", name).replace("DATASET", str(dataset / "data")) for word in words)
    )
    message = printable(str(refused))
    assert type(refused) is UsageError and "x\\xff" in message
    assert message.endswith(": a name that is not UTF-8; rename the file or folder")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_in_a_folder_that_is_not_utf_8_is_refused(describe, tmp_path, monkeypatch):
    config, folder = describe(), tmp_path / os.fsdecode(b"x\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    refused = refusal("train", "--config", config, "--set", "run.dir=runs")
    assert type(refused) is UsageError and "x\\xff" in printable(str(refused))
    assert not [*folder.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["resume", ""], "resume"),
        (["train", "--preset", "quickstart", "--run-dir="], "--run-dir="),
        (["data", "pairs", "faces", "--output", ""], "--output"),
    ],
)
def test_an_empty_text_is_refused_and_not_taken_for_the_current_folder(arguments, place):
    refused = refusal(*arguments)
    assert refused.exit_code == 2 and str(refused).startswith(f"an empty text follows {place}: ")


@pytest.mark.parametrize(
    "line",
    [
        "plan --preset quickstart --memory 8 --identities",
        "plan --preset quickstart --gpus",
        "data pairs a --count",
    ],
)
def test_a_number_that_nothing_can_have_is_refused_before_any_work(line, capsys):
    with pytest.raises(SystemExit) as ended:
        app([*line.split(), str(10**30)])
    option = line.rpartition(" ")[2]
    assert ended.value.code == 2 and f"Invalid value for '{option}'" in capsys.readouterr().err


def test_a_path_in_a_folder_that_may_not_be_read_ends_with_2_and_one_line():
    # The superuser of a test may read every folder.
    code = """
import sys
from facetrain.cli.app import main
from facetrain.run.report import list_runs
def refuse(folder):
    raise PermissionError(13, "Permission denied", f"{folder}/metrics.jsonl")
list_runs.list_runs = refuse
sys.argv = ["facetrain", "runs", "other"]
main()
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (2, "error: other/metrics.jsonl: Permission denied\n")


def test_an_option_without_its_value_is_told_with_its_command():
    process = facetrain("data", "pack", "x", "--output")
    assert process.returncode == 2
    assert process.stderr.startswith("error: facetrain data pack: Option '--output' requires an argument")


@pytest.mark.slow
def test_on_several_ranks_one_of_them_prints_the_error(describe):
    process = torchrun(2, "train", "--config", describe(), "--set", "data.train=/nowhere")
    assert process.stderr.count("error: /nowhere: no such folder") == 1


@pytest.mark.slow
def test_on_several_ranks_one_of_them_prints_what_is_wrong_with_the_command_line():
    process = torchrun(2, "train", "--confg", "run.yaml")
    assert process.stderr.count("error: facetrain train: No such option: --confg") == 1


@pytest.mark.slow
def test_on_several_ranks_one_of_them_prints_that_a_set_is_missing(model, tmp_path):
    process = torchrun(2, "eval", model, "--target", "nowhere", "--device", "cpu", cwd=tmp_path)
    assert process.stderr.count("error: nowhere") == 1 == process.stderr.count("error: ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_by_an_exception(monkeypatch, tmp_path, number):
    """By its default action, it would end at once and leave the temporary file of an output."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not as under nohup
    monkeypatch.setattr(
        "facetrain.run.report.list_runs.list_runs",
        lambda _: signal.getsignal(number) is signal.SIG_DFL or signal.raise_signal(number),
    )
    with pytest.raises(SystemExit) as ended:
        app(["runs", str(tmp_path)], standalone_mode=False)
    assert ended.value.code == 128 + number


@pytest.mark.slow
def test_the_traceback_comes_with_debug_alone(tmp_path):
    process = facetrain("eval", tmp_path, "--target", "x", "--debug")
    assert process.returncode == 1 and "Traceback" in process.stderr
    process = facetrain("eval", tmp_path, "--target", "x")
    assert process.returncode == 2 and "Traceback" not in process.stderr


MISSING = (
    "eval none --target x",
    "eval none",
    "embed none faces --output e.npz",
    "calibrate none --target x",
    "compare none a.jpg b.jpg",
    "search none b.npz",
    "average none b --output c.safetensors",
    "export none --format onnx --output m.onnx",
    "report none",
    "resume none",
    "train --config none.yaml",
    "train --data none",
    "train --preset ms1mv3_r50 --set data.train=none",
    "plan --config none.yaml",
    "data inspect none",
)


def test_a_wrong_path_is_found_before_torch_is_imported(tmp_path):
    script = f"""
import sys
from facetrain.cli.app import app
for line in {MISSING}:
    try:
        app(line.split(), standalone_mode=False)
    except Exception as error:
        print(line, error, sep=": ")
    assert "torch" not in sys.modules, line
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(MISSING), done.stdout
    assert all("no such f" in line or "not the folder of a run" in line for line in lines), done.stdout
    advice = {line.split()[0]: line.split("`")[1] for line in lines if "`" in line}
    assert advice["report"] == "facetrain runs" and advice["embed"] == "facetrain get", "a misspelled name"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell):
    words = {"COMP_WORDS": "facetrain tr", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "facetrain tr"}
    asked = {"_FACETRAIN_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command, variables = [sys.executable, "-m", "facetrain"], environment(**words, **asked)
    process = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert "train" in process.stdout and "export" not in process.stdout, process.stderr


@pytest.mark.parametrize("command", [("train", "--config"), ("plan", "--config"), ("config", "show")])
def test_a_config_of_arcface_torch_is_sent_to_the_converter(command, tmp_path):
    path = tmp_path / "ms1mv3_r50.py"
    path.write_text("config.network = 'r50'")
    error = refusal(*command, path)
    assert f"facetrain config convert {path} > ms1mv3_r50.yaml" in str(error) and error.exit_code == 2


def test_too_little_memory_is_not_an_internal_error(capfd):
    with pytest.raises(SystemExit) as ended:
        _exit_with_error(MemoryError("Unable to allocate 30.5 MiB"))
    assert ended.value.code == 1
    message = "error: too little memory (Unable to allocate 30.5 MiB); use a smaller"
    assert capfd.readouterr().err.startswith(message)


class DriverWithGpus:
    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 8
        return 0


@pytest.mark.parametrize(
    "start",
    [
        lambda: topology("auto", "1", None, 0, "auto"),
        lambda: pick_device("auto", 0, cpu_setting="train.device: cpu"),
        lambda: pick_device("cuda", 0, cpu_setting="train.device: cpu"),
        lambda: require_device("cuda", given="--device cuda", cpu_setting="--device cpu"),
    ],
)
def test_gpus_that_torch_cannot_use_are_an_error_and_no_run_on_the_cpu(start, monkeypatch):
    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nUpdate it.")

    monkeypatch.setattr(gpu_driver, "_cuda_driver", DriverWithGpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(UsageError) as refused:
        start()
    message = str(refused.value)
    assert refused.value.exit_code == 2 and "\n" not in message
    assert "driver on your system is too old" in message and "device" in message and "cpu" in message


def test_gpus_that_are_hidden_leave_the_cpu(monkeypatch):
    class Driver(DriverWithGpus):
        def cuDeviceGetCount(self, count):
            return 100  # as with an empty CUDA_VISIBLE_DEVICES

    monkeypatch.setattr(gpu_driver, "_cuda_driver", Driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", 0, cpu_setting="train.device: cpu").type == "cpu"


@pytest.mark.parametrize(("rank", "error"), [("0", "without torchrun"), ("1", "")])
def test_a_fine_tuning_in_several_processes_is_refused_by_the_first(rank, error, monkeypatch, tmp_path):
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    words = ["finetune", str(tmp_path), "--model", str(tmp_path), "--output", str(tmp_path / "out")]
    with pytest.raises(UsageError, match=error) if error else nullcontext():
        assert app(words, standalone_mode=False) == 0


@pytest.mark.parametrize(
    "command",
    [
        "data pack ADDRESS --output o",
        "data merge ADDRESS ADDRESS --output o",
        "data pairs ADDRESS --output o.bin",
        "data landmarks ADDRESS",
        "embed MODEL ADDRESS --output o.npz",
        "compare MODEL ADDRESS ADDRESS",
        "search ADDRESS ADDRESS",
        "align MODEL MODEL ADDRESS --output o.npz",
        "calibrate MODEL --target ADDRESS",
        "finetune ADDRESS --model MODEL",
        "export MODEL --output o.onnx --images ADDRESS",
        "bench loader --data ADDRESS",
    ],
)
def test_images_and_datasets_may_be_addresses(command, model):
    words = command.replace("ADDRESS", "hf://org").replace("MODEL", str(model)).split()
    refused = refusal(*words)
    assert refused.exit_code == 2 and str(refused).startswith("hf://org: "), "and no path with one slash"


def test_a_command_may_have_as_many_open_files_as_the_system_permits():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
        with pytest.raises(SystemExit):
            end_with(lambda: found.append(resource.getrlimit(resource.RLIMIT_NOFILE)), debug=False)
        assert found == [(limits[1], limits[1])]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
