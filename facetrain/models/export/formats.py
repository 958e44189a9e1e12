"""Registry of export formats, by the name in `facetrain export --format`.

It imports no torch, so that the command line can list the formats at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facetrain.errors import ModelError, missing_package

if TYPE_CHECKING:
    from facetrain.models.model_file import EmbeddingModel


class Int8(StrEnum):
    """Kinds of quantization to 8 bits."""

    static = "static"
    """Weights and activations, with ranges of the activations that were measured on images."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. A format supports those that its row in `FORMATS` names."""

    from_pixels: bool = False
    """Take uint8 RGB images (N, H, W, 3) and normalize them inside the network."""
    unit: bool = False
    """Divide the embeddings by their length."""
    int8: Int8 | None = None
    """Quantize to 8 bits."""
    opset: int | None = None
    """Version of ONNX's operators; None for the exporter's default."""
    batch: int | None = None
    """Fixed number of images per call; None for any number, or for one if the format has no free size."""
    run_config: bool = False
    """Store the config of the run in the metadata. It names folders of the machine that trained the network."""
    images: Any = None
    """Tensor of faces, uint8 (N, H, W, 3): file and network are compared on them, and `int8` is calibrated with most of
    them. None: a few random images, and for `int8` drawn faces."""


@dataclass(frozen=True)
class Similarity:
    """Cosines between the embeddings of a file and of the network."""

    mean: float
    lowest: float
    images: int


@dataclass(frozen=True)
class FileComparison:
    """Comparison of a file with the network: embeddings and speed."""

    difference: float
    """Largest difference of a number, as a share of the largest number in the network's embeddings."""
    cosine: Similarity
    runtime: str
    """Program that ran the file, and its version."""
    milliseconds: float
    """Median time of one call for one image, or for a fixed batch."""
    torch_milliseconds: float
    """The same for the network in torch, in the form that `facetrain embed` runs."""
    batch: int
    """Images of such a call."""
    threads: int
    """Threads of torch, which runtimes that can be set use too."""


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    files: list[Path]
    """The file, and a second one that belongs to it."""
    model: Path | EmbeddingModel
    """The file as `facetrain.verify.evaluate.evaluate` takes it, to measure its accuracy."""
    comparison: FileComparison | None
    """Embeddings and speed of the file beside the network's; None for a file that is not compared."""


_INPUT_OPTIONS = frozenset({"from_pixels", "unit", "batch"})


@dataclass(frozen=True)
class ExportFormat:
    """A row of the registry."""

    module: str
    """Module below `facetrain.models.export` whose function `write` is a `Writer` (see `runtime`); imported when the
    format is used."""
    options: frozenset[str] = frozenset()
    """Fields of `ExportOptions` that the format supports."""
    packages: tuple[str, ...] = ()
    """Optional packages that the exporter imports; the extra of pyproject.toml with the name of the module installs
    them."""
    suffix: str = ""
    """End that the name of the file must have."""
    second_suffix: str = ""
    """Suffix of a second file, which follows the name, or replaces its last suffix if the format prescribes one; empty
    if there is none."""
    is_compared: bool = True
    """Whether a runtime opens the file, to compare its embeddings with the network."""
    takes_landmarks: bool = False
    """Whether a network with a second input for landmarks is tested in this format."""

    def files(self, path: Path) -> list[Path]:
        """Return the files that an export to `path` writes."""
        if not self.second_suffix:
            return [path]
        name = path.with_suffix("").name if self.suffix else path.name
        return [path, path.with_name(name + self.second_suffix)]

    def load(self) -> Callable[..., Any]:
        """Import the module and its packages.

        Raises:
            ModelError: a package is not installed.
        """
        try:
            for package in self.packages:
                import_module(package)
        except ImportError as error:
            raise ModelError(f"this export format {missing_package(error, self.module)}") from error
        write: Callable[..., Any] = import_module(f"{__package__}.{self.module}").write
        return write


FORMATS: dict[str, ExportFormat] = {
    "safetensors": ExportFormat(
        "safetensors", suffix=".safetensors", is_compared=False, takes_landmarks=True
    ),
    "onnx": ExportFormat(
        "onnx",
        _INPUT_OPTIONS | {"int8", "opset", "run_config"},
        packages=("onnx", "onnxruntime", "onnxscript"),  # torch's exporter imports onnxscript
        second_suffix=".data",
        takes_landmarks=True,
    ),
    "torch_export": ExportFormat("torch_program", takes_landmarks=True),
    "openvino": ExportFormat(
        "openvino",
        _INPUT_OPTIONS | {"run_config"},
        packages=("onnx", "onnxscript", "openvino"),
        suffix=".xml",
        second_suffix=".bin",
        takes_landmarks=True,
    ),
    "ncnn": ExportFormat(
        "ncnn", packages=("onnx", "onnxscript", "ncnn", "pnnx"), suffix=".ncnn.param", second_suffix=".bin"
    ),
    "tflite": ExportFormat(
        "tflite", _INPUT_OPTIONS, packages=("litert_torch", "ai_edge_litert"), suffix=".tflite"
    ),
    "executorch": ExportFormat(
        "executorch",
        _INPUT_OPTIONS | {"run_config"},
        packages=("executorch.runtime", "executorch.exir"),
        suffix=".pte",
    ),
}
"""All export formats."""
