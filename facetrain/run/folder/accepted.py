"""Changes of a run that its continuation from a checkpoint has accepted, as `environment.json` keeps them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.changes import ConfigChange
from facetrain.run.folder.environment import ACCEPTED


class Accepted(BaseModel, frozen=True):
    """What differs from a checkpoint in a run that has continued from it, some of it by `--set`.

    A kill before the next checkpoint leaves the changed config beside the old checkpoint. The next start has the
    changes without the options that made them.
    """

    manifest: str = ""
    """Checksum of the checkpoint's manifest: the changes are in the config of each later one."""
    changes: tuple[ConfigChange, ...] = ()
    inputs: dict[str, Any] = {}
    """Digests of what the run reads, by name, that are not those of the checkpoint."""

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        manifest: str,
        changes: tuple[ConfigChange, ...],
        inputs: dict[str, Any],
    ) -> Accepted:
        """Return the changes with which a run continues from a checkpoint."""
        others = {name: digest for name, digest in inputs.items() if checkpoint.meta.get(name) != digest}
        return cls(manifest=manifest, changes=changes, inputs=others)

    @classmethod
    def since(cls, manifest: str, *environments: dict[str, Any]) -> Accepted:
        """Return the changes with which a run has continued from a checkpoint; none if no environment has them."""
        for environment in environments:
            with suppress(ValueError):  # a damaged file
                found = cls.model_validate(environment.get(ACCEPTED, {}))
                if found.manifest == manifest:
                    return found
        return cls()

    def new_changes(self, changes: list[ConfigChange]) -> list[ConfigChange]:
        """Return the changes that were not accepted with these values."""
        return [change for change in changes if change not in self.changes]

    def new_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the digests that were not accepted."""
        return {name: digest for name, digest in inputs.items() if self.inputs.get(name) != digest}
