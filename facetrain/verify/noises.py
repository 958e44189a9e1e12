"""InsightFace's lists of pictures in MegaFace that are not what their folders say.

facescrub_noises.txt    Adam_Sandler_8871.png                       a line per picture: its name,
megaface_noises.txt     363/64234@N00/5231_1.jpg                    or its last two folders too
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from facetrain.errors import PairsError

_FOLDERS = 2
"""Above a distractor: they tell apart pictures of one name."""


def read_noises(path: Path) -> set[str]:
    """Return the pictures of a list, in the spelling of `without_noises`; of a list that is not there, none.

    Lines that begin with # are remarks; of lines with tabs the second column counts.

    Raises:
        PairsError: the file cannot be read as text.
    """
    if not path.exists():
        return set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: cannot be read as a list of pictures: {error}") from error
    columns = [line.split("\t") for line in lines if line.strip() and not line.startswith("#")]
    return {_spelt((column[1] if len(column) > 1 else column[0]).strip()) for column in columns}


def without_noises(pictures: Iterable[Path], noises: set[str]) -> list[Path]:
    """Return the pictures that a list does not name, be it by their names alone or with two folders."""
    if not noises:
        return list(pictures)
    return [
        path
        for path in pictures
        if not noises & {_spelt(path.name), _spelt("/".join(path.parts[-1 - _FOLDERS :]))}
    ]


def _spelt(name: str) -> str:
    # Alignment may have changed the suffix, and FaceScrub is handed out with blanks and with underscores.
    return re.sub(r"\.[A-Za-z]+$|[ _]", "", name)
