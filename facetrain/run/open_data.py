"""Opens the data of a run from its config; what is to be drawn is there at once, and written while the run trains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from facetrain.config.schema import Config
from facetrain.data.dataset import FaceDataset
from facetrain.data.loader import Batch
from facetrain.data.open_dataset import check_counts, drop_small_identities, open_dataset
from facetrain.verify.pair_set import PairSet, load_pair_sets


def is_to_be_drawn(config: Config) -> bool:
    """Whether the config wants synthetic data, and it is not there yet."""
    return config.data.synthetic is not None and not Path(config.data.train).exists()


def open_data(config: Config, *, workers: int) -> tuple[FaceDataset, list[PairSet]]:
    """Open the training set and the verification sets; `workers` processes draw those that are to be drawn.

    Raises:
        DataError: one of them cannot be read, or is not what the config says.
    """
    folder, least = Path(config.data.train), config.data.min_images_per_identity
    if is_to_be_drawn(config):
        source, drawn = (
            drop_small_identities(_drawn_source(config), folder, least),
            _drawn_pairs(config, workers),
        )
    else:
        source, drawn = open_dataset(folder, min_images_per_identity=least), []
    check_counts(source, folder, num_classes=config.data.num_classes, num_images=config.data.num_images)
    return source, load_pair_sets(config.eval.targets, Path(config.eval_dir), drawn)


def written_meanwhile(
    config: Config, source: FaceDataset, batches: Iterable[tuple[Batch, ...]]
) -> Iterator[tuple[Batch, ...]]:
    """Pass the batches on, and have the drawn dataset written from the second to the last of them."""
    from facetrain.data.synthetic.lazy_dataset import LazyDataset, write_in_background

    wanted = config.data.synthetic
    assert wanted is not None and isinstance(source, LazyDataset), "nothing is to be drawn"
    folder, image_size = Path(config.data.train), config.data.image_size
    batches = iter(batches)
    yield from islice(batches, 1)  # the first step has the machine to itself
    with write_in_background(source, folder, image_size=image_size, **wanted.model_dump()) as wait:
        yield from batches
        wait()


def _drawn_source(config: Config) -> FaceDataset:
    from facetrain.data.synthetic.lazy_dataset import LazyDataset

    wanted = config.data.synthetic
    assert wanted is not None, "nothing is to be drawn"
    return LazyDataset(
        Path(config.data.train),
        identities=wanted.identities,
        images_per_identity=wanted.images_per_identity,
        image_size=config.data.image_size,
        seed=wanted.seed,
    )


def _drawn_pairs(config: Config, workers: int) -> list[PairSet]:
    from facetrain.data.synthetic.dataset_writer import EVAL_SET_NAME, render_eval_pairs

    wanted = config.data.synthetic
    assert wanted is not None, "nothing is to be drawn"
    if EVAL_SET_NAME not in config.eval.targets or Path(config.eval_dir) != Path(config.data.train):
        return []
    images, same = render_eval_pairs(
        eval_identities=wanted.eval_identities,
        eval_pairs=wanted.eval_pairs,
        image_size=config.data.image_size,
        seed=wanted.seed,
        workers=max(workers, 1),
    )
    return [PairSet(EVAL_SET_NAME, images, same)]
