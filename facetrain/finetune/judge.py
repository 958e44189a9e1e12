"""Comparison of a model with its fine-tuned version and their averages, of which the best one is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError
from facetrain.finetune.prepare import Bar, Prepared
from facetrain.models.average_models import average_models
from facetrain.verify.calibrate_model import calibrate_model
from facetrain.verify.calibration import Threshold
from facetrain.verify.evaluate import evaluate
from facetrain.verify.metrics.result import Result
from facetrain.verify.model_results import ModelResults

SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the fine-tuned weights in the averages that are compared; the rest is the model's (WiSE-FT). The last
is compared only if there is a set of other people, which shows what it forgets, see docs/log/log.md."""
_FORGOTTEN = 0.002
"""Accuracy that an average may lose on a set of other people."""


@dataclass(frozen=True)
class Verdict:
    """The better model, and what it was compared on."""

    share: float
    """Share of the fine-tuned weights in it; 0 if the first model is kept."""
    accuracy: dict[float, float]
    """Accuracy on the held-out images by share."""
    compared: ModelResults
    """Results of the better model on all sets, and its differences to the first model."""
    thresholds: list[Threshold]
    refused: str
    """Reason why there are no thresholds; empty if there are."""
    is_on_all: bool = False
    """Whether the model was trained again on all photos, see `all_photos`. The results on the held-out images and the
    thresholds are then of the first training."""


def judge(prepared: Prepared, *, say: Callable[[str], None], bar: Bar) -> Verdict:
    """Compare the fine-tuned model with the first one, and write the better one with its thresholds.

    Raises:
        ModelError: a model cannot be opened, or an embedding is not finite.
        RunError: a file cannot be written.
    """
    place, held_out, targets = prepared.place, str(prepared.place.pairs), prepared.targets
    inference = Inference(prepared.config.train.device)

    def evaluate_share(share: float, sets: Iterable[str], title: str) -> ModelResults:
        write_candidate(prepared, place.run, share, place.model)
        with bar(title) as progress:
            return evaluate(place.model, list(sets), Path(), inference=inference, progress=progress)

    results = {
        share: evaluate_share(share, [held_out], f"comparing {share:.0%}")
        for share in (0.0, *_shares(prepared))
    }
    name = place.pairs.stem
    before = evaluate_share(0.0, targets, "other people").results if targets else {}
    for share in order_shares({share: result.results[name] for share, result in results.items()}):
        # Also writes the file of the model that is kept.
        best = evaluate_share(share, [held_out, *targets], "comparing")
        forgotten = forgotten_on(before, best.results)
        if share == 0 or not forgotten:
            break
        say(f"a model with {share:.0%} of the fine-tuned weights is left out: {forgotten}")
    first = results[0.0].results | before
    compared = best.compared_with(str(prepared.model), first)
    accuracy = {share: accuracy_of(result.results[name]) for share, result in results.items()}
    try:
        _, thresholds = calibrate_model(place.model, str(place.held_out), Path(), inference=inference)
        refused = ""
    except DataError as error:  # too few pairs of different people; its advice is for another command
        thresholds, refused = [], str(error).partition(";")[0]
    return Verdict(share, accuracy, compared, thresholds, refused)


def write_candidate(prepared: Prepared, fine_tuned: Path, share: float, output: Path) -> None:
    """Write a model with a share of fine-tuned weights; the rest are the first model's.

    Raises:
        ModelError: a model cannot be opened.
        RunError: the file cannot be written.
    """
    average_models([fine_tuned, prepared.model], [share, 1 - share], output)


def _shares(prepared: Prepared) -> tuple[float, ...]:
    """Return the shares of the fine-tuned weights that are compared."""
    return SHARES if prepared.targets else SHARES[:-1]


def order_shares(result_of: Mapping[float, Result]) -> list[float]:
    """Return the shares that are better than share 0, the first model, on the held-out images, best first; and 0.

    The accuracy counts, then the area under the ROC; of equal ones the smaller share.
    """

    def quality(share: float) -> tuple[float, float]:
        return accuracy_of(result_of[share]), result_of[share].metrics.get("auc") or 0.0

    better = [share for share in sorted(result_of) if quality(share) > quality(0.0)]
    return [*sorted(better, key=quality, reverse=True), 0.0]


def forgotten_on(before: Mapping[str, Result], after: Mapping[str, Result]) -> str:
    """Return on which sets of other people the accuracy falls too much; empty if on none."""
    return ", ".join(
        f"{name} falls from {accuracy_of(result):.2%} to {accuracy_of(after[name]):.2%}"
        for name, result in before.items()
        if accuracy_of(after[name]) < accuracy_of(result) - _FORGOTTEN
    )


def accuracy_of(result: Result) -> float:
    """Return the accuracy of a set of pairs."""
    return result.metrics["accuracy"] or 0.0


def describe(verdict: Verdict, prepared: Prepared) -> list[str]:
    """Return which model is kept, and by how much it is better, as lines for the user."""
    kept = f"the average of {verdict.share:.0%} of the fine-tuned weights and {1 - verdict.share:.0%} of the model's"
    if verdict.share in (0, 1):
        kept = "the fine-tuned model" if verdict.share else "the first model, because no other is better"
    lines = [f"kept: {kept}"]
    if verdict.is_on_all:
        lines.append(
            "  trained again on all photos, also the held-out ones, for as many steps; the accuracy on the held-out "
            "images and the thresholds below are of the first training"
        )
    for name, by_metric in verdict.compared.differences.items():
        chose = verdict.share > 0 and name == prepared.place.pairs.stem
        difference = by_metric["accuracy"]
        low, high = difference.interval
        lines.append(
            f"  {name}: accuracy {difference.first:.2%}, before {difference.second:.2%}; difference "
            f"{difference.first - difference.second:+.2%} [{low:+.2%}, {high:+.2%}]"
            + (", a little optimistic: these images chose the share" if chose else "")
        )
    lines += [
        f"  threshold {each.cosine:.4f} for a false match rate of {each.fmr:g}" for each in verdict.thresholds
    ]
    if verdict.refused:
        lines.append(f"  no thresholds: {verdict.refused}")
    return lines
