"""Command `facetrain finetune`: from photos and a model to a model that is never worse."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.dataset_options import FaceLandmarks
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Set, download, local_file, local_set
from facetrain.cli.outputs import echo_line, leave_to_first_rank, require_existing
from facetrain.distributed.process_lifetime import has_peers
from facetrain.errors import UsageError
from facetrain.own_parts import allow_option
from facetrain.text import shell_path

if TYPE_CHECKING:
    from facetrain.finetune.prepare import Prepared
    from facetrain.finetune.workplace import Request
    from facetrain.run.request import TrainRequest


@option_groups
def finetune(
    photos: Annotated[
        Path,
        typer.Argument(
            metavar="PHOTOS",
            parser=local_file,
            help="Photos: a folder with a folder of photos per person, or any dataset. With --detector whole photos, "
            "otherwise aligned faces.",
        ),
    ],
    *,
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Model to start from: a run, a model file, or another file that model.init_from takes.",
        ),
    ],
    faces: FaceLandmarks,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of all results. Default: runs/finetune-PHOTOS."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            parser=local_set,
            help="Verification set of other people, on which the result may not be worse. May be repeated.",
        ),
    ] = None,
    set_: Set = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the images and people that are held out.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after an interruption.")] = False,
) -> None:
    """Fine-tune a model on photos; the first model stays unless the new one gains and other people do not suffer."""
    from facetrain.remote.download import is_name

    if has_peers():
        leave_to_first_rank()
        raise UsageError(
            "finetune: prepares its files in one process, and a launcher has started several; start it without torchrun"
        )
    path, address = download(model) if is_name(model) else (Path(model), None)
    require_existing(photos, path, faces.detector, faces.landmarks)
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.cli.rank import train_on_this_rank
    from facetrain.finetune.judge import describe, judge
    from facetrain.finetune.page import write_page
    from facetrain.finetune.prepare import prepare
    from facetrain.finetune.workplace import Request
    from facetrain.models.read_model import names_code

    request = Request(
        photos,
        path,
        output or Path("runs") / f"finetune-{photos.resolve().name}",
        address,
        aligner=faces.detector or faces.landmarks,
        targets=tuple(target or ()),
        overrides=tuple(set_ or ()),
        resume=resume,
        seed=seed,
    )
    with _saying_how_to_continue(request.output):
        prepared = prepare(request, faces.finder(), echo_line, progress_bar)
        if code := train_on_this_rank(_training(prepared, request)):
            sys.exit(code)
        prepared.write_config(echo_line)
        verdict = judge(prepared, say=echo_line, bar=progress_bar)
        for line in describe(verdict):
            echo_line(line)
        write_page(prepared, verdict)
    echo_line(f"{prepared.place.page}: the choices, the faces and the results")
    kept = prepared.place.model
    exported = shell_path(kept.with_suffix(".onnx"))
    echo_line(
        f"next: facetrain export {shell_path(kept)} --output {exported}{allow_option(names_code(kept))}"
    )


@contextmanager
def _saying_how_to_continue(output: Path) -> Iterator[None]:
    """Name the option that continues the command, if a signal ends the block after something was written."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as ended:
        is_signal = isinstance(ended, KeyboardInterrupt) or (isinstance(ended.code, int) and ended.code > 128)
        if is_signal and output.exists():
            echo_line(f"{output}: to continue, give the same command with --resume", err=True)
        raise


def _training(prepared: Prepared, request: Request) -> TrainRequest:
    from facetrain.config.loading import plain_config
    from facetrain.run.request import TrainRequest

    return TrainRequest(
        config=plain_config(prepared.config),
        overrides=request.overrides,  # the config has them, but a run that continues changes by them alone
        run_dir=str(prepared.place.run),
        resume_existing=request.resume,
        is_part=True,
        command_line=tuple(sys.argv[1:]),
    )
