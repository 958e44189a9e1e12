"""Scored pairs of images of people that are drawn."""

from __future__ import annotations

import numpy as np

from facetrain.verify.metrics.scored_pairs import ScoredPairs


def people(random: np.random.Generator, subjects: int, images: int = 3) -> ScoredPairs:
    """Draw people of whom some are harder than others; return all their genuine pairs and as many others, scored."""
    center, spread = random.normal(size=(subjects, 1, 8)), random.gamma(2, 0.35, size=(subjects, 1, 1))
    unit = (center + spread * random.normal(size=(subjects, images, 8))).reshape(-1, 8)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    subject = np.repeat(np.arange(subjects), images)
    left, right = np.triu_indices(images, 1)
    start = np.arange(subjects)[:, None] * images
    genuine = (start + left).ravel(), (start + right).ravel()
    count = len(genuine[0])
    first = np.concatenate([genuine[0], random.integers(0, len(subject), count)])
    second = np.concatenate([genuine[1], random.integers(0, len(subject), count)])
    same, order = subject[first] == subject[second], random.permutation(2 * count)
    scores = (unit[first] * unit[second]).sum(1)
    return ScoredPairs(scores[order], same[order], first[order], second[order], subject)
