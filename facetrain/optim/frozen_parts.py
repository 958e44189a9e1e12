"""Parts of a backbone that are not trained: frozen parameters and frozen batch norms."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor, nn

from facetrain.distributed.sync_batch_norm import BatchNorm
from facetrain.errors import ConfigError
from facetrain.optim.parameter_names import require_prefixes


def freeze(module: nn.Module, prefixes: Collection[str], *, train_batch_norm: bool = True) -> None:
    """Exclude parameters and batch norms from training.

    A frozen batch norm is switched to evaluation mode: it normalizes with its running statistics and does not change
    them. Otherwise the statistics of new images would change the output of a part whose weights are fixed.

    Args:
        module: network in training mode. Nothing may call its `train()` afterward, which would undo the above.
        prefixes: every parameter is frozen whose name starts with one of them, and every batch norm all of whose
            parameters are.
        train_batch_norm: False: all batch norms are frozen, with their weights and biases.

    Raises:
        ConfigError: no parameter's name starts with a prefix, or there is no parameter to train.
    """
    require_prefixes(module, prefixes, "model.freeze")
    for name, parameter in module.named_parameters():
        if name.startswith(tuple(prefixes)):
            parameter.requires_grad_(False)
    for name, norm in module.named_modules():
        if isinstance(norm, BatchNorm) and (not train_batch_norm or _all_match(norm, name, prefixes)):
            # In evaluation mode it neither uses nor updates the statistics of the batch.
            norm.eval().requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            "model.freeze: excludes every parameter of the backbone; leave at least one to train"
            if prefixes or not train_batch_norm
            else "model.backbone: the network has no parameter to train"
        )


def trained_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the buffers that training changes: all but the buffers of frozen batch norms."""
    for prefix, submodule in module.named_modules():
        if submodule.training:
            yield from submodule.named_buffers(prefix, recurse=False)


def _all_match(module: nn.Module, name: str, prefixes: Collection[str]) -> bool:
    """Return whether the name of each parameter of a module starts with one of the prefixes; without any, its own."""
    names = [key for key, _ in module.named_parameters(name)] or [name]
    return all(key.startswith(tuple(prefixes)) for key in names)
