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


@dataclass(frozen=True)
class Similarity:
    """Cosines of the embeddings of a file with those of the network, on images that did not change the file."""

    mean: float
    lowest: float
    images: int


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    difference: float | None
    """Largest difference between the embeddings of file and network, as a share of the largest number in
    an embedding; None for a format that is not compared."""
    model: Path | EmbeddingModel | None
    """The file as `facetrain.verify.evaluate.evaluate` takes it, to measure its accuracy; None if the file
    has the same weights as the network."""
    similarity: Similarity | None = None
    """For a file that must differ from the network, because it computes in int8."""


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
    "safetensors": ExportFormat("torch_formats", "export_safetensors"),
    "onnx": ExportFormat(
        "onnx",
        "export_onnx",
        frozenset({"from_pixels", "unit", "int8", "calibration"}),
        packages=("onnx", "onnxruntime", "onnxscript"),  # torch's exporter imports onnxscript
        extra="onnx",
    ),
    "torch_export": ExportFormat("torch_formats", "export_program"),
}
"""All export formats."""
