"""Trained networks: opening, embedding, comparison and evaluation."""

# N images   B batch   H, W height and width   D embedding

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch

from facetrain.api.dataset import Dataset, PathLike
from facetrain.config.paths import eval_dir_of_run, given_eval_dir
from facetrain.data.formats.image_folder import read_image_file
from facetrain.data.formats.landmark_file import require_fractions
from facetrain.distributed.devices import own_gpu, pick_device, require_device
from facetrain.distributed.world import World
from facetrain.embeddings.embed_images import embed_images, needed_detector, open_embedder
from facetrain.embeddings.embedder import EncodedImage, ImageEmbedder
from facetrain.embeddings.embedding_map import EmbeddingMap, open_map
from facetrain.embeddings.image_inputs import LazySequence, dataset_images, read_input
from facetrain.embeddings.inference import Inference
from facetrain.errors import DataError, ImageError, UsageError
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.remote.download import local_path
from facetrain.verify.calibration import Threshold, pick_threshold, stored_thresholds
from facetrain.verify.evaluate import evaluate as evaluate_model
from facetrain.verify.protocol_options import EvaluationOptions

Image = PathLike | np.ndarray
"""Image file, or RGB pixels uint8 (H, W, 3)."""
_CPU = "device='cpu'"


@dataclass(frozen=True)
class Comparison:
    """Similarity of two faces."""

    cosine: float
    """Cosine of the two embeddings, from -1 to 1; the faces of two people have a value near 0."""
    quality: tuple[float, float]
    """Quality of the first and of the second image, see `Model.embed`; NaN for a model that has none."""
    threshold: float | None = None
    """Smallest cosine of a match: as given to `Model.compare`, or of a calibrated model."""
    fmr: float | None = None
    """False match rate of the threshold, if the model file has it."""

    @property
    def same(self) -> bool | None:
        """Whether the cosine reaches the threshold; None without a threshold."""
        return None if self.threshold is None else self.cosine >= self.threshold


class Model:
    """Network that maps images to embeddings; `load_model` opens one."""

    def __init__(
        self, path: Path, opened: EmbeddingModel, device: torch.device, detector: Path | None = None
    ) -> None:
        self.path = path
        self.device = device
        self._opened, self._detector = opened, detector
        self._is_unit: bool | None = None
        """Whether the embeddings of the network have length 1; None before the first ones."""

    @cached_property
    def _embedder(self) -> ImageEmbedder:
        world = World(rank=0, local_rank=0, size=1, local_size=1, device=self.device)
        # Under torchrun, a script may call `embed` on one of its ranks only.
        return replace(open_embedder(self._opened, world, Inference()), alone=True)

    @property
    def image_size(self) -> int:
        """Side of the network's input in pixels. Other images are resized and cropped to it."""
        return self._opened.image_size

    @property
    def embedding_size(self) -> int:
        """Length D of an embedding."""
        return self._opened.embedding_size

    @property
    def metadata(self) -> dict[str, Any]:
        """Description in the model file: `backbone`, `preprocessing`, `config`."""
        return self._opened.metadata

    @overload
    def embed(
        self,
        images: Image | Dataset | Sequence[Image],
        *,
        flip: bool = True,
        batch_size: int = 64,
        landmarks: np.ndarray | None = None,
        return_quality: Literal[False] = False,
    ) -> np.ndarray: ...

    @overload
    def embed(
        self,
        images: Image | Dataset | Sequence[Image],
        *,
        flip: bool = True,
        batch_size: int = 64,
        landmarks: np.ndarray | None = None,
        return_quality: Literal[True],
    ) -> tuple[np.ndarray, np.ndarray]: ...

    @overload
    def embed(
        self,
        images: Image | Dataset | Sequence[Image],
        *,
        flip: bool = True,
        batch_size: int = 64,
        landmarks: np.ndarray | None = None,
        return_quality: bool,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]: ...

    def embed(
        self,
        images: Image | Dataset | Sequence[Image],
        *,
        flip: bool = True,
        batch_size: int = 64,
        landmarks: np.ndarray | None = None,
        return_quality: bool = False,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return the embeddings of images: float32 (N, D), each of length 1.

        With `return_quality`, return the embeddings and the quality of each image, float32 (N,): the length of its
        embedding before normalization. Blurred and hidden faces have a lower quality. Its scale depends on the model
        and on `flip`: the JSON of `facetrain eval` has error rates by quality. A model whose embeddings have length 1,
        such as many ONNX files, has no quality: it is NaN.

        Examples:
            >>> model.embed("face.jpg").shape             # one file
            (1, 512)
            >>> model.embed("faces").shape                # a folder of images, or a dataset of any format
            (2000, 512)
            >>> model.embed([array, "face.jpg"]).shape    # a list of arrays uint8 (H, W, 3) and of files
            (2, 512)
            >>> model.embed(array_NHW3).shape             # an array uint8 (N, H, W, 3)
            (64, 512)
            >>> embedding_ND, quality_N = model.embed("faces", return_quality=True)

        Args:
            images: aligned face crops, RGB; with the detector of `load_model` whole photos, which give a warning
                without one.
            flip: add the embedding of the mirror image.
            batch_size: images per forward pass.
            landmarks: for a network with KP-RPE, without detector, the landmarks of the images (N, 5, 2), x and y as
                fractions of their sides; None: those of the landmark file of a dataset, otherwise those of an aligned
                face.
            return_quality: return a tuple of the embeddings and the quality of each image.

        Raises:
            DataError: an image cannot be read, has no face that the detector finds, or is not a uint8 array (H, W, 3);
                the images are no sequence; or the landmarks are not (N, 5, 2), or are in pixels.
            ModelError: an embedding is not finite.
            UsageError: the batch size is less than 1, or given landmarks have no effect.
        """
        _require_at_least(1, batch_size=batch_size)
        path = local_path(images) if isinstance(images, str | os.PathLike) else None
        images = images if path is None else path
        encoded, read_landmarks = _read(images)
        if not len(encoded):
            nothing = np.empty((0, self.embedding_size), np.float32)
            return (nothing, np.empty(0, np.float32)) if return_quality else nothing
        name = "images" if path is None else str(path)
        detector = needed_detector(self._detector, read_landmarks, name)
        unit_ND, quality_N = embed_images(
            # The folded network is kept from call to call.
            replace(self._embedder, batch_size=batch_size),
            encoded,
            name,
            flip=flip,
            landmarks=self._landmarks(landmarks, read_landmarks, len(encoded), detector),
            detector=detector,
            is_unit=self._is_unit,
        )
        self._is_unit = bool(np.isnan(quality_N[0]))
        return (unit_ND, quality_N) if return_quality else unit_ND

    def _landmarks(
        self,
        given: np.ndarray | None,
        read: Callable[[], np.ndarray | None],
        count: int,
        detector: Path | None,
    ) -> np.ndarray | None:
        """Return the landmarks that the network gets, (N, 5, 2): as given, or of a dataset; None: of aligned faces."""
        has_effect = self._opened.takes_landmarks and not detector
        if given is None:
            return read() if has_effect else None
        if not has_effect:
            reason = "the detector finds them" if detector else "the network has no KP-RPE"
            raise UsageError(f"landmarks: they have no effect, because {reason}; leave them out")
        try:
            landmarks_N52 = np.asarray(given, np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"landmarks: {error}; expected an array of numbers ({count}, 5, 2)") from error
        if landmarks_N52.shape != (count, 5, 2):
            raise DataError(
                f"landmarks of shape {landmarks_N52.shape} for {count:,} images; expected ({count}, 5, 2)"
            )
        require_fractions(landmarks_N52, "landmarks", "divide x and y by the sides of the image")
        return landmarks_N52

    def stored_threshold(self, fmr: float | None = None) -> Threshold | None:
        """Return the threshold for a false match rate that `facetrain calibrate` stored; None without thresholds.

        By default, it is the threshold of the lowest stored rate with an FNMR below one half, or of the highest rate if
        there is none such.

        Raises:
            UsageError: the model file has no threshold for this rate.
            ModelError: its thresholds are damaged.
        """
        return pick_threshold(stored_thresholds(self.metadata, self.path), fmr, self.path)

    def compare(
        self,
        first: Image,
        second: Image,
        *,
        threshold: float | None = None,
        fmr: float | None = None,
        min_quality: float = 0,
    ) -> Comparison:
        """Return the cosine similarity of two faces, and whether it reaches a threshold.

        The threshold is the given one, or that of the false match rate `fmr` in a model file that
        `facetrain calibrate` wrote, by default that of `stored_threshold`; none in other files. An image with a lower
        quality than `min_quality` is refused, see `embed`.

        Examples:
            >>> model.compare("a.jpg", "b.jpg", threshold=0.3).same
            True

        Raises:
            DataError, ModelError: as `embed`.
            ImageError: the quality of an image is lower than `min_quality`.
            UsageError: both are given, or the model file has no threshold for `fmr`; or a minimum of the quality, which
                a model with embeddings of length 1 does not have.
        """
        if threshold is not None and fmr is not None:
            raise UsageError("compare: give threshold or fmr, not both")
        images = [first, second]
        embedding_2D, quality_2 = self.embed(images, return_quality=True)
        if min_quality and np.isnan(quality_2).any():
            raise UsageError(f"{self.path}: its embeddings have length 1, and so no quality; give no minimum")
        for index, quality in enumerate(quality_2.tolist()):
            if quality < min_quality:
                raise ImageError(
                    f"{_place(images[index], index)}: quality {quality:.4g}, less than the minimum "
                    f"{min_quality:g}; use a sharper image of the face, or a lower minimum"
                )
        # The product of an embedding with itself may be rounded to a number above 1.
        cosine = min(max(float(embedding_2D[0] @ embedding_2D[1]), -1.0), 1.0)
        compared = Comparison(cosine, (float(quality_2[0]), float(quality_2[1])))
        if threshold is not None:
            return replace(compared, threshold=threshold)
        stored = self.stored_threshold(fmr)
        return replace(compared, threshold=stored.cosine, fmr=stored.fmr) if stored else compared

    def __repr__(self) -> str:
        return f"Model({str(self.path)!r}): {self._opened.description}"


def load_model(
    path: PathLike, device: str = "auto", detector: PathLike | None = None, *, allow_code: bool = False
) -> Model:
    """Open a model.

    Examples:
        >>> model = facetrain.load_model("runs/quickstart")

    Args:
        path: a run folder, a checkpoint, a model file (.safetensors, .pt, .pth, .ckpt, .onnx, -symbol.json), a folder
            of CVLface or timm, an address, or a name of `facetrain get`.
        device: `cpu`, `cuda`, or `auto`, which takes a GPU if there is one: under torchrun that of this rank.
        detector: `yunet`, which is downloaded, or the file of this detector: it aligns the face of each photo.
        allow_code: whether the code of a network that the file names (MODULE:NAME) may run. Only for files that you
            trust.

    Raises:
        ConfigError: the file names code, and `allow_code` is false.
        ModelError: the file is missing or damaged, or its network is unknown.
        CheckpointError: the checkpoint is damaged, or the folder has none.
        UsageError: there is no such device.
    """
    require_device(device, given=f"device={device!r}", cpu_setting=_CPU)
    chosen = pick_device(device, own_gpu(), cpu_setting=_CPU)
    # Absolute: the run of the model and the detector are looked for later, perhaps from another current folder.
    file = local_path(path).absolute()
    return Model(
        file,
        open_model(file, chosen, allow_code=allow_code),
        chosen,
        local_path(detector).absolute() if detector else None,
    )


def load_map(path: PathLike) -> EmbeddingMap:
    """Open a map from the embeddings of an old model to those of a new one, which `facetrain align` wrote.

    Examples:
        >>> gallery_NE = facetrain.load_map("map.npz").apply(old_gallery_ND)
        >>> cosine_QN = new_model.embed(photos) @ gallery_NE.T

    Raises:
        DataError: the file cannot be read, or is no map.
    """
    return open_map(local_path(path))


def evaluate(
    model: Model | PathLike,
    sets: PathLike | Sequence[PathLike],
    data_dir: PathLike | None = None,
    *,
    gallery_model: PathLike | None = None,
    device: str = "auto",
    batch_size: int = 256,
    bootstrap: int = 1000,
    seed: int = 0,
    flip: bool = True,
    allow_code: bool = False,
) -> dict[str, dict[str, Any]]:
    """Evaluate a model by the published protocols; return the metrics of each set by its name.

    Under torchrun, all ranks call it, share the work, and the first one gets the metrics; but in a script that has
    called `init_process_group`, each rank that calls it evaluates alone.

    Examples:
        >>> facetrain.evaluate("runs/quickstart", "synth")["synth"]["accuracy"]
        0.94

    Args:
        model: an open model, or a path that `load_model` opens.
        sets: .bin files, or folders in the layout of IJB, TinyFace or CVLface: paths, or names in `data_dir`.
        data_dir: folder of the sets that are given by name. Default: that of the run (`eval.dir`), or the current
            folder if the model is not a run.
        gallery_model: path of the model that has enrolled the galleries; it embeds the second image of each pair, too.
            Default: `model`.
        device: `cpu`, `cuda` or `auto`; an open model stays on its own device.
        batch_size: images per forward pass.
        bootstrap: bootstrap draws of subjects for the 95 % intervals under `intervals`; 0 computes none.
        seed: seed of the draws.
        flip: add the embedding of the mirror image. Sets of pairs are scored with and without it.
        allow_code: whether the code of a network that a file names may run, see `load_model`.

    Raises:
        ConfigError: a file names code, and `allow_code` is false.
        ModelError: the model cannot be opened, or an embedding is not finite.
        DataError: a set cannot be read.
        UsageError: there is no such device, a number is too small, or `data_dir` is an address.
    """
    require_device(device, given=f"device={device!r}", cpu_setting=_CPU)
    _require_at_least(1, batch_size=batch_size)
    _require_at_least(0, bootstrap=bootstrap, seed=seed)
    path = model.path if isinstance(model, Model) else local_path(model)
    evaluation = evaluate_model(
        model._opened if isinstance(model, Model) else path,
        [os.fspath(one) for one in ([sets] if isinstance(sets, str | os.PathLike) else sets)],
        eval_dir_of_run(path) if data_dir is None else given_eval_dir(os.fspath(data_dir)),
        gallery_model=None if gallery_model is None else local_path(gallery_model),
        options=EvaluationOptions(bootstrap=bootstrap, seed=seed, flip=flip),
        inference=Inference(model.device.type if isinstance(model, Model) else device, batch_size),
        allow_code=allow_code,
    )
    results: dict[str, dict[str, Any]] = evaluation.as_json()["sets"]
    return results


def _require_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise UsageError(f"{name} {number}: too small; give a number of at least {least}")


def _read(
    images: Image | Dataset | Sequence[Image],
) -> tuple[Sequence[EncodedImage], Callable[[], np.ndarray | None]]:
    """Return the images, which are read on access, and what reads their landmarks."""
    if isinstance(images, Dataset):
        return dataset_images(images._source), lambda: images._source.landmarks
    if isinstance(images, str | os.PathLike):
        found = read_input(Path(images))
        return found.images, found.landmarks
    if isinstance(images, Mapping) or not (hasattr(images, "__len__") and hasattr(images, "__getitem__")):
        raise DataError(
            f"images: a {type(images).__name__} cannot be embedded; give a file, a folder, a Dataset, RGB pixels as "
            "uint8 (N, height, width, 3), or a list of files and pixels"
        )
    if hasattr(
        images, "to_list"
    ):  # a column of pandas, whose [] takes the labels of its rows and not their places
        images = images.to_list()
    # A single image of a wrong shape too, for the message.
    listed: Any = [images] if isinstance(images, np.ndarray) and images.ndim <= 3 else images
    given = LazySequence(
        len(listed), lambda index: _image(listed[index], index), lambda index: _place(listed[index], index)
    )
    return given, lambda: None


def _place(image: Any, index: int) -> str:
    return os.fspath(image) if isinstance(image, str | os.PathLike) else f"image {index}"


def _image(image: Any, index: int) -> EncodedImage:
    if isinstance(image, str | os.PathLike):
        return read_image_file(local_path(image))
    try:
        pixels = np.asarray(image)
        given = f"{pixels.dtype} {pixels.shape}"
    except (TypeError, ValueError, RuntimeError):
        # An item of a Dataset, which also has a label, or a tensor on a GPU or with a gradient.
        pixels, given = np.empty(0), f"a {type(image).__name__}"
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise DataError(
            f"image {index}: {given} cannot be embedded; give a file name, or RGB pixels from 0 to 255 as uint8 "
            "(height, width, 3)"
        )
    return pixels
