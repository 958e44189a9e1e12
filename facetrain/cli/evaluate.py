"""Commands `facetrain eval`, `facetrain embed` and `facetrain compare`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.checkpoints import CheckpointOption, parse_checkpoint
from facetrain.cli.devices import Device
from facetrain.cli.outputs import echo_line, require_writable, write_text
from facetrain.verify.formatting import format_evaluation

_MODEL_HELP = (
    "Model to run: a run folder, a checkpoint, a .safetensors file, a .pt or .pth file of arcface_torch, an .onnx "
    "file, or a -symbol.json file of MXNet."
)
Model = Annotated[Path, typer.Argument(help=_MODEL_HELP)]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per forward pass on each process.")]
Bf16 = Annotated[
    bool, typer.Option("--bf16", help="Run the network in bfloat16 autocast; the default is float32.")
]


def evaluate(
    model: Annotated[
        Path | None, typer.Argument(help=f"{_MODEL_HELP} Not with --scores or --embeddings.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            help="Evaluation set: a .bin file, or a folder in the layout of IJB, TinyFace or MegaFace; a path, or a "
            "name in the data folder. Repeat the option for several sets.",
        ),
    ] = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV[:COLUMN]",
            help="Scores of another system instead of MODEL: a table with the columns score and genuine, see "
            "docs/evaluation.md. COLUMN is the name of another score column.",
        ),
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Embeddings of another system instead of MODEL, .npz or .parquet with the columns embedding, name "
            "and label; needs --pairs.",
        ),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Pairs of --embeddings: a table with the columns first, second and genuine."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the sets that are given by name. The default is the evaluation folder of the run, or "
            "the current folder if MODEL is not a run."
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="Second model, or a file of another system's scores or embeddings: test the difference to it on the "
            "same pairs and bootstrap draws.",
        ),
    ] = None,
    slices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SET=]CSV",
            help="Table with one row for each pair or each image of a set of pairs: report error rates for each "
            "value of each column. SET= is needed if there are several sets.",
        ),
    ] = None,
    slice_fmr: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            max=1,
            help="False match rate over all impostor pairs that defines the threshold of the slices, from 0 to 1. "
            "The default is the mean threshold of the folds.",
        ),
    ] = None,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="Bootstrap draws of subjects for the 95 % intervals; 0 computes none.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap draws.")] = 0,
    flip: Annotated[
        bool,
        typer.Option(
            help="Add the embedding of the mirror image. Sets of pairs are always scored with and without it."
        ),
    ] = True,
    detector_score: Annotated[
        bool, typer.Option(help="Weight the images of an IJB template by their detector scores.")
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Also write all metrics to this JSON file; - prints the JSON only."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for an HTML report with figures and metrics."),
    ] = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    bf16: Bf16 = False,
) -> None:
    """Evaluate a model, or the scores of another system, with exact ROC curves and bootstrap intervals."""
    from facetrain.cli.progress import progress_bar
    from facetrain.config.loading import eval_dir_of_run
    from facetrain.verify.evaluate import evaluate as evaluate_model
    from facetrain.verify.evaluate import evaluate_scores
    from facetrain.verify.protocols import Options

    targets = target or []
    system = _only_system(model, scores, embeddings, pairs, targets)
    opened = model and _find_checkpoint(model, checkpoint)
    json_only = str(json_file) == "-"
    # Check all outputs before the evaluation, which may take hours.
    require_writable(None if json_only else json_file)
    if report is not None:
        from facetrain.verify.report import require_report

        require_report(report)
    options = Options(bootstrap, seed, flip, detector_score, slice_fmr=slice_fmr)
    if model is None or opened is None:
        evaluation = evaluate_scores(system, pair_list=pairs, against=against, options=options)
    else:
        with progress_bar("embedding") as progress:
            evaluation = evaluate_model(
                opened,
                targets,
                data_dir or eval_dir_of_run(model),
                against=against,
                tables=_slice_tables(slices or [], targets),
                options=options,
                device=device,
                batch_size=batch_size,
                bf16=bf16,
                progress=progress,
            )
    if not evaluation.is_leader:
        return
    page = None
    if report is not None:
        from facetrain.verify.report import write_report

        page = write_report(
            report,
            evaluation,
            model=str(opened or system),
            details=_report_details(evaluation.sets, data_dir, against),
        )
    content = json.dumps({"model": str(opened or system)} | evaluation.as_json(), indent=1)
    if json_only:
        typer.echo(content)
        return
    network = f"{opened}: {evaluation.description}, in {evaluation.precision}"
    echo_line(evaluation.description if model is None else network)
    for line in format_evaluation(evaluation):
        echo_line(line)
    if page is not None:
        echo_line(f"report: {page}")
    if json_file is not None:
        write_text(json_file, content + "\n")


def embed(
    model: Model,
    input: Annotated[
        Path, typer.Argument(help="Images: one image, a folder of images, a dataset, a .rec or a .bin file.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="File for the columns `embedding`, `name` and `label`: .npz, or .parquet, which needs "
            "facetrain[parquet]; or .safetensors, a teacher's embeddings of a dataset for `distill.cache`."
        ),
    ],
    flip: Annotated[bool, typer.Option(help="Add the embedding of the mirror image.")] = True,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    bf16: Bf16 = False,
) -> None:
    """Write the embeddings of images to a file; every embedding has length 1, except in .safetensors files."""
    from facetrain.cli.native_messages import collect_native_messages
    from facetrain.cli.progress import progress_bar
    from facetrain.run.teacher_embeddings import write_teacher_embeddings
    from facetrain.training.teacher_cache import SUFFIX
    from facetrain.verify.embedding_files import require_format, save_embeddings
    from facetrain.verify.image_embeddings import embed_input

    if output.suffix == SUFFIX:
        require_writable(output)
        with collect_native_messages(), progress_bar("embedding") as progress:
            count, size = write_teacher_embeddings(
                model,
                input,
                output,
                flip=flip,
                device=device,
                batch_size=batch_size,
                bf16=bf16,
                progress=progress,
            )
        rows = "plain and mirrored" if flip else "plain"
        typer.echo(f"{output}: {count:,} images, {rows}, embeddings of size {size}")
        return
    require_format(output)
    require_writable(output)
    with collect_native_messages(), progress_bar("embedding") as progress:
        embeddings = embed_input(
            model, input, flip=flip, device=device, batch_size=batch_size, bf16=bf16, progress=progress
        )
    save_embeddings(output, embeddings)
    count, size = embeddings.embedding.shape
    echo_line(f"{output}: {count:,} embeddings of size {size}")


def compare(
    model: Model,
    first: Annotated[Path, typer.Argument(help="First image: an aligned face crop.")],
    second: Annotated[Path, typer.Argument(help="Second image: an aligned face crop.")],
    fmr: Annotated[
        float | None,
        typer.Option(
            help="False match rate whose threshold decides, one of those that `facetrain calibrate` stored. The "
            "default is the lowest; a model without thresholds gives no decision."
        ),
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Print the cosine similarity of two faces, and with a calibrated MODEL whether they are one person."""
    from facetrain.verify.calibration import pick_threshold, stored_thresholds
    from facetrain.verify.image_embeddings import embed_image_files

    embedding, metadata = embed_image_files(model, [first, second], device=device)
    threshold = pick_threshold(stored_thresholds(metadata, model), fmr, model)
    cosine = float(embedding[0] @ embedding[1])
    same = threshold and cosine >= threshold.cosine
    if as_json:
        decision = {"same": same, "threshold": threshold.as_json()} if threshold else {}
        typer.echo(json.dumps({"cosine": cosine} | decision))
        return
    line = f"cosine similarity {cosine:.4f}"
    if threshold:
        verdict = "same person" if same else "different people"
        line += (
            f": {verdict} at FMR {threshold.fmr:g} (threshold {threshold.cosine:.4f}, from {threshold.data})"
        )
    echo_line(line)


def _only_system(
    model: Path | None, scores: Path | None, embeddings: Path | None, pairs: Path | None, targets: list[str]
) -> Path:
    """Return the one of MODEL, --scores and --embeddings that is given, after a check of the options with it."""
    from facetrain.errors import UsageError

    given = [one for one in (model, scores, embeddings) if one is not None]
    if len(given) != 1:
        raise UsageError("give one of MODEL, --scores and --embeddings: the system to evaluate")
    if model is not None and not targets:
        raise UsageError(f"{model}: give the evaluation set with --target")
    if model is None and targets:
        raise UsageError(
            f"{given[0]}: --target {targets[0]} needs a MODEL; to compare one with these scores: facetrain eval MODEL "
            f"--target {targets[0]} --against {given[0]}"
        )
    if (embeddings is None) != (pairs is None):
        raise UsageError(
            "--embeddings and --pairs are used together: a file of embeddings and the list of its pairs"
        )
    return given[0]


def _report_details(sets: Iterable[str], data_dir: Path | None, against: Path | None) -> dict[str, str]:
    """Return date, versions, sets and command of an evaluation, for its report."""
    import platform
    import shlex
    import sys
    from datetime import datetime
    from importlib.metadata import version

    import torch

    return {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "versions": ", ".join(
            f"{name} {number}"
            for name, number in (
                ("facetrain", version("facetrain")),
                ("torch", torch.version.__version__),
                ("Python", platform.python_version()),
            )
        ),
        "sets": ", ".join(sets) + (f" in {data_dir}" if data_dir else ""),
        **({"compared with": str(against)} if against else {}),
        "command": shlex.join(["facetrain", *sys.argv[1:]]),
    }


def _find_checkpoint(model: Path, checkpoint: str | None) -> Path:
    """Return the folder of a checkpoint of a run; the model itself without `--checkpoint`."""
    if checkpoint is None:
        return model
    from facetrain.checkpoint.load import Checkpoint

    return Checkpoint.open(model, parse_checkpoint(checkpoint)).folder


def _slice_tables(slices: list[str], targets: list[str]) -> dict[str, Path]:
    """Parse the values of --slices: return the paths of the tables by the name of the set."""
    from facetrain.errors import UsageError

    tables = {}
    for value in slices:
        name, equals, path = value.partition("=")
        if not equals and len(targets) > 1:
            raise UsageError(f"--slices {value}: there are {len(targets)} sets; write --slices SET={value}")
        tables[name if equals else Path(targets[0]).stem] = Path(path if equals else value)
    return tables
