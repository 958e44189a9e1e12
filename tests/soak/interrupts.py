"""Ctrl-C at moments from the start of a command to its end: `python -m tests.soak.interrupts --moments 200`.

Exit code 130, at most two lines, no process left, and no output but a whole one; the command without Ctrl-C then gives
the result of one that was not interrupted. A command that ends by itself before the signal has exit code 0.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from facetrain.data.open_dataset import open_dataset
from facetrain.embeddings.embedding_files import load_embeddings
from tests.soak.inspect_run import differences, inspect_after_kill
from tests.soak.settings import Setting, write_config, write_data
from tests.support.command import ROOT, environment, restore_signals
from tests.support.datasets import encoded_image, images_of
from tests.support.processes import adopt_orphans, descendants, kill, wait_until_gone

_NOT_COUNTED = re.compile(
    r"SIGINT received: saving|stopped at step|step \d+|warning: |\S+: \d+ images|verif|\s*$"
)
"""Lines that a run prints when it stops as it should, or had printed before."""
_TRACEBACK = re.compile(r"^(?:Traceback .*\n(?:[ ].*\n|\n)*\S.*\n|[WEI]\d{4} .*\n)", re.M)
"""Traceback, or message of torchrun, which ends by a traceback and exit code 1 after every signal."""
_LIMIT_S = 120.0
_REPEATED_EVERY = 5
"""One of so many interrupted commands is started again, and its result compared."""
_FACETRAIN = (sys.executable, "-m", "facetrain")
_TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "facetrain",
)


def interrupt(
    arguments: Sequence[object],
    moment_s: float = 0.0,
    processes: int = 0,
    program: Sequence[str] = _FACETRAIN,
) -> list[str]:
    """Send SIGINT to a command and all its processes, as a terminal does; return what is wrong with its end.

    The signal is sent `moment_s` seconds after the command has as many descendants as `processes`.
    """
    process = subprocess.Popen(
        [*program, *map(str, arguments)], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, start_new_session=True, preexec_fn=restore_signals,
    )  # fmt: skip
    pids = [process.pid]
    try:
        while len(descendants(process.pid)) < processes and process.poll() is None:
            time.sleep(0.01)
        time.sleep(moment_s)
        pids += descendants(process.pid)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return [f"still runs after {_LIMIT_S:.0f} s"]
    finally:
        left = wait_until_gone(pids, 10)
        kill(left)
        process.communicate()
    # Python itself was not up yet, or had not found the program.
    if any(text in stderr for text in ("init_import_site", "import runpy", "_get_module_details")):
        return []
    if program == _TORCHRUN:
        stderr = _TRACEBACK.sub(lambda block: block[0] if f"{ROOT}/facetrain/" in block[0] else "", stderr)
    lines = [line for line in stderr.splitlines() if not _NOT_COUNTED.match(line)]
    faults = [f"processes left: {left}"] if left else []
    # While Python ends, the signal has its default action; a shell reports that as 130, too.
    if process.returncode not in (0, 130, -signal.SIGINT, 1 if program == _TORCHRUN else 0):
        faults.append(f"exit code {process.returncode}:\n{stderr}")
    if len(lines) > 2 or "Traceback" in stderr:
        faults.append("prints:\n" + stderr)
    return faults


@dataclass(frozen=True)
class Command:
    """Command to interrupt."""

    arguments: Sequence[object]
    """Arguments of `facetrain`, without the output."""
    output: str
    """Name of the file or folder that it writes, after the arguments."""
    check: Callable[[Path, Path], list[str]]
    """Return what is wrong with an output beside the one of the undisturbed command."""
    kept: str = ""
    """Pattern of what may stay until the next start, which continues from it."""
    program: Sequence[str] = _FACETRAIN

    def run(self, output: Path) -> float:
        """Run the command to its end; return its seconds."""
        since = time.monotonic()
        words = [*self.program, *map(str, self.arguments), str(output)]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"the command without Ctrl-C failed: {done.stderr[-2000:]}")
        return time.monotonic() - since


def _check_run(run: Path, whole: Path) -> list[str]:
    """Compare a run that was resumed to its end; one that was not must have whole checkpoints alone."""
    state = inspect_after_kill(run)
    faults = [f"{state.bytes_lost} bytes lost"] if state.bytes_lost else []
    faults += ["an unfinished checkpoint is left"] if state.was_saving else []
    is_finished = (run / "model.safetensors").exists()
    return faults + (differences(run, whole, exact=True) if is_finished else [])


def _check_bytes(path: Path, whole: Path) -> list[str]:
    return [] if path.read_bytes() == whole.read_bytes() else ["other bytes"]


def _check_embeddings(path: Path, whole: Path) -> list[str]:
    ours, theirs = load_embeddings(path).embedding, load_embeddings(whole).embedding
    return [] if ours.tobytes() == theirs.tobytes() else ["other embeddings"]


def _check_dataset(folder: Path, whole: Path) -> list[str]:
    return [] if images_of(open_dataset(folder)) == images_of(open_dataset(whole)) else ["other images"]


def commands(folder: Path) -> dict[str, Command]:
    """Return the commands to interrupt."""
    data, model = folder / "data", folder / "model"
    train = ["train", "--config", folder / "config.yaml", "--resume"]
    two = [*train, "--nproc-per-node", 2, "--run-dir"]
    cpu = ["--device", "cpu"]
    evaluate = ["eval", model, "--target", data / "val.bin", *cpu, "--json"]
    embed = ["embed", model, data, *cpu, "--output"]
    return {
        "train": Command([*train, "--run-dir"], "run", _check_run),
        "train on two ranks": Command(two, "run_2", _check_run),
        "train under torchrun": Command([*train, "--run-dir"], "run_3", _check_run, program=_TORCHRUN),
        "eval": Command(evaluate, "eval.json", _check_bytes),
        # These two have no option for the number of processes.
        "eval under torchrun": Command(evaluate, "eval_2.json", _check_bytes, program=_TORCHRUN),
        "embed": Command(embed, "e.npz", _check_embeddings, kept="e.npz*"),
        "embed under torchrun": Command(
            embed, "e_2.npz", _check_embeddings, kept="e_2.npz*", program=_TORCHRUN
        ),
        "pack": Command(["data", "pack", folder / "photos", "--output"], "packed", _check_dataset),
    }


def interrupt_often(command: Command, moments: int, folder: Path) -> list[str]:
    """Interrupt a command at moments from its start to its end; return the faults."""
    whole, scratch, found = folder / f"whole_{command.output}", folder / "scratch", []
    seconds = command.run(whole)
    for number in range(moments):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        output = scratch / command.output
        moment = seconds * number / moments
        faults = interrupt([*command.arguments, output], moment, program=command.program)
        names = {path.name for path in scratch.iterdir()} - {
            path.name for path in scratch.glob(command.kept or "-")
        }
        faults += [f"{name} is left" for name in names - {output.name}]
        if number % _REPEATED_EVERY == 0 and ("--resume" in command.arguments or not output.exists()):
            command.run(output)
        if output.exists():
            faults += command.check(output, whole)
        found += [f"after {moment:.2f} of {seconds:.2f} s: {fault}" for fault in faults]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=200, help="moments over all commands; default: 200")
    parser.add_argument("--only", default="", help="part of the names of the commands; default: all")
    options = parser.parse_args()
    adopt_orphans()
    failed = False
    with tempfile.TemporaryDirectory(prefix="facetrain-interrupts-") as name:
        folder = Path(name)
        write_data(folder / "data")
        changes = {"train.max_steps": 6, "checkpoint.every_steps": 2, "data.workers": 1}
        write_config(Setting("interrupts", changes=changes), folder / "data", folder / "config.yaml")
        for number in range(60):
            path = folder / "photos" / str(number // 5) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded_image(number, 112))
        chosen = {title: each for title, each in commands(folder).items() if options.only in title}
        Command(["train", "--config", folder / "config.yaml", "--run-dir"], "model", _check_run).run(
            folder / "model"
        )
        for title, command in chosen.items():
            faults = interrupt_often(command, options.moments // len(chosen), folder)
            print(
                f"{title}: {options.moments // len(chosen)} moments, {len(faults)} faults",
                *faults,
                sep="\n",
                flush=True,
            )
            failed = failed or bool(faults)
    sys.exit(failed)


if __name__ == "__main__":
    main()
