"""Groups of options: a dataclass that several commands share, or that a function below the command line takes whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def option_groups(command: Callable[..., T]) -> Callable[..., T]:
    """Expand each parameter of a command that is a dataclass into one option per field of the dataclass.

    typer sees the expanded signature; the command gets the dataclasses. A group has one of two forms:

    - A dataclass of the command line. Each field is written like a parameter of a command:
      `device: Annotated[str, typer.Option(help="…")] = "auto"`.
    - A dataclass of another part, which knows nothing of typer. The parameter is annotated with a dictionary of its
      options: `Annotated[Inference, {"device": typer.Option(help="…")}]`. Fields that are not in the dictionary are no
      options, and keep their defaults.

    Two groups of one command must not have a field of the same name, because its option would be ambiguous.
    """
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        group, texts = _group(hints[parameter.name])
        if group is None:
            options = [parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name])]
        else:
            options = list(_options(group, texts))
            groups[parameter.name] = group, [option.name for option in options]
        parameters += options

    @functools.wraps(command)
    def with_single_options(**values: Any) -> T:
        for name, (group, options) in groups.items():
            values[name] = group(**{option: values.pop(option) for option in options})
        return command(**values)

    # inspect.Signature refuses two parameters of one name.
    with_single_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_single_options.__annotations__ = {option.name: option.annotation for option in parameters}
    return with_single_options


def _group(hint: Any) -> tuple[type[Any] | None, dict[str, Any] | None]:
    """Return the dataclass of a parameter, None for a single option; and the options of its fields, if stated apart."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint, None
    if get_origin(hint) is Annotated:
        group, texts, *_ = get_args(hint)
        if isinstance(group, type) and is_dataclass(group) and isinstance(texts, dict):
            return group, texts
    return None, None


def _options(group: type[Any], texts: dict[str, Any] | None) -> Iterator[inspect.Parameter]:
    hints, parameters = get_type_hints(group, include_extras=True), inspect.signature(group).parameters
    for name in parameters if texts is None else texts:
        hint = hints[name] if texts is None else Annotated[hints[name], texts[name]]
        yield parameters[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
