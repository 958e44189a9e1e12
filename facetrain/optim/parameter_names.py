"""Names of parameters as configs use them: the names in the network without adapters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from facetrain.backbone.settings import PARAMETRIZED
from facetrain.errors import ConfigError


def named_plainly(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a module with their names; one of an adapter has the name of the weight that it updates.

    So `conv1.parametrizations.weight.0.up` is yielded as `conv1.weight`, and a name may be yielded several times.
    """
    for name, parameter in module.named_parameters():
        layer, mark, rest = name.partition(PARAMETRIZED)
        yield (f"{layer}.{rest.partition('.')[0]}" if mark else name), parameter


def require_prefixes(module: nn.Module, prefixes: Iterable[str], key: str) -> None:
    """Check that each prefix begins the name of a parameter.

    Raises:
        ConfigError: one does not. The message names the config key and lists what names begin with.
    """
    names = [name for name, _ in named_plainly(module)]
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            modules = ", ".join(sorted({name.split(".")[0] for name in names}))
            raise ConfigError(
                f"{key}: no parameter's name starts with {prefix!r}; names start with one of: {modules}"
            )
