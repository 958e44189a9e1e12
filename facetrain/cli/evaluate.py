"""Command `facetrain eval`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.model_or_scores import ModelOrScores
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import InferenceOptions, ProtocolOptions, local_file
from facetrain.cli.outputs import (
    echo_line,
    require_distinct,
    require_existing,
    require_no_input,
    require_writable,
    write_text,
)
from facetrain.embeddings.inference import Inference
from facetrain.errors import UsageError
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


@dataclass(frozen=True)
class OtherModels:
    """Models beside the evaluated one, and scores to compare it with."""

    gallery_model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            parser=local_file,
            help="Model of the enrolled faces: it embeds the galleries, and the second image or template of each pair. "
            "Default: MODEL embeds both.",
        ),
    ] = None
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            parser=local_file,
            help="Second model, or a file of another system's scores: test the difference to it on the same pairs and "
            "bootstrap draws.",
        ),
    ] = None


@option_groups
def evaluate(
    system: ModelOrScores,
    options: ProtocolOptions,
    results: ResultOptions,
    inference: InferenceOptions,
    others: OtherModels,
) -> None:
    """Verify a model, or the scores of another system.

    The ROC curves are exact; the intervals come from a bootstrap over subjects.
    """
    system = system.completed(err=results.only_json)
    system.check()
    _require_options_of_system(system, options, inference, others)
    results.check()
    inputs = (system.given, others.gallery_model, others.against, system.slices, *map(Path, system.targets))
    require_no_input(inputs, results.json_file, results.csv_file)
    against = others.against if system.model else None
    require_existing(system.model, others.gallery_model, against, system.slices)
    evaluation = _evaluate(system, options, inference, others)
    if not evaluation.is_leader:
        return
    # The report comes last: if it fails, the results of a long evaluation are printed and stored before.
    models = {"model": str(system.given)}
    if others.gallery_model:
        models["gallery_model"] = str(others.gallery_model)
    _print_results(evaluation, models, results)
    if results.report is not None:
        page = _write_report(evaluation, system, results.report, others)
        if not results.only_json:
            echo_line(f"report: {page}")


def _require_options_of_system(
    system: ModelOrScores, options: ProtocolOptions, inference: InferenceOptions, others: OtherModels
) -> None:
    """Refuse options that have no effect on what is evaluated.

    Raises:
        UsageError: there are such options.
    """
    if others.against is not None and not options.bootstrap:
        raise UsageError(
            f"--against {others.against}: the difference is tested on bootstrap draws; remove --bootstrap 0"
        )
    usual = Inference()
    of_models = {
        f"--gallery-model {others.gallery_model}": others.gallery_model is not None,
        "--no-flip": not options.flip,
        "--bf16": inference.bf16,
        f"--device {inference.device}": inference.device != usual.device,
        f"--batch-size {inference.batch_size}": inference.batch_size != usual.batch_size,
    }
    for option, is_given in of_models.items():
        if is_given and system.model is None:
            raise UsageError(f"{system.given}: {option} needs a MODEL; scores have no images")


def _evaluate(
    system: ModelOrScores, options: ProtocolOptions, inference: InferenceOptions, others: OtherModels
) -> ModelResults:
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.config.paths import eval_dir_of_run
    from facetrain.verify.evaluate import evaluate as evaluate_model
    from facetrain.verify.evaluate import evaluate_scores

    if system.model is None:
        return evaluate_scores(system.given, against=others.against, options=options)
    with progress_bar("embedding") as progress:
        return evaluate_model(
            system.given,
            system.targets,
            system.data_dir or eval_dir_of_run(system.model),
            gallery_model=others.gallery_model,
            against=others.against,
            slices=system.slices,
            options=options,
            inference=inference,
            progress=progress,
        )


def _write_report(evaluation: ModelResults, system: ModelOrScores, folder: Path, others: OtherModels) -> Path:
    from facetrain.verify.output.report import write_report
    from facetrain.verify.sets.pair_set import PairSet

    files = [target.path for target in evaluation.sets.values() if isinstance(target, PairSet)]
    if system.model is None:
        files = [system.given]
    details = _report_details(evaluation.sets, files, system.data_dir, others)
    other = str(others.against or "")
    return write_report(folder, evaluation, model=str(system.given), other=other, details=details)


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


def _report_details(
    sets: Iterable[str], files: Iterable[Path | None], data_dir: Path | None, others: OtherModels
) -> dict[str, str]:
    """Return date, versions, sets, digests of their files, and command of an evaluation, for its report."""
    import platform
    import shlex
    import sys
    from datetime import datetime

    import torch

    from facetrain import __version__
    from facetrain.files import sha256_of

    models = {"gallery model": others.gallery_model, "compared with": others.against}
    digests = {path.name: sha256_of(path) for path in files if path is not None and path.is_file()}
    return {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "versions": f"facetrain {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "sets": ", ".join(sets) + (f" in {data_dir}" if data_dir else ""),
        "digests": ", ".join(f"{name} sha256:{digest}" for name, digest in digests.items())
        or "none: folders",
        **{role: str(path) for role, path in models.items() if path is not None},
        "command": shlex.join(["facetrain", *map(without_secrets, sys.argv[1:])]),
    }
