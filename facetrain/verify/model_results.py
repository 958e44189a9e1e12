"""Results of a model on several sets, the input of `verify/output`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from facetrain.verify.metrics.result import Result
from facetrain.verify.model_comparison import Difference, compare_results
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.sets.open_sets import AnySet


@dataclass(frozen=True)
class ModelResults:
    """Results of a model on all sets, and its differences to another model."""

    description: str
    """Architecture and origin of the model, for the reader."""
    results: dict[str, Result]
    """Results by the name of the set; IJB's 1:N protocol is `NAME_1n`. Empty on all ranks but the leader."""
    sets: dict[str, AnySet]
    """The sets by name: the report shows the images of the hardest pairs."""
    is_leader: bool
    """True on the rank that has the results."""
    precision: str = "fp32"
    """Precision of the networks: fp32, on GPUs maybe with TF32, bf16, or that of an ONNX file; empty without a network.
    """
    options: EvaluationOptions = field(default_factory=EvaluationOptions)
    """Options of the protocols."""
    step: int | None = None
    """Number of training steps of the weights, if the file of the model has it."""
    against: str = ""
    """Path of the other model, with its description and precision; or that of other scores; empty without one."""
    other_results: dict[str, Result] = field(default_factory=dict)
    """Results of the other model by set, for the figures."""
    differences: dict[str, dict[str, Difference]] = field(default_factory=dict)
    """Differences to the other model by set and metric."""

    def compared_with(self, against: str, results: dict[str, Result]) -> ModelResults:
        """Return the results beside the results of another model on the same sets, and the differences."""
        differences = {name: compare_results(result, results[name]) for name, result in self.results.items()}
        return replace(self, against=against, other_results=results, differences=differences)

    def as_json(self) -> dict[str, Any]:
        """Return all metrics of all sets."""
        content: dict[str, Any] = {
            "description": self.description,
            "step": self.step,
            "precision": self.precision,
            "options": asdict(self.options),
            "sets": {name: result.as_json() for name, result in self.results.items()},
        }
        if self.against:
            content["against"] = self.against
            content["differences"] = {
                name: {metric: difference.as_json() for metric, difference in by_metric.items()}
                for name, by_metric in self.differences.items()
            }
        return content
