"""Settings of the verification during training (section `eval` of the config)."""

from __future__ import annotations

from facetrain.settings import PathText, Positive, Settings


class EvalSettings(Settings):
    """Verification during training."""

    targets: tuple[PathText, ...] = ("lfw", "cfp_fp", "agedb_30")
    """Verification sets: names of .bin files in `dir`, or paths. TinyFace, IJB and the folders of CVLface are
    evaluated after a run, by `facetrain eval`."""
    dir: PathText | None = None
    """Folder of the verification sets. null: the folder of `data.train`."""
    every_steps: Positive = 2000
    """Number of steps between two verifications. The run also verifies before its first and after its last step."""
    batch_size: Positive = 256
    """Images per rank that are embedded at once."""
