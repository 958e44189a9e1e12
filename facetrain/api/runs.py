"""Training runs: new ones, and their continuation."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from facetrain import own_parts
from facetrain.api.dataset import PathLike
from facetrain.api.model import Model, load_model
from facetrain.errors import RunError, UsageError
from facetrain.files import os_errors_as
from facetrain.run.folder.run_files import METRICS_FILE
from facetrain.run.request import TrainRequest, as_override, dataset_overrides
from facetrain.telemetry.jsonl import read_jsonl


@dataclass(frozen=True)
class Run:
    """Finished run. The functions take it in place of its folder."""

    folder: Path
    """Run folder, with `model.safetensors`, `metrics.jsonl`, `config.yaml` and the checkpoints."""

    def __fspath__(self) -> str:
        return str(self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl: one dict for each logged step and each verification."""
        with os_errors_as(RunError, self.folder):
            return read_jsonl(self.folder / METRICS_FILE)

    def load_model(self, device: str = "auto", *, allow_code: bool = False) -> Model:
        """Open the model of the run, see `load_model`. A run of this process has allowed the code of its own config."""
        return load_model(self, device, allow_code=allow_code)


def train(
    config: PathLike | Mapping[str, Any] | None = None,
    run_dir: PathLike | None = None,
    *,
    dataset: PathLike | None = None,
    resume: bool = False,
    allow_code: bool = False,
    **overrides: Any,
) -> Run:
    """Train a backbone and its head in this process, on one GPU or on the CPU, and return the run.

    Progress goes to standard error, as with `facetrain train`. Under torchrun, each process of the script trains on
    one GPU, and must end within 18 s if this function raises an exception. It handles signals: call it from the main
    thread. Ctrl-C, or the stop button of a notebook, saves a checkpoint; `resume` continues from it. The second one
    ends the training without. Its watchdog ends the process if it hangs, or still runs 300 s after the first signal.

    Examples:
        >>> run = facetrain.train("quickstart", dataset="faces", train={"epochs": 2})
        >>> run = facetrain.train("my.yaml", **{"optim.lr": 0.05, "train.batch_size": 64})

    Args:
        config: a config file, the name of a preset, or a dict with the sections of a config; None: network, number
            format and learning rate are chosen for `dataset`.
        run_dir: folder of the run. Default: `run.dir`/`run.name` of the config, with a number behind it if that exists.
        dataset: dataset to train on, in place of that of the config, as by `--data`: verified on its own sets, which
            lie beside it. To replace nothing but the path, set `data.train`.
        resume: continue the run if its folder has a checkpoint; otherwise start it.
        allow_code: whether the code (MODULE:NAME) that a file of the config names may run, such as that of a teacher.
            Only for files that you trust. The code that the config itself names runs.
        overrides: values that replace those of the config: a section with a dict of its keys, or a dotted key.

    Raises:
        ConfigError: the config is invalid; the message has all faults.
        UsageError: neither config nor dataset is given; the given folder has a run (without `resume`); the data, a
            verification set or a model cannot be used; or the caller is not the main thread.
        RunError: training failed.
        KeyboardInterrupt: training was interrupted, and has saved a checkpoint, unless Ctrl-C came twice.
    """
    if config is None and dataset is None:
        raise UsageError("nothing to train on; give a config, the name of a preset, or a dataset")
    of_dataset = () if dataset is None else dataset_overrides(_plain(dataset))
    return _train(
        config=_plain(config),
        overrides=(*of_dataset, *_as_overrides(overrides)),
        run_dir=_plain(run_dir),
        own_data=dataset is not None,
        resume_existing=resume,
        allow_code=allow_code,
    )


def resume(
    run_dir: PathLike,
    checkpoint: int | None = None,
    *,
    allow_code: bool = False,
    **overrides: Any,
) -> Run:
    """Continue a run from a checkpoint, by default the newest, and return the run.

    `checkpoint` is its step. With `allow_code`, code that the config of the run or one of its files names
    (MODULE:NAME) may run.

    Examples:
        >>> run = facetrain.resume("runs/quickstart", train={"epochs": 10})

    Raises:
        NoCheckpointError: the folder has no checkpoint.
        UsageError: the folder is not that of a run; otherwise as `train`.
    """
    return _train(
        command="resume",
        overrides=_as_overrides(overrides),
        run_dir=_plain(run_dir),
        checkpoint=checkpoint,
        allow_code=allow_code,
    )


def _train(**asked: Any) -> Run:
    """Train what is asked, and return the run.

    The default type of the program's tensors, and whether it computes gradients, count for nothing in the run. SIGTERM,
    which ranks ignore at their end, and torch's generators, which a run seeds, are then as before: a program that draws
    the settings of its next run would draw the same ones again.
    """
    from facetrain.run.train import train as train_request

    try:
        request = TrainRequest(**asked)
    except ValidationError as error:
        fault = error.errors()[-1]  # a config is a text or a dict: the faults of the dict come last
        name = str(fault["loc"][0]).removesuffix("_existing")
        raise UsageError(f"{name}: {fault['input']!r}: {fault['msg']}") from None
    _require_main_thread()
    folders, before = list[Path](), signal.getsignal(signal.SIGTERM)
    used_before = torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count()) if used_before else ()
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            own_parts.allowing_all(request.allow_code),
            torch.random.fork_rng(gpus),
            torch.inference_mode(False),
        ):
            code = train_request(request, on_folder=folders.append)
        # Known only now: a new run gets a number, and a run in a mirror continues in a folder of this machine.
        return _finished(folders[-1], code)
    finally:
        torch.set_default_dtype(dtype)
        if torch.cuda.is_initialized() and not used_before:
            # As their first use would have. A seed that the program gave to GPUs alone is lost.
            torch.cuda.manual_seed_all(torch.initial_seed())
        if before is not None:  # None: it was not set by Python
            signal.signal(signal.SIGTERM, before)


def _as_overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values of a config, sections with a dict of their keys or dotted keys, in the form of --set."""
    return tuple(
        as_override(f"{key}.{name}" if name else key, each)
        for key, value in _plain(values).items()
        # A dotted key keeps its mapping, whose keys may have dots, too: the prefixes in `model.lr_factors`.
        for name, each in (
            value.items() if isinstance(value, dict) and value and "." not in key else [("", value)]
        )
    )


def _plain(value: Any) -> Any:
    """Replace paths by text and tuples by lists, as a YAML file would hold them."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("training handles signals: call it from the main thread of the program")


def _finished(folder: Path, exit_code: int) -> Run:
    """Return the run, or raise the exception for the signal that stopped it."""
    if exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(f"training was interrupted; facetrain.resume({str(folder)!r}) continues it")
    if exit_code:
        name = signal.Signals(exit_code - 128).name
        raise RunError(f"{folder}: stopped by {name}; facetrain.resume({str(folder)!r}) continues it")
    return Run(folder)
