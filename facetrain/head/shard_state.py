"""`state_dict` of a head whose classes are split over ranks, for another number of ranks."""

# K this rank's classes   D embedding

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.errors import UsageError

_WEIGHT, _EXTRA = "weight", "_extra_state"
"""Keys of the centers (K, D), and of `get_extra_state`, in a `state_dict`."""


def register_hooks(head: nn.Module) -> None:
    """Let `state_dict` of a head have its rows as they are, and `load_state_dict` take its rows of all classes."""
    head.register_state_dict_pre_hook(_write_back)
    head.register_load_state_dict_pre_hook(_take_rows)


def _write_back(head: Any, *_: Any) -> None:
    """Write rows that a step has on the device back to the tables."""
    head.row_state()


def _take_rows(head: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    _write_back(head)  # or it would happen later, over the rows that are loaded
    if head.update is not None:
        # Copied, also with `assign=True`: the head updates the rows of its tables, which this parameter shows.
        metadata["assign_to_params_buffers"] = False
    weight: Tensor | None = state.get(prefix + _WEIGHT)
    # arcface_torch's PartialFC_V2 saves the weight alone.
    extra = state.setdefault(prefix + _EXTRA, head.get_extra_state())
    if weight is None:
        return
    if extra["num_classes"] != head.num_classes:
        raise UsageError(
            f"the saved head has {extra['num_classes']:,} classes, this head {head.num_classes:,}"
        )
    shard, first = head.shard, extra["first_class"]
    if len(weight) == head.num_classes:
        state[prefix + _WEIGHT] = weight[shard.start : shard.stop]
    elif first != shard.start or len(weight) != shard.size:
        raise UsageError(
            f"the saved head has the classes from {first:,} to {first + len(weight) - 1:,}, this rank needs "
            f"{shard.start:,} to {shard.stop - 1:,}; join the files of all ranks by PartialFC.join_state_dicts"
        )


def join(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `state_dict` of all classes from those of all ranks, see `PartialFC.join_state_dicts`."""
    parts = list(states)
    if parts and not any(_EXTRA in part for part in parts):
        # arcface_torch's PartialFC_V2 saves the weight alone.
        return {_WEIGHT: torch.cat([part[_WEIGHT] for part in parts])}
    parts.sort(key=lambda state: state[_EXTRA]["first_class"])
    stop = 0
    for part in parts:
        if part[_EXTRA]["first_class"] != stop:
            raise UsageError(
                f"the states of the ranks have no class {stop:,}, or a class twice; pass each rank's once"
            )
        stop += len(part[_WEIGHT])
    if not parts or stop != parts[0][_EXTRA]["num_classes"]:
        raise UsageError(f"the states of the ranks end at class {stop:,}; pass those of all ranks")
    weight_KD = torch.cat([part[_WEIGHT] for part in parts])
    # The rest is the same on all ranks.
    return {_WEIGHT: weight_KD, _EXTRA: {**parts[0][_EXTRA], "first_class": 0}}
