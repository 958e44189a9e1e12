"""Verdict on a fine-tuned model: it replaces the first model only if it gains and other people do not suffer.

Other people choose the share of the fine-tuned weights; the held-out photos then judge the gain of this one model. So
no pair that judges the gain has chosen anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError, RunError
from facetrain.files import os_errors_as
from facetrain.finetune.other_people import Harm, OtherPeople, accuracy_of
from facetrain.finetune.prepare import Prepared
from facetrain.finetune.workplace import Bar
from facetrain.models.average_models import average_models
from facetrain.models.embedding_model import open_model
from facetrain.models.model_file import THRESHOLDS_KEY, save_model
from facetrain.text import percent
from facetrain.verify.calibrate_model import calibrate_model
from facetrain.verify.calibration import Threshold
from facetrain.verify.evaluate import evaluate
from facetrain.verify.model_comparison import Difference
from facetrain.verify.model_results import ModelResults

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of the fine-tuned weights in the averages that are tried; the rest is the first model's (WiSE-FT). The largest
is tried first: gain and loss both grow with the share, see docs/log/log.md."""


@dataclass(frozen=True)
class Verdict:
    """Decision whether the fine-tuned weights are kept, with its reasons."""

    share: float
    """Share of the fine-tuned weights in the model that is kept; 0 if the first model is kept."""
    tried: dict[float, Harm]
    """What each share that was tried changes for other people."""
    gain: Difference | None
    """AUC on the held-out photos against the first model's; None if other people suffer from every share."""
    judged: ModelResults | None
    """Results of the last share that was tried on the held-out photos, beside the first model's."""
    thresholds: list[Threshold]
    refused: str
    """Reason why there are no thresholds; empty if there are."""

    @property
    def reason(self) -> str:
        """Why the model that is kept is kept, in one sentence."""
        if self.gain is None:
            return "other people suffer from every share of the fine-tuned weights"
        low, high = self.gain.interval
        gained = (
            f"AUC on held-out photos {self.gain.second:.4f} → {self.gain.first:.4f}, difference "
            f"{self.gain.first - self.gain.second:+z.4f} [{low:+z.4f}, {high:+z.4f}]"
        )
        if self.share == 0:
            return f"no gain is certain: {gained}"
        return f"{gained}; other people do not suffer"


def judge(prepared: Prepared, *, say: Callable[[str], None], bar: Bar) -> Verdict:
    """Compare the fine-tuned model with the first one, and write the better one with its thresholds.

    Raises:
        ModelError: a model cannot be opened, or an embedding is not finite.
        RunError: a file cannot be written.
    """
    place, inference = prepared.place, Inference(prepared.config.train.device)
    with bar("other people"):
        others = OtherPeople(prepared.model, [str(place.set_aside_pairs), *prepared.targets], inference)
        share, tried = _largest_harmless_share(prepared, others, say)
    gain = judged = None
    if share:
        with bar("held-out photos") as progress:
            judged = evaluate(
                place.candidate, [str(place.pairs)], Path(), against=prepared.model,
                inference=inference, progress=progress,
            )  # fmt: skip
        # Not the accuracy: it rests on thresholds of ten folds, and in a hundred pairs shows no gain below 20 points.
        gain = judged.differences[place.pairs.stem]["auc"]
        share = share if gain.interval[0] > 0 else 0.0
    if share == 0:
        write_average(prepared, 0.0)
    try:
        _, thresholds = calibrate_model(place.candidate, str(place.held_out), Path(), inference=inference)
        refused = ""
    except DataError as error:
        # Too few pairs of different people, or the first model has seen the photos; the advice is for another command.
        thresholds, refused = [], str(error).partition(";")[0]
    with os_errors_as(RunError, place.model):
        os.replace(place.candidate, place.model)
    return Verdict(share, tried, gain, judged, thresholds, refused)


def _largest_harmless_share(
    prepared: Prepared, others: OtherPeople, say: Callable[[str], None]
) -> tuple[float, dict[float, Harm]]:
    """Return the largest share of `SHARES` from which no other people suffer, 0 for none, and what was measured.

    The candidate has this share.
    """
    tried = {}
    for share in SHARES:
        write_average(prepared, share)
        tried[share] = others.harm_of(prepared.place.candidate)
        reasons = list(tried[share].reasons())
        if not reasons:
            return share, tried
        say(f"{share:.0%} of the fine-tuned weights: {'; '.join(reasons)}")
    return 0.0, tried


def write_average(prepared: Prepared, share: float) -> None:
    """Write the candidate with a share of the fine-tuned weights; the rest are the first model's.

    Raises:
        ModelError: a model cannot be opened.
        RunError: the file cannot be written.
    """
    if share == 0:  # the first model as it is, with its own description; its thresholds are measured again
        opened = open_model(prepared.model, torch.device("cpu"))
        description = {key: value for key, value in opened.metadata.items() if key != THRESHOLDS_KEY}
        save_model(prepared.place.candidate, opened.network.state_dict(), description)
        return
    average_models([prepared.place.run, prepared.model], [share, 1 - share], prepared.place.candidate)


def headline(verdict: Verdict) -> str:
    """Return which model is kept."""
    if verdict.share == 0:
        return "kept: the first model"
    if verdict.share == 1:
        return "kept: the fine-tuned model"
    return (
        f"kept: the fine-tuned model, averaged with the first one ({verdict.share:.0%} fine-tuned, "
        f"{1 - verdict.share:.0%} first)"
    )


def describe(verdict: Verdict) -> list[str]:
    """Return which model is kept, and why, as lines for the user."""
    lines = [headline(verdict), f"  {verdict.reason}"]
    for share, harm in verdict.tried.items():
        accuracies = ", ".join(
            f"{name} {percent(accuracy_of(harm.before[name]))} → {percent(accuracy_of(result))}"
            for name, result in harm.after.items()
        )
        lines.append(
            f"  {share:.0%} of the fine-tuned weights: embeddings of strangers keep a cosine of {harm.cosine:.3f}, "
            f"accuracy {accuracies}"
        )
    return [*lines, *(f"  {line}" for line in describe_thresholds(verdict))]


def describe_thresholds(verdict: Verdict) -> list[str]:
    """Return the thresholds of the model that is kept, or why there are none, as lines for the user."""
    if verdict.refused:
        return [f"no thresholds: {verdict.refused}"]
    return [
        f"threshold {each.cosine:z.4f} for a false match rate of {each.fmr:g}" for each in verdict.thresholds
    ]
