"""Registry of export formats, by the name in `facetrain export --format`.

It imports no torch, so that the command line can list the formats at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from facetrain.errors import ModelError, missing_package

if TYPE_CHECKING:
    from torch import Tensor

    from facetrain.models.model_file import EmbeddingModel


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. A format supports those that its row in `FORMATS` names."""

    from_pixels: bool = False
    """Take uint8 RGB images (N, H, W, 3) and normalize them inside the network."""
    unit: bool = False
    """Divide the embeddings by their length."""
    int8: str | None = None
    """`dynamic` or `static`: quantize to 8 bits."""
    calibration: Sequence[bytes] = ()
    """Encoded images from which `int8="static"` finds the ranges of activations; drawn faces if there are none."""
    opset: int | None = None
    """Version of ONNX's operators; None for the exporter's default."""
    batch: int | None = None
    """Fixed number of images per call; None for any number, or for one if the format has no free size."""
    faces: Tensor | None = None
    """Images on which the file is compared with the network, uint8 (N, H, W, 3); None for a few random ones."""


@dataclass(frozen=True)
class Similarity:
    """Cosines of the embeddings of a file with those of the network, on images that a quantization did not use."""

    mean: float
    lowest: float
    images: int


@dataclass(frozen=True)
class Comparison:
    """The embeddings and the speed of a file beside those of the network."""

    difference: float
    """Largest difference of a number, as a share of the largest number in the network's embeddings."""
    cosine: Similarity
    """Cosines of the file's embeddings with those of the network."""
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

    comparison: Comparison | None
    """Embeddings and speed of the file beside the network's; None for a file that is not compared."""
    model: Path | EmbeddingModel
    """The file as `facetrain.verify.evaluate.evaluate` takes it, to measure its accuracy."""
    similarity: Similarity | None = None
    """For a file that must differ from the network, because it computes in int8."""
    weights: Path | None = None
    """Second file, for weights that are too large for the first one."""

    @property
    def difference(self) -> float | None:
        """Largest difference of the embeddings; see `Comparison.difference`."""
        return None if self.comparison is None else self.comparison.difference


Exporter = Callable[["EmbeddingModel", Path, ExportOptions], Exported]
"""Writes a network to a file, which appears complete or not at all."""


@dataclass(frozen=True)
class ExportFormat:
    """A row of the registry."""

    module: str
    """Module below `facetrain.models.export`; imported when the format is used."""
    function: str
    """Name of the `Exporter` in this module."""
    options: frozenset[str] = frozenset()
    """Fields of `ExportOptions` that the format supports."""
    packages: tuple[str, ...] = ()
    """Optional packages that the exporter imports."""
    extra: str = ""
    """Extra of pyproject.toml that installs these packages."""
    suffix: str = ""
    """End that the name of the file must have."""
    second_suffix: str = ""
    """Suffix of a second file beside it, which replaces the last one of its name; empty if there is none."""

    def files(self, path: Path) -> list[Path]:
        """Return the files that an export to `path` writes."""
        return [path, path.with_suffix(self.second_suffix)] if self.second_suffix else [path]

    def load(self) -> Exporter:
        """Import the exporter and its packages.

        Raises:
            ModelError: a package is not installed.
        """
        try:
            for package in self.packages:
                import_module(package)
        except ImportError as error:
            raise ModelError(f"this export format {missing_package(error, self.extra)}") from error
        exporter: Exporter = getattr(import_module(f"{__package__}.{self.module}"), self.function)
        return exporter


FORMATS: dict[str, ExportFormat] = {
    "safetensors": ExportFormat("torch_formats", "export_safetensors", suffix=".safetensors"),
    "onnx": ExportFormat(
        "onnx",
        "export_onnx",
        frozenset({"from_pixels", "unit", "int8", "calibration", "opset", "batch", "faces"}),
        packages=("onnx", "onnxruntime", "onnxscript"),  # torch's exporter imports onnxscript
        extra="onnx",
    ),
    "torch_export": ExportFormat("torch_formats", "export_program", frozenset({"faces"})),
    "openvino": ExportFormat(
        "openvino",
        "export_openvino",
        frozenset({"from_pixels", "unit", "batch", "faces"}),
        packages=("onnx", "onnxscript", "openvino"),
        extra="openvino",
        suffix=".xml",
        second_suffix=".bin",
    ),
    "ncnn": ExportFormat(
        "ncnn",
        "export_ncnn",
        frozenset({"faces"}),
        packages=("onnx", "onnxscript", "ncnn", "pnnx"),
        extra="ncnn",
        suffix=".ncnn.param",
        second_suffix=".bin",
    ),
    "tflite": ExportFormat(
        "tflite",
        "export_tflite",
        frozenset({"from_pixels", "unit", "batch", "faces"}),
        packages=("litert_torch", "ai_edge_litert"),
        extra="tflite",
        suffix=".tflite",
    ),
    "executorch": ExportFormat(
        "executorch",
        "export_executorch",
        frozenset({"from_pixels", "unit", "batch", "faces"}),
        packages=("executorch.runtime", "executorch.exir"),
        extra="executorch",
        suffix=".pte",
    ),
}
"""All export formats."""
