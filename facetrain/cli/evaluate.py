"""Command `facetrain eval`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from facetrain.cli.checkpoints import CheckpointOption
from facetrain.cli.devices import Device
from facetrain.cli.evaluated_system import EvaluatedSystem, parse_slice_tables, pick_system
from facetrain.cli.evaluation_options import (
    Against,
    BatchSize,
    Bf16,
    BootstrapDraws,
    DataDir,
    DetectorScore,
    Embeddings,
    Flip,
    JsonFile,
    OptionalModel,
    Pairs,
    ReportDir,
    Scores,
    Seed,
    SliceFmr,
    Slices,
    Targets,
)
from facetrain.cli.outputs import echo_line, require_distinct, require_no_input, require_writable, write_text
from facetrain.cli.unused_options import refuse_given
from facetrain.errors import UsageError
from facetrain.verify.output.formatting import format_evaluation

if TYPE_CHECKING:
    from facetrain.verify.evaluate import Evaluation

_OPTIONS_OF_MODELS = ("data_dir", "flip", "detector_score", "device", "batch_size", "bf16")


def evaluate(
    context: typer.Context,
    model: OptionalModel = None,
    target: Targets = None,
    scores: Scores = None,
    embeddings: Embeddings = None,
    pairs: Pairs = None,
    data_dir: DataDir = None,
    checkpoint: CheckpointOption = None,
    against: Against = None,
    slices: Slices = None,
    slice_fmr: SliceFmr = None,
    bootstrap: BootstrapDraws = 1000,
    seed: Seed = 0,
    flip: Flip = True,
    detector_score: DetectorScore = True,
    json_file: JsonFile = None,
    report: ReportDir = None,
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
    from facetrain.verify.sets.pair_columns import score_file_and_column

    targets = target or []
    system = pick_system(model, scores, embeddings, pairs, targets, checkpoint, slices or [])
    if system.run is None:
        refuse_given(context, *_OPTIONS_OF_MODELS, when=f"on {system.path}, which is not a MODEL")
    if against is not None and not bootstrap:
        raise UsageError(
            f"--against {against}: the difference is tested on bootstrap draws; remove --bootstrap 0"
        )
    _check_outputs(json_file, report)
    tables = parse_slice_tables(slices or [], targets)
    system_file = system.path if system.run else score_file_and_column(system.path)[0]
    require_no_input((system_file, pairs, against, *tables.values(), *map(Path, targets)), json_file)
    options = Options(bootstrap, seed, flip, detector_score, slice_fmr=slice_fmr)
    if system.run is None:
        evaluation = evaluate_scores(system.path, pair_list=pairs, against=against, options=options)
    else:
        with progress_bar("embedding") as progress:
            evaluation = evaluate_model(
                system.path,
                targets,
                data_dir or eval_dir_of_run(system.run),
                against=against,
                tables=tables,
                options=options,
                device=device,
                batch_size=batch_size,
                bf16=bf16,
                progress=progress,
            )
    if not evaluation.is_leader:
        return
    # The report comes last: if it fails, the results of a long evaluation are printed and stored before.
    _give_results(evaluation, system, json_file)
    if report is not None:
        from facetrain.verify.output.report import write_report
        from facetrain.verify.sets.pair_set import PairSet

        if system.run is None:
            files = [system_file, pairs]
        else:
            files = [one.path for one in evaluation.sets.values() if isinstance(one, PairSet)]
        details = _report_details(evaluation.sets, files, data_dir, against)
        page = write_report(report, evaluation, model=str(system.path), details=details)
        if not _is_standard_output(json_file):
            echo_line(f"report: {page}")


def _give_results(evaluation: Evaluation, system: EvaluatedSystem, json_file: Path | None) -> None:
    """Print the results, and write the JSON file."""
    content = json.dumps({"model": str(system.path)} | evaluation.as_json(), indent=1)
    if _is_standard_output(json_file):
        typer.echo(content)
        return
    network = f"{system.path}: {evaluation.description}, in {evaluation.precision}"
    echo_line(evaluation.description if system.run is None else network)
    for line in format_evaluation(evaluation):
        echo_line(line)
    if json_file is not None:
        write_text(json_file, content + "\n")


def _check_outputs(json_file: Path | None, report: Path | None) -> None:
    """Check all outputs before the evaluation, which may take hours."""
    require_writable(None if _is_standard_output(json_file) else json_file)
    if report is not None:
        from facetrain.verify.output.report import report_files, require_report

        require_distinct(json_file, report, *report_files(report))
        require_report(report)


def _is_standard_output(json_file: Path | None) -> bool:
    return str(json_file) == "-"


def _report_details(
    sets: Iterable[str], files: Iterable[Path | None], data_dir: Path | None, against: Path | None
) -> dict[str, str]:
    """Return date, versions, sets, digests of their files, and command of an evaluation, for its report."""
    import hashlib
    import platform
    import shlex
    import sys
    from datetime import datetime
    from importlib.metadata import version

    import torch

    digests = {}
    for path in files:
        if path is None or not path.is_file():
            continue
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
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
        "digests": ", ".join(f"{name} sha256:{digest}" for name, digest in digests.items())
        or "none: folders",
        **({"compared with": str(against)} if against else {}),
        "command": shlex.join(["facetrain", *sys.argv[1:]]),
    }
