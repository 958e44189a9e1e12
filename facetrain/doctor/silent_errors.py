"""Checks of images for errors that stop no run, but cost accuracy: each result states how certain it is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from facetrain.data.images.face_pattern import Registration, correlation, orientation_correlations, register
from facetrain.doctor.check_result import CheckResult, failed, passed, warned_if, warning
from facetrain.doctor.image_sample import ImageSample
from facetrain.text import count_text

_FEWEST_IMAGES = 30
"""Statistics of fewer images are left out."""
_BLOCK = 50
"""Images of a part of the sample that is examined by itself: an error may be in one part of a dataset only."""
_BLUE = -5.0
"""Faces whose middle has less red minus blue than this: 0.4 % or fewer of three real datasets."""
_SKIN = 15.0
_MANY_BLUE = 0.05
_TURN_MARGIN = 0.2
"""Correlation by which another orientation must beat all others: 0.6 % or fewer of the images of real datasets."""
_MANY_TURNED = 0.02
_DIRECTIONS = ("", "to the right", "upside down", "to the left")
"""Direction of the forehead by the number of quarter turns."""
_MANY_GRAY = 0.05
_NARROW_RANGE, _VERY_NARROW_RANGE = 170, 150
"""Range of the middle 99.8 % of the values; 250 or more in real datasets."""
_MANY_SATURATED = 0.4
"""Share of the values 0 and 255; 1.3 % or less in real datasets."""
_CLEAR_FACE = 0.6
"""Correlation of the average faces of both halves of a sample, above which it has a face at one place."""
_LARGEST_SCALE, _LARGEST_SHIFT = 1.12, 7.0
"""Differences in size (factor) and place (pixels of 112) which training data and evaluation sets may have."""
_CLEAR_GAIN = 0.1


def check_readable(name: str, sample: ImageSample, image_size: int, *, skip_bad: bool) -> CheckResult:
    """Check that the images of a training set can be decoded, and have the size (pixels of a side) of training.

    `skip_bad` says that a run leaves out images that cannot be decoded.
    """
    check = f"reading of {name}"
    if sample.errors:
        message = _unreadable(sample)
        advice = "write a copy without them with `facetrain data check DATASET --repair FOLDER`"
        if skip_bad and len(sample):
            return warning(check, f"{message}; training skips them (data.bad_records)", advice)
        return failed(check, message, advice if skip_bad else f"{advice}, or set data.bad_records: skip")
    sizes = ", ".join(f"{width} × {height}" for (width, height), _ in sample.sizes.most_common(3))
    message = f"{len(sample)} images were decoded: {sizes} pixels"
    advice = (
        f"training resizes every image to {image_size} pixels: pack the dataset aligned and in that size "
        f"(facetrain data pack --image-size {image_size})"
    )
    return warned_if(sample.sizes.keys() != {(image_size, image_size)}, check, message, advice)


def check_set_readable(name: str, sample: ImageSample) -> Iterator[CheckResult]:
    """Check that the images of a verification set can be decoded: a verification skips none."""
    if sample.errors:
        yield failed(f"reading of {name}", _unreadable(sample), "write or download the set again")


def _unreadable(sample: ImageSample) -> str:
    errors = sample.errors
    return f"{len(errors)} of {len(sample) + len(errors)} images cannot be read; the first: {errors[0]}"


def check_images(name: str, sample: ImageSample) -> list[CheckResult]:
    """Check a sample of one dataset or verification set: colors, storage, rotation and pixel values.

    Return a warning for each error, or a single passed result.
    """
    check = f"images of {name}"
    errors = [*_find_storage(check, sample)]
    # Headers are facts; the other checks are statistics.
    if len(sample) >= _FEWEST_IMAGES:
        for find in (_find_swapped_channels, _find_rotation, _find_stored_normalized):
            errors += find(check, sample)
    if errors:
        return errors
    kinds = "storage, colors, rotation and pixel values" if len(sample) >= _FEWEST_IMAGES else "storage"
    message = f"{len(sample):,} of {sample.total:,} examined: no error of {kinds} found"
    return [passed(check, message)]


_STORAGE_ADVICE = {
    "have an EXIF rotation": "facetrain turns them as the tag says, other programs do not: if faces were aligned "
    "before, the tag is wrong now; store upright images without the tag",
    "are CMYK": "colors of print are converted without their color profile: store these images as RGB",
    "have more than 8 bits per channel": "the low bits are dropped: scale them to 8 bits by their real range, and "
    "store them so",
    "have transparency": "transparency is dropped, and hidden colors appear: store images without it",
    "are gray": "use the color images if they exist; otherwise make training and evaluation agree (data.augment.gray)",
}


def _find_storage(check: str, sample: ImageSample) -> Iterator[CheckResult]:
    """Report what the headers of the images state; these results are certain."""
    gray = int(sample.is_gray_N.sum())
    has_many_gray = _at_least(gray, len(sample)) > _MANY_GRAY
    for error, advice in _STORAGE_ADVICE.items():
        number = sample.storage[error] if error != "are gray" else gray * has_many_gray
        if number:
            yield warning(
                check, f"{number:,} of {count_text(len(sample), 'image')} {error}", advice, "certain"
            )


def _find_swapped_channels(check: str, sample: ImageSample) -> Iterator[CheckResult]:
    advice = (
        "skin has more red than blue: red and blue are probably swapped; swap them in the program that wrote the "
        "images (cv2.imwrite takes BGR)"
    )
    redness = sample.redness_N[~sample.is_gray_N]
    if len(redness) < _FEWEST_IMAGES:
        return
    # Blue light makes single faces blue, so the share counts, and for a part also that all others are clearly red.
    is_blue = redness < _BLUE
    share = is_blue.mean()
    if share > 0.5 and np.median(redness) < 2 * _BLUE:
        certainty = "likely" if share > 0.8 else "possible"
        yield warning(check, f"{share:.0%} of the color images have more blue than red", advice, certainty)
    elif (
        not is_blue.all()
        and _at_least(int(is_blue.sum()), len(redness)) > _MANY_BLUE
        and np.median(redness[~is_blue]) > _SKIN
    ):
        certainty, place = _certainty_of_part(sample, is_blue)
        message = f"{share:.0%} of the color images have more blue than red{place}, unlike the others"
        yield warning(check, message, advice, certainty)


def _find_rotation(check: str, sample: ImageSample) -> Iterator[CheckResult]:
    correlations = orientation_correlations(sample.patterns_NSS)
    average = orientation_correlations(sample.patterns_NSS.mean(0)[None])[0]
    advice = "a rotation tag was probably lost before it was applied: turn these images upright"
    turns = int(average.argmax())
    others = np.delete(average, turns).max()
    if turns and average[turns] > 0.4 and average[turns] - others > _TURN_MARGIN:
        certainty = "likely" if average[turns] > 0.5 else "possible"
        yield warning(check, f"the average face is turned {_DIRECTIONS[turns]}", advice, certainty)
        return
    # Single faces are turned: only where most others are clearly upright, or the dataset would not consist of faces.
    is_upright = correlations[:, 0] - correlations[:, 1:].max(1) > _TURN_MARGIN
    has_faces = is_upright.mean() > 0.3 and average.max() > 0.3
    for turns in (1, 2, 3):
        others = np.delete(correlations, turns, axis=1).max(1)
        is_turned = correlations[:, turns] - others > _TURN_MARGIN
        if has_faces and _at_least(int(is_turned.sum()), len(sample)) > _MANY_TURNED:
            certainty = "likely" if is_turned.mean() > 0.1 else "possible"
            share = f"about {is_turned.mean():.0%} of the faces"
            message = f"{share} are turned {_DIRECTIONS[turns]}, the others are upright"
            yield warning(check, message, advice, certainty)


def _find_stored_normalized(check: str, sample: ImageSample) -> Iterator[CheckResult]:
    counts = sample.pixel_counts
    cumulative = np.cumsum(counts) / counts.sum()
    # Not the extremes: a few pixels of a normalized image may still be 0 or 255.
    low, high = (int(np.searchsorted(cumulative, quantile)) for quantile in (0.001, 0.999))
    saturated = (counts[0] + counts[255]) / counts.sum()
    advice = (
        "the images were probably normalized before they were stored, and training normalizes again: store pixels "
        "from 0 to 255"
    )
    if high - low < _NARROW_RANGE:
        certainty = "likely" if high - low < _VERY_NARROW_RANGE else "possible"
        yield warning(check, f"99.8 % of all values are between {low} and {high}", advice, certainty)
    elif saturated > _MANY_SATURATED:
        yield warning(check, f"{saturated:.0%} of all values are 0 or 255", advice, "likely")


def check_alignment(
    name: str, sample: ImageSample, reference_name: str, reference: ImageSample
) -> list[CheckResult]:
    """Compare size and place of the faces of a verification set with the faces of the training data.

    Returns:
        One result; none if one of the two has too few images, or the training data has no face at one place.
    """
    if min(len(sample), len(reference)) < _FEWEST_IMAGES or _clearness(reference) < _CLEAR_FACE:
        return []
    check = f"alignment of {name}"
    moved = register(reference.patterns_NSS.mean(0), sample.patterns_NSS.mean(0))
    advice = (
        f"embed and train on one alignment: align {name} as {reference_name} was (`facetrain data pairs … --detector "
        "yunet`; a training set: `facetrain data pack … --detector yunet`)"
    )
    if moved.similarity < _CLEAR_FACE:
        if len(sample) < 2 * _FEWEST_IMAGES:
            return []
        message = (
            f"the average face does not resemble the average face of {reference_name} "
            f"(correlation {moved.similarity:.2f})"
        )
        return [warning(check, message, advice, "possible")]
    if not _is_moved(moved):
        return [passed(check, f"as {reference_name} (correlation {moved.similarity_in_place:.2f})")]
    # How much better the faces agree after they are moved shows how certain the difference is.
    gain = moved.similarity - moved.similarity_in_place
    certainty = "likely" if gain > _CLEAR_GAIN and moved.similarity > 0.7 else "possible"
    message = (
        f"faces have {moved.scale:.2f} times the size of those in {reference_name}, {_shift_text(moved)}: "
        f"correlation {moved.similarity_in_place:.2f} in place, {moved.similarity:.2f} after both changes"
    )
    return [warning(check, message, advice, certainty)]


def _is_moved(face: Registration) -> bool:
    size = max(face.scale, 1 / face.scale)
    return size > _LARGEST_SCALE or max(abs(face.right), abs(face.down)) > _LARGEST_SHIFT


def _shift_text(face: Registration) -> str:
    shifts = [
        f"{abs(shift):.0f} pixels {(after if shift > 0 else before)}"
        for shift, before, after in ((face.right, "left", "right"), (face.down, "up", "down"))
        if abs(shift) >= 1
    ]
    return f"and are {' and '.join(shifts)} (of 112)" if shifts else "at the same place"


def _clearness(sample: ImageSample) -> float:
    """Return the correlation of the average faces of the even and the odd images."""
    even, odd = sample.patterns_NSS[::2].mean(0), sample.patterns_NSS[1::2].mean(0)
    return float(correlation(even[None], odd)[0])


def _certainty_of_part(sample: ImageSample, is_blue: np.ndarray) -> tuple[str, str]:
    """Return the certainty of an error in a part of the images, and the place where most of them are."""
    block, blocks = np.flatnonzero(~sample.is_gray_N) // _BLOCK, len(sample) // _BLOCK
    blue, color = (np.bincount(block, each, blocks)[:blocks] for each in (is_blue, np.ones(len(block))))
    share = blue / np.maximum(color, 1)  # all images of a block may be gray
    if share.max(initial=0) > 0.5:
        part = int(share.argmax()) * _BLOCK / len(sample)
        return "likely", f", most of them around {part + _BLOCK / len(sample) / 2:.0%} of the dataset"
    return ("likely" if is_blue.mean() > 0.2 else "possible"), ""


def _at_least(count: int, total: int) -> float:
    """Return the lower bound of a share at 97.5 % confidence (Wilson, "Probable inference", 1927)."""
    if not total:
        return 0.0
    square = 1.96**2
    spread = np.sqrt(square * (count * (total - count) / total + square / 4))
    return float((count + square / 2 - spread) / (total + square))
