"""Results of one model or other system, or of two in comparison: the functions behind `facetrain eval`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from facetrain.backbone.base import evaluation_mode
from facetrain.device.capability import float32_name
from facetrain.distributed.agreement import fail_together
from facetrain.distributed.world import join
from facetrain.embeddings.embed_images import open_embedder
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.inference import Inference
from facetrain.errors import ModelError, UsageError
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.model_file import STEP_KEY
from facetrain.models.onnx_network import OnnxNetwork
from facetrain.progress import ProgressCallback
from facetrain.verify.metrics.result import Result
from facetrain.verify.model_results import ModelResults
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.protocols import evaluate_set, scores_result
from facetrain.verify.score_files import is_score_file, read_scores, scores_of_same_pairs, scores_of_set
from facetrain.verify.set_faults import warn_of_doubts, warn_of_faults
from facetrain.verify.sets.open_sets import AnySet, open_sets
from facetrain.verify.sets.pair_set import PairSet
from facetrain.verify.sets.slice_table import NO_SLICES, SliceTable, read_slice_table
from facetrain.verify.training_images import warn_of_training_images

_TIMEOUT_S = 24 * 3600.0
"""Longest time in which a rank waits for another one: the others wait while the leader computes the metrics, which can
take longer than the embedding. A rank that ends is reported at once."""


def evaluate(
    model: Path | EmbeddingModel,
    targets: Sequence[str],
    data_dir: Path,
    *,
    gallery_model: Path | None = None,
    against: Path | None = None,
    slices: Path | None = None,
    options: EvaluationOptions | None = None,
    inference: Inference | None = None,
    progress: ProgressCallback | None = None,
    allow_code: bool = False,
) -> ModelResults:
    """Evaluate a model on every set, and compare it with the model `against` if that is given.

    Under torchrun all ranks share the embedding, and the leader has the results.

    Args:
        model: a path that `open_model` reads, or an open model.
        targets: paths or names in `data_dir`, see `open_set`.
        data_dir: folder of the sets that are given by name.
        gallery_model: path of the model that embeds the galleries, and the second image or template of each pair;
            None for `model`.
        against: path of the other model, which embeds everything itself; or, with one set of pairs, a file of another
            system's scores in the order of the set, see `score_files`.
        slices: slice table (CSV) of the only set, which is a set of pairs; the default is the table of groups beside
            each set.
        options: options of the protocols.
        inference: device, batch size and precision.
        progress: called on the leader with the number of embedded images of a set and their total.
        allow_code: whether the networks may be code that their files name (MODULE:NAME).

    Raises:
        ConfigError: a file names code that may not run.
        ModelError: a model cannot be opened, an embedding is not finite, or the gallery model has another embedding
            size.
        PairsError: a set cannot be read.
        DataError: a slice table does not fit its set.
        UsageError: a slice table or another system's scores are given, and not one set of pairs; the FMR of slices is
            given, and no set of pairs; or an ONNX file is to run in bfloat16.
    """
    options, inference = options or EvaluationOptions(), inference or Inference()
    with join(inference.device, _TIMEOUT_S) as world:
        # All inputs are opened before the first set is evaluated: a wrong path is reported at once, by one rank.
        with fail_together(world):
            open_one = partial(open_model, device=world.device, allow_code=allow_code)
            opened = open_one(model) if isinstance(model, Path) else model
            scores = against if against is not None and is_score_file(against) else None
            other = open_one(against) if against is not None and scores is None else None
            gallery = None if gallery_model is None else open_one(gallery_model)
            if gallery is not None:
                _require_same_size(str(gallery_model), gallery, opened)
            sets = {target.name: target for target in open_sets(targets, data_dir)}
            if options.slice_fmr is not None and not any(isinstance(one, PairSet) for one in sets.values()):
                raise UsageError("--slice-fmr needs a set of pairs: IJB and TinyFace have no slices")
            tables = _read_tables(sets, slices)
            if world.is_leader:
                _warn_of_doubtful_sets(sets, opened, *(each for each in (other, gallery) if each is not None))
            scored = scores_of_set(scores, _only_set_of_pairs(sets, scores)) if scores is not None else None

        def embedder_of(opened: EmbeddingModel) -> ImageEmbedder:
            return replace(open_embedder(opened, world, inference), progress=progress)

        def evaluate_sets(embedder: ImageEmbedder, gallery: ImageEmbedder | None = None) -> dict[str, Result]:
            results: dict[str, Result] = {}
            for name, target in sets.items():
                table = tables.get(name, NO_SLICES)
                results |= evaluate_set(target, embedder, options, table, gallery=gallery)
            return results

        def precision_of(opened: EmbeddingModel) -> str:
            if isinstance(opened.network, OnnxNetwork):
                return "the number formats of the file"
            return "bf16" if inference.bf16 else float32_name(world.device)

        compared = (
            None
            if other is None
            else (f"{against}: {other.description}, in {precision_of(other)}", embedder_of(other))
        )
        with evaluation_mode(opened.network):  # an open model of the caller may be in training mode
            results = evaluate_sets(embedder_of(opened), None if gallery is None else embedder_of(gallery))
        description, precision = opened.description, precision_of(opened)
        if gallery:
            description += f", gallery by {gallery.description}"
            precision += f", gallery in {precision_of(gallery)}"
        evaluation = ModelResults(
            description, results, sets, world.is_leader, precision, options, opened.metadata.get(STEP_KEY)
        )
        if compared is not None:
            against_model, embedder = compared
            return evaluation.compared_with(against_model, evaluate_sets(embedder))
        if scored is not None:
            others = {name: scores_result(scored, NO_SLICES, options) for name in results}
            return evaluation.compared_with(str(against), others)
        return evaluation


def evaluate_scores(scores: Path, *, against: Path | None = None, options: EvaluationOptions) -> ModelResults:
    """Evaluate the scores of another system, without its images.

    Args:
        scores: a score file, see `score_files`.
        against: scores of a second system for the same pairs, in the same order.
        options: options of the protocols.

    Raises:
        DataError: a file cannot be read, or the second system has other pairs.
    """
    table = read_scores(scores)
    name = scores.stem
    warn_of_faults(name, table.scored.same_P)
    result = scores_result(table.scored, table.slices, options)
    evaluation = ModelResults(f"scores of {scores}", {name: result}, {}, True, "", options)
    if against is None:
        return evaluation
    other = scores_of_same_pairs(table, read_scores(against))
    return evaluation.compared_with(str(against), {name: scores_result(other, NO_SLICES, options)})


def _require_same_size(path: str, gallery: EmbeddingModel, probe: EmbeddingModel) -> None:
    """Check that the embeddings of the model of the galleries, at `path`, have the size of those of the model `probe`.

    Raises:
        ModelError: they have another size.
    """
    if gallery.embedding_size != probe.embedding_size:
        raise ModelError(
            f"{path}: has embeddings of size {gallery.embedding_size}, and the evaluated model of size "
            f"{probe.embedding_size}; they cannot be compared"
        )


def _warn_of_doubtful_sets(sets: dict[str, AnySet], opened: EmbeddingModel, *others: EmbeddingModel) -> None:
    for target in sets.values():
        warn_of_doubts(target, opened.image_size)
    of_pairs = [target for target in sets.values() if isinstance(target, PairSet)]
    warn_of_training_images(of_pairs, [model.metadata for model in (opened, *others)])


def _only_set_of_pairs(sets: dict[str, AnySet], table: Path) -> PairSet:
    """Return the only set, to whose pairs the rows of a table belong."""
    target = next(iter(sets.values()))
    if len(sets) > 1 or not isinstance(target, PairSet):
        raise UsageError(f"{table}: is a table of one set of pairs; --target gives {', '.join(sets)}")
    return target


def _read_tables(sets: dict[str, AnySet], slices: Path | None) -> dict[str, SliceTable]:
    """Read the slice tables of the sets, which get the subjects of their table, if it has them."""
    paths = {name: one.groups for name, one in sets.items() if isinstance(one, PairSet) and one.groups}
    if slices is not None:
        paths[_only_set_of_pairs(sets, slices).name] = slices
    tables = {}
    for name, path in paths.items():
        target = sets[name]
        assert isinstance(target, PairSet)
        tables[name] = read_slice_table(path, target.same)
        if tables[name].subject is not None:
            sets[name] = replace(target, subject=tables[name].subject)
    return tables
