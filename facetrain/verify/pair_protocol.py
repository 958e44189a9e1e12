"""Verification protocol of a set of image pairs: LFW, CFP-FP, AgeDB-30 and other `.bin` sets."""

# P pairs   N images, two per pair   D embedding   S subjects   R draws of subjects

from __future__ import annotations

import numpy as np

from facetrain.embeddings.normalization import are_normalized, embedding_lengths
from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.curve_metrics import CURVE_METRICS
from facetrain.verify.metrics.draws import DRAWS, Draws
from facetrain.verify.metrics.fold_accuracy import squared_distances
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.roc import can_measure
from facetrain.verify.metrics.scored_pairs import (
    ScoredPairs,
    add_fold_accuracy,
    add_replicates,
    bootstrap_fold_accuracy,
    pair_result,
)
from facetrain.verify.metrics.slices import add_slices
from facetrain.verify.sets.pair_set import PairSet, known_or_inferred_subjects
from facetrain.verify.sets.slice_table import NO_SLICES, SliceTable


def verification_result(
    plain_ND: np.ndarray,
    mirrored_ND: np.ndarray,
    pairs: PairSet,
    *,
    table: SliceTable = NO_SLICES,
    slice_fmr: float | None = None,
    draws: Draws = DRAWS,
) -> Result:
    """Return the metrics of a set of pairs.

    The quality measure of the error-versus-discard curve is the length of the embedding, see `embedding_lengths`. A
    network that normalizes its embeddings has none.

    The embedding of an image is the sum of the embeddings of the image and of its mirror image, as in
    InsightFace's `verification.py`. `accuracy_no_flip` uses the image only. `xnorm` is InsightFace's XNorm:
    the mean length of the embeddings of images and mirror images before L2 normalization.

    Args:
        plain_ND: embeddings of the images, float (N, D), not normalized; images 2i and 2i+1 are pair i.
        mirrored_ND: embeddings of the mirror images.
        pairs: labels and, if known, subjects of the pairs. The images are read only to infer the subjects.
        table: slices and quality of the pairs.
        slice_fmr: FMR of the threshold of slices and error-versus-discard curves; None for the mean threshold of the
            folds.
        draws: bootstrap draws of subjects; 0 gives no intervals.
    """
    subject_N = known_or_inferred_subjects(pairs)
    sum_ND = plain_ND + mirrored_ND
    scored = score_pairs(sum_ND, pairs.same, subject_N)
    result = pair_result(scored, protocol="verification", draws=draws)
    add_fold_accuracy(result, scored, draws=draws)
    if result.folds is not None:
        _add_accuracy_without_mirror_images(result, score_pairs(plain_ND, pairs.same, subject_N), draws)
    norm_N = (embedding_lengths(plain_ND) + embedding_lengths(mirrored_ND)) / 2
    result.metrics["xnorm"] = float(norm_N.mean())
    sum_S, count_S = np.bincount(subject_N, weights=norm_N), np.bincount(subject_N)
    mean = bootstrap.replicate(
        lambda drawn_RS: {"xnorm": (drawn_RS @ sum_S) / (drawn_RS @ count_S)},
        scored.subjects,
        draws,
        pairs=len(pairs.same),
    )
    add_replicates(result, mean)
    length_P = None
    if not are_normalized(plain_ND):
        length_P = embedding_lengths(sum_ND).reshape(-1, 2).min(1)
    add_slices_of_table(result, scored, table, length_P, fmr=slice_fmr, draws=draws)
    return result


def add_slices_of_table(
    result: Result,
    scored: ScoredPairs,
    table: SliceTable,
    length_P: np.ndarray | None = None,
    *,
    fmr: float | None,
    draws: Draws,
) -> None:
    """Do `add_slices` for a table, with the lengths of the embeddings, float (P,), as a second quality measure."""
    measures = {"embedding length": length_P, "quality": table.quality}
    qualities = {name: quality_P for name, quality_P in measures.items() if quality_P is not None}
    add_slices(result, scored, table.columns, qualities, sides=table.sides, fmr=fmr, draws=draws)


def rising_metrics(same_P: np.ndarray) -> list[str]:
    """Return the metrics that `verification_result` measures for pairs with these labels, and that rise with the model.

    A better model has a larger value of them.
    """
    impostors = int((~same_P).sum())
    if not 0 < impostors < len(same_P):
        return []
    curve = [each.name for each in CURVE_METRICS if each.rises and can_measure(impostors, each.far)]
    return ["accuracy", "accuracy_no_flip", *curve]


def _add_accuracy_without_mirror_images(result: Result, scored: ScoredPairs, draws: Draws) -> None:
    folds, replicate = bootstrap_fold_accuracy(scored.in_fold_order(), draws=draws)
    result.metrics["accuracy_no_flip"] = folds.mean
    # Without draws there are no replicates to store.
    if draws.number:
        add_replicates(result, {"accuracy_no_flip": replicate["accuracy"]})


def score_pairs(embedding_ND: np.ndarray, same_P: np.ndarray, subject_N: np.ndarray) -> ScoredPairs:
    """Return the cosine similarity of rows 2i and 2i+1, computed in float64."""
    # Computed from the squared distance, not from the dot product: the exact ROC and the fold accuracy, which
    # uses the distance, then order all pairs in the same way to the last bit.
    score_P = 1 - squared_distances(embedding_ND) / 2
    pair_P = np.arange(len(same_P))
    return ScoredPairs(score_P, same_P, 2 * pair_P, 2 * pair_P + 1, subject_N)
