"""What a reader does with an input. It guides the fuzzer: an input with a new outcome is mutated further."""

from __future__ import annotations

import re
from collections.abc import Callable

from facetrain.errors import FacetrainError

_FRAMES = 4
_WORDS = 5
_LONGEST = 4000


def outcome(documented: type[Exception] | tuple[()], read: Callable[[], object]) -> str:
    """Read an input; return where the documented error was raised, and why; otherwise the text that `read` returns.

    The message of the error is no part of it: it may repeat names of the input, so that each of them would be new.

    Raises:
        AssertionError: the message is not one line of a moderate length.
    """
    try:
        result = read()
    except documented as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < _LONGEST, message
        return describe(error)
    return result if isinstance(result, str) else ""


def describe(error: BaseException) -> str:
    """Return the lines of code that led to an error and to its causes, and the words of the first cause."""
    places: list[str] = []
    reason: BaseException | None = error
    while reason is not None:
        error, lines, traceback = reason, [], reason.__traceback__
        while traceback is not None:
            lines.append(f"{traceback.tb_frame.f_code.co_name} {traceback.tb_lineno}")
            traceback = traceback.tb_next
        places += lines[-_FRAMES:]
        reason = error.__cause__ or error.__context__
    if not isinstance(error, FacetrainError):
        # Without names and numbers.
        words = re.sub(r"""'[^']*'|"[^"]*"|[0-9]\w*""", "", str(error)[:200])
        places += re.findall("[A-Za-z]{2,}", words)[:_WORDS]
    return ", ".join(places)
