"""Calibration: cosine thresholds of a model for chosen false match rates, measured on known people.

All images of different people in a dataset are compared with each other. A published list of 3,000 impostor pairs
measures an FMR of 1e-3; its 7,000 images compared with each other give 24 million pairs, which measure 1e-6.
"""

# N images   D embedding   S subjects   P pairs of one kind   R draws of subjects

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from facetrain.distinct import dense_ids
from facetrain.errors import DataError, ModelError, UsageError
from facetrain.models.model_file import THRESHOLDS_KEY
from facetrain.text import count_text
from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.draws import DRAWS, Draws
from facetrain.verify.metrics.result import Interval
from facetrain.verify.metrics.roc import FMRS, ROUNDING, can_measure, least_impostors

MAX_IMAGES = 8_000
"""Most images that are compared with each other; the people of a larger dataset are sampled.

Their 32 million pairs have 30 false matches at an FMR of 1e-6, as `roc.RULE_OF_30` asks for, and need 750 MB."""
_DRAWN_FMR, _LEAST_DRAWN = 10, 20_000
"""In a draw of subjects, the threshold is searched up to this multiple of the false match rate, or so many pairs."""
_MOST_DRAWN = 200_000
"""Most pairs that are counted in each draw: the error of a rate is about 1 % with so many."""
_MOST_REJECTED = 0.5
"""A threshold with a false non-match rate of at least this is used by default only if there is no other."""


@dataclass(frozen=True)
class Threshold:
    """Cosine from which two faces count as one person, and its measured error rates."""

    fmr: float
    """Promised false match rate: at most this share of the measured impostor pairs reaches the cosine."""
    cosine: float
    fmr_interval: Interval
    """95 % interval of the false match rate at the cosine, for other people."""
    fnmr: float | None
    """Share of genuine pairs below the cosine; None without genuine pairs."""
    fnmr_interval: Interval | None
    data: str
    """Name of the data that the threshold was measured on."""
    impostors: int
    """Number of impostor pairs of the measurement."""
    subjects: int
    false_accepts: int | None = None
    """Number of these impostor pairs that reach the cosine; None in a file without it."""
    flip: Literal[True] = True
    """It holds for sums of the embeddings of an image and of its mirror image, for programs that read the file: a plain
    embedding has a higher false non-match rate at the same cosine."""

    @property
    def rejects_most(self) -> bool:
        """Whether it rejects at least half of the genuine pairs: two images of a person mostly count as two people."""
        return self.fnmr is not None and self.fnmr >= _MOST_REJECTED


def calibrate(
    unit_ND: np.ndarray,
    labels: Sequence[Any] | np.ndarray,
    fmrs: Sequence[float],
    *,
    data: str,
    draws: Draws = DRAWS,
) -> list[Threshold]:
    """Return the threshold of each false match rate, from all pairs of the images of known people.

    The threshold is the lowest cosine that at most a share `fmr` of the impostor pairs reaches. Intervals are
    from a bootstrap over subjects, see `bootstrap`.

    Args:
        unit_ND: embeddings of length 1, float32 (N, D), of different images.
        labels: person of each image, (N,).
        fmrs: false match rates between 0 and 1.
        data: name of the data, stored with each threshold.
        draws: bootstrap draws of subjects, at least 1.

    Raises:
        DataError: the data has fewer than `bootstrap.LEAST_SUBJECTS` people, or too few impostor pairs for one of the
            rates.
    """
    require_enough_people(labels, fmrs, data)
    subject_N = dense_ids(list(labels))
    image_S = np.bincount(subject_N)
    impostors = int(_pairs_between(image_S))
    score_NN = unit_ND @ unit_ND.T
    # The upper triangle has each pair once.
    is_pair_NN, same_NN = np.triu(np.ones(score_NN.shape, bool), 1), subject_N[:, None] == subject_N
    genuine_NN, impostor_NN = is_pair_NN & same_NN, is_pair_NN & ~same_NN
    person_P = subject_N[np.nonzero(genuine_NN)[0]]
    highest_P = np.sort(score_NN[impostor_NN])[::-1]
    thresholds = []
    for fmr in fmrs:
        accepted = int(impostors * fmr * ROUNDING)
        cosine = _lowest_threshold(highest_P, accepted)
        # Fewer than allowed where scores are equal.
        false_accepts = int(np.count_nonzero(highest_P >= cosine))
        # The pairs among which the thresholds of all draws are, in descending order of their scores. Some are taken
        # before they are sorted: at a high rate there are tens of millions. They are drawn at random: evenly spaced
        # ones can all be of few people, if the order of the images repeats.
        lowest = highest_P[min(max(_DRAWN_FMR * accepted, _LEAST_DRAWN), impostors) - 1]
        near_P = np.flatnonzero(impostor_NN & (score_NN >= lowest))
        pairs = len(near_P)
        if pairs > _MOST_DRAWN:
            near_P = np.random.default_rng(draws.seed).choice(
                near_P, _MOST_DRAWN, replace=False, shuffle=False
            )
        near_P = near_P[np.argsort(-score_NN.ravel()[near_P], kind="stable")]
        first_P, second_P = np.divmod(near_P, len(subject_N))
        near = score_NN[first_P, second_P], subject_N[first_P], subject_N[second_P]
        fnmr, fnmr_interval = _fnmr(score_NN[genuine_NN] < cosine, person_P, len(image_S), draws)
        thresholds.append(
            Threshold(
                fmr=fmr,
                cosine=cosine,
                fmr_interval=_fmr_interval(*near, pairs, fmr, false_accepts, image_S, draws),
                fnmr=fnmr,
                fnmr_interval=fnmr_interval,
                data=data,
                impostors=impostors,
                subjects=len(image_S),
                false_accepts=false_accepts,
            )
        )
    return thresholds


def require_enough_people(labels: Sequence[Any] | np.ndarray, fmrs: Sequence[float], data: str) -> None:
    """Check that images of these people, (N,), can show the threshold of each rate, before they are embedded.

    Raises:
        DataError: as `calibrate`.
    """
    image_S = np.bincount(dense_ids(list(labels)))
    if len(image_S) < bootstrap.LEAST_SUBJECTS:
        raise DataError(
            f"{data}: {count_text(len(image_S), 'person', 'people')}: a threshold for other people needs at least "
            f"{bootstrap.LEAST_SUBJECTS}; use a larger set"
        )
    impostors = int(_pairs_between(image_S))
    for fmr in fmrs:
        if not can_measure(impostors, fmr):
            raise DataError(
                f"{data}: an FMR of {fmr:g} needs {least_impostors(fmr):,} impostor pairs; {len(labels):,} images of "
                f"{len(image_S):,} people have {impostors:,}; use a larger set, or a higher --fmr"
            )


def reachable_fmrs(labels: Sequence[Any] | np.ndarray) -> list[float]:
    """Return the rates of `FMRS` that have at least one impostor pair among images of these people, (N,)."""
    impostors = int(_pairs_between(np.bincount(dense_ids(list(labels)))))
    return [fmr for fmr in FMRS if can_measure(impostors, fmr)]


def sampled_images(labels: np.ndarray, *, seed: int = 0, limit: int = MAX_IMAGES) -> np.ndarray:
    """Return the images to compare, int ascending: all, or the images of randomly drawn people up to about `limit`.

    People who would exceed the limit are left out, so that one with very many images does not end the draw.
    """
    if len(labels) <= limit:
        return np.arange(len(labels))
    people, person_N, image_S = np.unique(labels, return_inverse=True, return_counts=True)
    drawn, images, count = [], image_S.tolist(), 0
    for person in np.random.default_rng(seed).permutation(len(people)).tolist():
        if count + images[person] <= limit:
            drawn.append(person)
            count += images[person]
    return np.flatnonzero(np.isin(person_N, drawn))


def stored_thresholds(metadata: Mapping[str, Any], origin: Path) -> list[Threshold]:
    """Return the thresholds in the description of a model file, highest false match rate first.

    Raises:
        ModelError: the description has thresholds of an unknown form.
    """
    try:
        thresholds = TypeAdapter(list[Threshold]).validate_python(metadata.get(THRESHOLDS_KEY, []))
    except ValidationError as error:
        raise ModelError(
            f"{origin}: its thresholds are damaged; measure them again with facetrain calibrate"
        ) from error
    return sorted(thresholds, key=lambda stored: -stored.fmr)


def pick_threshold(thresholds: Sequence[Threshold], fmr: float | None, origin: Path) -> Threshold | None:
    """Return the stored threshold of a false match rate; None if there are no thresholds.

    Without a rate, it is the lowest stored rate whose threshold does not reject most genuine pairs. If there is no such
    rate, it is the highest one.

    Raises:
        UsageError: the model has no threshold for this rate; the message names the stored ones.
    """
    if fmr is None:
        usable = [each for each in thresholds if not each.rejects_most]
        # From the highest rate to the lowest: the last usable one is the strictest.
        return next(reversed(usable or thresholds[:1]), None)
    for threshold in thresholds:
        if math.isclose(threshold.fmr, fmr, rel_tol=1e-6):
            return threshold
    stored = ", ".join(f"{threshold.fmr:g}" for threshold in thresholds) or "none"
    raise UsageError(
        f"{origin}: has no threshold for an FMR of {fmr:g}; stored are {stored}: measure it with facetrain calibrate"
    )


def _pairs_between(image_S: np.ndarray) -> np.ndarray:
    """Return the number of pairs of images of different subjects: images per subject (…, S) -> float64 (…,)."""
    image = image_S.astype(np.float64)
    return np.asarray(image.sum(-1) ** 2 - np.square(image).sum(-1)) / 2


def _lowest_threshold(score_P: np.ndarray, accepted: int) -> float:
    """Return the lowest score, of scores in descending order, that at most `accepted` of them reach."""
    # Equal scores are accepted together: scores equal to the first rejected one are rejected too.
    while accepted and accepted < len(score_P) and score_P[accepted - 1] == score_P[accepted]:
        accepted -= 1
    if not accepted:
        return float(np.nextafter(score_P[0], np.float32(2)))
    return float(score_P[accepted - 1])


def _fmr_interval(
    score_P: np.ndarray,
    first_P: np.ndarray,
    second_P: np.ndarray,
    pairs: int,
    fmr: float,
    false_accepts: int,
    image_S: np.ndarray,
    draws: Draws,
) -> Interval:
    """Return the interval of the false match rate of other people at the threshold of a rate.

    It has the outer ends of two intervals. For one, each draw of subjects has a threshold of its own, and gives the
    false match rate of the set there; for the other, it gives its own rate at the threshold of the set. Each of them
    alone is too narrow for some populations.

    Args:
        score_P: scores of random ones of the impostor pairs with the highest scores, descending, (P,).
        first_P: subject of one side of these pairs, int (P,).
        second_P: subject of the other side.
        pairs: number of pairs that they are from.
        fmr: the promised rate.
        false_accepts: number of pairs that reach the threshold of the set.
        image_S: number of images of each subject, int (S,).
        draws: bootstrap draws of subjects.
    """
    subjects, impostors = len(image_S), int(_pairs_between(image_S))
    each = pairs / len(score_P)

    def rates(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        weight_RP = np.take(drawn_RS, first_P, axis=1) * np.take(drawn_RS, second_P, axis=1)
        total_R = _pairs_between(drawn_RS * image_S)
        allowed_R1 = total_R[:, None] * (fmr * ROUNDING / each)
        accepted_R = (np.cumsum(weight_RP, axis=1, dtype=np.int64) <= allowed_R1).sum(1)
        # Equal scores are accepted together: not those that equal the first rejected one.
        first_rejected_R = score_P[np.minimum(accepted_R, len(score_P) - 1)]
        strictly_R = np.searchsorted(-score_P, -first_rejected_R, side="left")
        accepted_R = np.where(accepted_R < len(score_P), strictly_R, accepted_R)
        false_R = each * weight_RP[:, : round(false_accepts / each)].sum(1, dtype=np.int64)
        # A draw that has one person only has no impostor pairs; the interval ignores NaN.
        return {
            "of set": np.where(total_R > 0, accepted_R * each / impostors, np.nan),
            "of draw": bootstrap.share(false_R, total_R),
        }

    drawn = bootstrap.replicate(rates, subjects, draws, pairs=len(score_P))
    # Without an interval all draws have one person only, which show nothing.
    ends = [
        bootstrap.interval(rate_R, subjects, false_accepts / impostors) or (0.0, 1.0)
        for rate_R in drawn.values()
    ]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _fnmr(
    rejected_P: np.ndarray, person_P: np.ndarray, subjects: int, draws: Draws
) -> tuple[float | None, Interval | None]:
    """Return the false non-match rate and its interval, given which genuine pairs are rejected, and their people."""
    if not len(rejected_P):
        return None, None
    rejected_S = np.bincount(person_P, weights=rejected_P, minlength=subjects)
    genuine_S = np.bincount(person_P, minlength=subjects)

    def rates(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        # A draw of people with one image each has no genuine pairs; the interval ignores NaN.
        return {"fnmr": bootstrap.share(drawn_RS @ rejected_S, drawn_RS @ genuine_S)}

    drawn = bootstrap.replicate(rates, subjects, draws, pairs=subjects)
    estimate = float(rejected_P.mean())
    return estimate, bootstrap.interval(drawn["fnmr"], int(np.count_nonzero(genuine_S)), estimate)
