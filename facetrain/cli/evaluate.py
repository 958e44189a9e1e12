"""Command `facetrain eval`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.model_or_scores import ModelOrScores
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import InferenceOptions, ProtocolOptions
from facetrain.cli.outputs import (
    echo_line,
    require_distinct,
    require_existing,
    require_no_input,
    require_writable,
    write_text,
)
from facetrain.remote.address import without_secrets

if TYPE_CHECKING:
    from facetrain.verify.model_results import ModelResults


@dataclass(frozen=True)
class ResultOptions:
    """Files for the results."""

    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Also write all metrics to this JSON file; - prints the JSON only."
        ),
    ] = None
    csv_file: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE", help="Also write the metrics to this CSV table, a row for each."
        ),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for an HTML report with figures and metrics."),
    ] = None

    @property
    def only_json(self) -> bool:
        """Whether JSON is printed, and nothing else."""
        return str(self.json_file) == "-"

    def check(self) -> None:
        """Check all outputs before the evaluation, which may take hours."""
        require_writable(None if self.only_json else self.json_file, self.csv_file)
        if self.report is not None:
            from facetrain.verify.output.report import report_files, require_report

            require_distinct(self.json_file, self.csv_file, self.report, *report_files(self.report))
            require_report(self.report)


@option_groups
def evaluate(
    system: ModelOrScores,
    options: ProtocolOptions,
    results: ResultOptions,
    inference: InferenceOptions,
) -> None:
    """Verify a model, or the scores of another system.

    The ROC curves are exact; the intervals come from a bootstrap over subjects.
    """
    system = system.completed(err=results.only_json)
    system.check(options, inference)
    results.check()
    inputs = (system.given, system.gallery_model, system.against, system.slices, *map(Path, system.targets))
    require_no_input(inputs, results.json_file, results.csv_file)
    against = system.against if system.model else None
    require_existing(system.model, system.gallery_model, against, system.slices)
    evaluation = _evaluate(system, options, inference)
    if not evaluation.is_leader:
        return
    # The report comes last: if it fails, the results of a long evaluation are printed and stored before.
    models = {"model": str(system.given)}
    if system.gallery_model:
        models["gallery_model"] = str(system.gallery_model)
    _print_results(evaluation, models, results)
    if results.report is not None:
        page = _write_report(evaluation, system, results.report)
        if not results.only_json:
            echo_line(f"report: {page}")


def _evaluate(system: ModelOrScores, options: ProtocolOptions, inference: InferenceOptions) -> ModelResults:
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.config.paths import eval_dir_of_run
    from facetrain.verify.evaluate import evaluate as evaluate_model
    from facetrain.verify.evaluate import evaluate_scores

    if system.model is None:
        return evaluate_scores(system.given, against=system.against, options=options)
    with progress_bar("embedding") as progress:
        return evaluate_model(
            system.given,
            system.targets,
            system.data_dir or eval_dir_of_run(system.model),
            gallery_model=system.gallery_model,
            against=system.against,
            slices=system.slices,
            options=options,
            inference=inference,
            progress=progress,
        )


def _print_results(evaluation: ModelResults, models: dict[str, str], results: ResultOptions) -> None:
    """Print the results, and write the JSON and the CSV file.

    `models` has the paths of the models by their keys in the JSON.
    """
    from facetrain.verify.output.formatting import format_evaluation
    from facetrain.verify.output.metrics_csv import metrics_csv

    if results.csv_file is not None:
        write_text(results.csv_file, metrics_csv(evaluation))
    content = json.dumps(models | evaluation.as_json(), indent=1)
    # Before anything is printed: a reader of the output may end before it.
    if results.json_file is not None and not results.only_json:
        write_text(results.json_file, content + "\n")
    if results.only_json:
        typer.echo(content)
        return
    network = f"{models['model']}: {evaluation.description}, in {evaluation.precision}"
    echo_line(network if evaluation.precision else evaluation.description)
    for line in format_evaluation(evaluation):
        echo_line(line)


def _write_report(evaluation: ModelResults, system: ModelOrScores, folder: Path) -> Path:
    """Write the report, with date, versions, sets, digests of their files, and command of the evaluation."""
    import platform
    import shlex
    import sys
    from datetime import datetime

    import torch

    from facetrain import __version__
    from facetrain.files import sha256_of
    from facetrain.verify.output.report import write_report
    from facetrain.verify.sets.pair_set import PairSet

    of_pairs = (target.path for target in evaluation.sets.values() if isinstance(target, PairSet))
    files = of_pairs if system.model else (system.given,)
    models = {"gallery model": system.gallery_model, "compared with": system.against}
    digests = {path.name: sha256_of(path) for path in files if path is not None and path.is_file()}
    details = {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "versions": f"facetrain {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "sets": ", ".join(evaluation.sets) + (f" in {system.data_dir}" if system.data_dir else ""),
        "digests": ", ".join(f"{name} sha256:{digest}" for name, digest in digests.items())
        or "none: folders",
        **{role: str(path) for role, path in models.items() if path is not None},
        "command": shlex.join(["facetrain", *map(without_secrets, sys.argv[1:])]),
    }
    other = str(system.against or "")
    return write_report(folder, evaluation, model=str(system.given), other=other, details=details)
