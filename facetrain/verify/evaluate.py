"""Score one model, or two, on some sets: what `facetrain eval` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from facetrain.cpu_cores import usable_cores
from facetrain.distributed.world import World, join
from facetrain.errors import UsageError
from facetrain.models.model_file import EmbeddingModel, open_model
from facetrain.progress import ProgressCallback
from facetrain.verify.embedder import ImageEmbedder, autocast
from facetrain.verify.evaluation_sets import EvaluationSet, open_evaluation_sets
from facetrain.verify.model_comparison import Difference, compare_results
from facetrain.verify.pair_set import PairSet
from facetrain.verify.protocols import Options, evaluate_set
from facetrain.verify.result import Result
from facetrain.verify.slices import SliceTable, read_slice_table
from facetrain.verify.verifier import evaluation_mode


@dataclass(frozen=True)
class Evaluation:
    """What the sets say of a model, and of how it differs from another."""

    description: str
    results: dict[str, Result]
    """By the name of the set; IJB's 1:N protocol adds `_1n` to it."""
    targets: dict[str, EvaluationSet]
    """The sets by name; the images of the hardest pairs are theirs."""
    is_leader: bool
    """Whether this rank is the one to tell the results."""
    against: str = ""
    """What the other model is."""
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return all numbers."""
        found: dict[str, Any] = {
            "description": self.description,
            "sets": {name: result.as_json() for name, result in self.results.items()},
        }
        if self.against:
            found["against"] = self.against
            found["differences"] = {
                name: {metric: difference.as_json() for metric, difference in by_metric.items()}
                for name, by_metric in self.differences.items()
            }
        return found


def evaluate(
    model: Path | EmbeddingModel,
    targets: Sequence[str],
    data_dir: Path,
    *,
    against: Path | None = None,
    tables: Mapping[str, Path] | None = None,
    options: Options | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int | None = None,
    bf16: bool = False,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Return the results on every set, beside another model's where one is given; a model is a path, or open.

    Under torchrun all ranks share the embedding, and the leader has the results. `tables` gives the CSV
    by which a set of pairs is sliced. `workers` decode on each rank, by default as many as it has cores.
    `progress` hears how many images are embedded, and of how many.

    Raises:
        ModelError: a model cannot be opened.
        PairsError: a set cannot be read.
        DataError: a table does not fit its set.
        UsageError: a table is given for a set that is not evaluated, or has no pairs of its own.
    """
    with join(device) as world:
        models = [_opened(each, world) for each in (model, against) if each is not None]
        sets = {found.name: found for found in open_evaluation_sets(targets, data_dir)}
        read = _read_tables(sets, tables or {})
        score = partial(
            _score,
            sets,
            read,
            options or Options(),
            world,
            batch_size=batch_size,
            workers=workers or max(1, usable_cores() // world.local_size),
            bf16=bf16,
            progress=progress if world.is_leader else None,
        )
        description, results = score(models[0])
        if against is None:
            return Evaluation(description, results, sets, world.is_leader)
        other, others = score(models[1])
        differences = {name: compare_results(result, others[name]) for name, result in results.items()}
        return Evaluation(description, results, sets, world.is_leader, other, differences)


def _opened(model: Path | EmbeddingModel, world: World) -> EmbeddingModel:
    return open_model(model, world.device) if isinstance(model, Path) else model


def _score(
    sets: dict[str, EvaluationSet],
    tables: dict[str, SliceTable],
    options: Options,
    world: World,
    opened: EmbeddingModel,
    *,
    batch_size: int,
    workers: int,
    bf16: bool,
    progress: ProgressCallback | None,
) -> tuple[str, dict[str, Result]]:
    embedder = ImageEmbedder(
        opened.network,
        image_size=opened.image_size,
        batch_size=batch_size,
        device=world.device,
        workers=workers,
        prepare=opened.prepare,
        autocast=autocast(world.device, bf16),
        progress=progress,
    )
    results: dict[str, Result] = {}
    with evaluation_mode(opened.network):
        for name, target in sets.items():
            results |= evaluate_set(target, embedder, replace(options, table=tables.get(name)))
    return opened.description, results


def _read_tables(sets: dict[str, EvaluationSet], paths: Mapping[str, Path]) -> dict[str, SliceTable]:
    tables = {}
    for name, path in paths.items():
        target = sets.get(name)
        if not isinstance(target, PairSet):
            there = ", ".join(other for other, found in sets.items() if isinstance(found, PairSet))
            raise UsageError(
                f"{path}: is for {name}, which is no set of pairs here; there are {there or 'none'}"
            )
        tables[name] = read_slice_table(path, len(target.same))
    return tables
