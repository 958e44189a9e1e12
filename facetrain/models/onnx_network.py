"""ONNX networks, run by onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.backbone.base import DEFAULT_IMAGE_SIZE
from facetrain.errors import ModelError, RunError, missing_package
from facetrain.face_landmarks import NORMALIZED_TEMPLATE
from facetrain.files import damage_reason, error_reason, new_file, require_utf_8
from facetrain.models.checksum import require_sound_onnx
from facetrain.models.onnx_constants import plain_form
from facetrain.models.onnx_layers import mean_and_scale, parse_metadata
from facetrain.models.onnx_limits import read_model_proto, require_small_values, require_stored_weights

_IMAGE_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}
_EMBEDDING_TYPES = "tensor(float)", "tensor(float16)", "tensor(double)"
_FATAL = 4
"""onnxruntime's level of messages without its warnings, which advise on the writing of the file, and without its
errors, which are in our messages."""
_LEAST_SIZE = 4
"""Numbers of the shortest embedding. Networks for age, gender or a printed photo give up to three for each face."""
LANDMARKS_INPUT = "landmarks"
"""Name of the second input of a network with KP-RPE: landmarks (B, 5, 2), x and y as fractions of the sides."""


class OnnxNetwork(nn.Module):
    """An onnxruntime session that maps images (B, 3, H, W) on any device to embeddings (B, D)."""

    def __init__(self, session: Any, path: Path, mean_and_scale: tuple[float, float]) -> None:
        """Take a session, its file, and the mean and the scale of the input (pixels − mean) / scale of its graph.

        Raises:
            ModelError: its graph does not map square RGB images to embeddings.
        """
        super().__init__()
        self._session, self._path, self.mean_and_scale = session, path, mean_and_scale
        (image, *others), (embedding, *_) = session.get_inputs(), session.get_outputs()
        self._input_name = image.name
        self._channels_last, self.image_size = _read_layout(path, image, others, embedding)
        self.takes_landmarks = bool(others)
        """Whether the graph takes landmarks (B, 5, 2) after the images, as `facetrain export` writes it for KP-RPE."""
        self.from_pixels = image.type == "tensor(uint8)"
        """Whether the graph takes uint8 RGB and normalizes it."""
        self._dtype = _IMAGE_TYPES[image.type]
        batch, width = next(iter(image.shape), None), next(iter(embedding.shape[1:]), None)
        # A free size is a name or None. For one of 0, onnxruntime says what is wrong.
        self._batch = batch if isinstance(batch, int) and batch > 0 else None
        self.metadata = parse_metadata(session.get_modelmeta().custom_metadata_map)
        """Metadata that `facetrain export` wrote: `backbone`, `preprocessing`, `config`."""
        blank = torch.zeros(1, 3, self.image_size, self.image_size)
        self.embedding_size = width if isinstance(width, int) else self(blank).shape[1]

    def forward(self, image_BCHW: Tensor, landmarks_B52: Tensor | None = None) -> Tensor:
        """Map images to the first output of the session, on the device of the images.

        A graph that takes landmarks gets the landmarks of aligned faces if there are none.
        """
        image = image_BCHW.permute(0, 2, 3, 1) if self._channels_last else image_BCHW
        inputs = [np.ascontiguousarray(image.cpu().numpy(), self._dtype)]
        if self.takes_landmarks:
            points = NORMALIZED_TEMPLATE if landmarks_B52 is None else landmarks_B52.cpu().numpy()
            inputs.append(np.array(np.broadcast_to(points, (len(image_BCHW), 5, 2)), np.float32))
        return torch.from_numpy(self._embed(inputs)).float().to(image_BCHW.device)

    def _embed(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Return the embeddings (N, D) of inputs (N, …)."""
        try:
            return _run_in_batches(self._run, inputs, self._batch)
        except ModelError:
            if self._batch is not None or len(inputs[0]) == 1:
                raise
        # arcface_torch's torch2onnx.py traces one image and then renames the batch: a reshape inside keeps it at one.
        self._batch = 1
        return _run_in_batches(self._run, inputs, self._batch)

    def _run(self, *inputs: np.ndarray) -> np.ndarray:
        """Return the embeddings (N, D) of inputs (N, …), with as many images as the graph takes."""
        import onnxruntime

        names = self._input_name, LANDMARKS_INPUT
        options = onnxruntime.RunOptions()
        options.log_severity_level = _FATAL
        embedding: np.ndarray
        try:
            (embedding, *_) = self._session.run(None, dict(zip(names, inputs, strict=False)), options)
        except Exception as error:  # onnxruntime's errors have no common base
            shape = " × ".join(map(str, inputs[0].shape))
            raise ModelError(
                f"{self._path}: onnxruntime cannot run it on images of the shape {shape}: {error_reason(error)}"
            ) from error
        rows, numbers = len(inputs[0]), embedding.size // max(len(inputs[0]), 1)
        # A detector has a row for each place of the image: its first rows would pass for embeddings.
        if embedding.shape[:1] != (rows,) or (rows and numbers < _LEAST_SIZE):
            raise ModelError(
                f"{self._path}: is no network for face recognition: for a batch of {rows} it gives "
                f"{_text(embedding.shape)} numbers, not one embedding for each image; a detector, say, does so"
            )
        return embedding.reshape(rows, -1)


def _read_layout(path: Path, image: Any, others: Sequence[Any], embedding: Any) -> tuple[bool, int]:
    """Return whether the channels are the last dimension of an input for images, and the side of the images.

    Raises:
        ModelError: the graph does not map square RGB images, perhaps with landmarks, to one vector for each.
    """
    shape = image.shape or [None] * 4  # a free size is a name or None, a free shape is empty
    output = embedding.shape or [None] * 2
    is_known = image.type in _IMAGE_TYPES and len(shape) == 4
    is_last = is_known and shape[1] != 3 and (shape[3] == 3 or image.type == "tensor(uint8)")
    channels, *sides = [shape[3], *shape[1:3]] if is_last else shape[1:]
    stated = {side for side in sides if isinstance(side, int)}
    if (
        not is_known
        or len(stated) > 1
        or (isinstance(channels, int) and channels != 3)
        or any(other.name != LANDMARKS_INPUT for other in others)
        or embedding.type not in _EMBEDDING_TYPES
        or (len(output) != 2 and not (len(output) == 4 and output[2:] == [1, 1]))
    ):
        *inputs, result = (
            f"{one.name} ({one.type} {_text(one.shape)})" for one in (image, *others, embedding)
        )
        raise ModelError(
            f"{path}: maps {', '.join(inputs)} to {result}; facetrain gives square RGB images as float or uint8, "
            "N × 3 × H × H or N × H × H × 3, and takes their embeddings as float, N × D: export the network with these"
        )
    return is_last, min(stated, default=DEFAULT_IMAGE_SIZE)


def _text(shape: Sequence[Any]) -> str:
    return " × ".join("?" if side is None else str(side) for side in shape)


def _run_in_batches(
    run: Callable[..., np.ndarray], inputs: Sequence[np.ndarray], batch: int | None
) -> np.ndarray:
    """Return the embeddings (N, D) of inputs (N, …) from a program that takes `batch` of each, or None for any number.

    The last ones are repeated to fill the last batch.
    """
    count = len(inputs[0])
    if batch is None or count == 0:
        return run(*inputs)
    missing = -count % batch
    filled = [
        np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array
        for array in inputs
    ]
    starts = range(0, count, batch)
    embeddings = [run(*(array[start : start + batch] for array in filled)) for start in starts]
    return np.concatenate(embeddings)[:count]


def open_onnx(path: Path) -> OnnxNetwork:
    """Open an ONNX file on the CPU.

    Raises:
        ModelError: it is not an ONNX file, its graph does not map square RGB images to embeddings, or the package
            onnx or onnxruntime is not installed.
        UsageError: the path is not UTF-8.
    """
    require_utf_8(path)  # onnxruntime opens no other
    try:
        import onnxruntime
    except ImportError as error:
        raise ModelError(f"{path}: {missing_package(error, 'onnx')}") from error
    try:
        given = _check(read_model_proto(path), path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = _FATAL
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        network = OnnxNetwork(session, path, given)
    except ModelError:
        raise
    except Exception as error:  # onnxruntime's errors have no common base
        raise ModelError(f"{path}: {damage_reason(error)}") from error
    return network


def _check(model: Any, path: Path) -> tuple[float, float]:
    """Check a graph before it is loaded, and return the mean and the scale of its input.

    Raises:
        ModelError: its weights are damaged, its values too large, or its input unknown.
    """
    require_stored_weights(path, model)
    require_sound_onnx(model, path)
    model = plain_form(path, model)
    given = mean_and_scale(model, path)
    require_small_values(path, model)
    return given


def copy_with_metadata(path: Path, output: Path, texts: Mapping[str, str]) -> None:
    """Write an ONNX file that `open_onnx` has read to `output`, with more metadata, atomically.

    Data in another file stay there, so both have the same folder then.

    Raises:
        RunError: the file cannot be written.
    """
    import onnx

    model = read_model_proto(path)
    kept = {entry.key: entry.value for entry in model.metadata_props}
    onnx.helper.set_model_props(model, {**kept, **texts})
    with new_file(output, RunError) as scratch:
        scratch.write_bytes(model.SerializeToString())
