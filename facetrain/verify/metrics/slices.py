"""Error rates by slice: by age gap, pose, sex, skin tone or any other column of a table, at one threshold."""

# P pairs   V values of a column   R draws of subjects

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

import numpy as np

from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.cross_groups import cross_groups
from facetrain.verify.metrics.discard import discard_curve
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.group_summary import RATES, Group, summarize_groups, without_chance
from facetrain.verify.metrics.pair_blocks import PairBlocks, every_subject_once
from facetrain.verify.metrics.result import Result
from facetrain.verify.metrics.roc import can_measure, threshold_at
from facetrain.verify.metrics.scored_pairs import NEEDS_BOTH_KINDS, ScoredPairs, needed_impostors

_OUTCOMES = 4
"""Outcomes of a pair: impostor rejected, impostor accepted, genuine accepted, genuine rejected."""


def add_slices(
    result: Result,
    pairs: ScoredPairs,
    columns: Mapping[str, np.ndarray],
    qualities: Mapping[str, np.ndarray],
    *,
    sides: Mapping[str, tuple[np.ndarray, np.ndarray]],
    fmr: float | None,
    draws: Draws,
) -> None:
    """Add the error rates of every value of every column, and the error-versus-discard curve of each quality measure.

    All are at one threshold. If the set has too few pairs for it, the result gets the reason instead.

    Args:
        result: metrics of the pairs.
        pairs: scores and labels.
        columns: values of the pairs, str (P,), by column; a pair with an empty one is in no slice.
        qualities: quality of the pairs, float (P,), by the name of the measure.
        sides: groups of the first and of the second images, str (P,) each, by column: for the cross-group matrix.
        fmr: false match rate that defines the threshold; None for the mean threshold of the folds.
        draws: bootstrap draws of subjects; 0 gives no intervals.
    """
    if not columns and not qualities:
        return
    curve = result.curve
    if curve is None or (fmr is not None and not can_measure(curve.impostors, fmr)):
        name = "slices"
        if fmr is not None:  # with all its digits, like tar@1e-04
            name += f"@{np.format_float_scientific(fmr, trim='-', exp_digits=2)}"
        result.metrics[name] = None
        result.needs[name] = (
            NEEDS_BOTH_KINDS if curve is None or fmr is None else needed_impostors(curve, fmr)
        )
        return
    threshold = result.threshold["accuracy"] if fmr is None else threshold_at(curve, fmr)
    result.threshold["slices"] = threshold
    mixed = {name: set(columns[name][first != second]) for name, (first, second) in sides.items()}
    result.groups, result.group_summaries = slice_groups(pairs, columns, threshold, mixed=mixed, draws=draws)
    for column, groups in sides.items():
        matrix = cross_groups(pairs.score_P, pairs.same_P, groups, threshold, column)
        result.cross_groups += [matrix] if matrix else []
    for name, quality_P in qualities.items():
        discards = discard_curve(pairs.score_P, pairs.same_P, quality_P, threshold, quality=name)
        result.discards += [discards] if discards else []


def slice_groups(
    pairs: ScoredPairs,
    columns: Mapping[str, np.ndarray],
    threshold: float,
    *,
    mixed: Mapping[str, Set[str]] | None = None,
    draws: Draws,
) -> tuple[list[Group], list[Group]]:
    """Return accuracy, FMR and FNMR for every value of every column, at one threshold for all, and their spread.

    FMR is the share of impostor pairs that are accepted, FNMR the share of genuine pairs that are rejected
    (ISO/IEC 19795-1). A rate without pairs is None. One threshold for all groups is what NIST's demographic
    report compares (Grother, Ngan and Hanaoka, NISTIR 8280, 2019): a threshold per group would hide differences.

    `mixed` has the values of each column that stand for images of two groups (`a / b`): no part of the spread.
    """
    groups, summaries = [], []
    for column, value_P in columns.items():
        known_P = value_P != ""
        if not known_P.any():
            continue
        of_two = (mixed or {}).get(column, set())
        of_column, summary = _slice_column(
            pairs.take(known_P), column, value_P[known_P], threshold, draws, of_two
        )
        groups += of_column
        if summary.metrics:
            summaries.append(summary)
    return groups, summaries


def _slice_column(
    pairs: ScoredPairs, column: str, value_P: np.ndarray, threshold: float, draws: Draws, mixed: Set[str]
) -> tuple[list[Group], Group]:
    values, value_index_P = np.unique(value_P, return_inverse=True)
    wrong_P = (pairs.score_P >= threshold) != pairs.same_P
    block_P = value_index_P * _OUTCOMES + 2 * pairs.same_P + wrong_P
    blocks = PairBlocks(block_P, len(values) * _OUTCOMES, *pairs.sides)

    def rates_in(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        return _rates(blocks.counts(drawn_RS))

    # The rates of the set are the rates of the draw that has every subject once: one computation for both.
    everybody = every_subject_once(pairs.subjects)
    rates = rates_in(everybody)
    held = max(len(value_P), len(values) * _OUTCOMES)
    replicate = bootstrap.replicate(rates_in, pairs.subjects, draws, pairs=held)
    counts = blocks.counts(everybody).reshape(len(values), _OUTCOMES)
    groups, fewest = [], []
    for at, value in enumerate(values.tolist()):
        metrics = {name: _none_if_nan(rate[0, at]) for name, rate in rates.items()}
        impostors, genuine = float(counts[at, :2].sum()), float(counts[at, 2:].sum())
        sizes: dict[str, float | None] = {
            "pairs": impostors + genuine,
            "genuine": genuine,
            "impostors": impostors,
        }
        members = np.flatnonzero(value_index_P == at)
        is_genuine = pairs.same_P[members]
        # A rate of one kind of pairs rests on the subjects that have such a pair.
        of_kind = {"fmr": members[~is_genuine], "fnmr": members[is_genuine]}
        subjects = {name: pairs.count_subjects(of_kind.get(name, members)) for name in rates}
        fewest.append(min(subjects.values()))
        drawn = {name: rate[:, at] for name, rate in replicate.items()}
        groups.append(Group(column, str(value), metrics | sizes, _intervals(metrics, drawn, subjects, RATES)))
    alone_V = np.array([value not in mixed for value in values.tolist()])
    rates, replicate = (
        {name: rate[:, alone_V] for name, rate in part.items()} for part in (rates, replicate)
    )
    return groups, _summary(column, rates, replicate, np.array(fewest)[alone_V])


def _summary(
    column: str, rates: dict[str, np.ndarray], replicate: dict[str, np.ndarray], subjects_V: np.ndarray
) -> Group:
    """Summarize the groups of a column that have genuine and impostor pairs; without two such, return no metrics.

    `subjects_V`, int (V,), has the fewest subjects of a rate of each group: the smallest group limits what is known.
    """
    complete_V = np.isfinite(rates["fmr"][0]) & np.isfinite(rates["fnmr"][0])
    if complete_V.sum() < 2:
        return Group(column, None, {}, {})
    rates, replicate = (
        {name: rate[:, complete_V] for name, rate in part.items()} for part in (rates, replicate)
    )
    metrics = {name: _none_if_nan(value[0]) for name, value in summarize_groups(rates).items()}
    drawn = {name: without_chance(rate, rates[name][0]) for name, rate in replicate.items()}
    measures = summarize_groups(drawn) if drawn else {}
    # The others are ratios, deviations and coefficients.
    subjects = dict.fromkeys(metrics, int(subjects_V[complete_V].min()))
    intervals = _intervals(metrics, measures, subjects, ("accuracy_mean",))
    return Group(column, None, metrics, intervals)


def _intervals(
    metrics: Mapping[str, float | None],
    drawn: Mapping[str, np.ndarray],
    subjects: Mapping[str, int],
    shares: Collection[str],
) -> dict[str, tuple[float, float]]:
    """Return the interval of each metric that has one, from its values in the draws, (R,) each; `shares` are rates."""
    return {
        name: interval
        for name, value_R in drawn.items()
        if (value := metrics[name]) is not None
        and (interval := bootstrap.interval(value_R, subjects[name], value, is_share=name in shares))
        is not None
    }


def _rates(count_RB: np.ndarray) -> dict[str, np.ndarray]:
    """Return each rate of each value from the counts of the outcomes: (R, V), NaN without pairs."""
    true_rejects, false_accepts, true_accepts, false_rejects = np.moveaxis(
        count_RB.reshape(len(count_RB), -1, _OUTCOMES), 2, 0
    )
    impostors, genuine = true_rejects + false_accepts, true_accepts + false_rejects
    return {
        "accuracy": bootstrap.share(true_rejects + true_accepts, impostors + genuine),
        "fmr": bootstrap.share(false_accepts, impostors),
        "fnmr": bootstrap.share(false_rejects, genuine),
    }


def _none_if_nan(rate: float) -> float | None:
    return None if np.isnan(rate) else float(rate)
