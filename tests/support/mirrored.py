"""Checkpoints that a test saves and uploads to its object store."""

from facetrain.checkpoint.mirror import Mirror
from facetrain.checkpoint.save import CheckpointWriter
from facetrain.checkpoint.uploads import Uploads
from tests.support.object_store import BUCKET
from tests.support.snapshots import snapshot

URL = f"s3://{BUCKET}/runs/one"
RUN_ID = "0123456789abcdef"


def save(folder, step, *, note="a", **options):
    """Save a checkpoint on the local disk and return its outcome."""
    (folder / "run_id.txt").write_text(RUN_ID)
    writer = CheckpointWriter(folder / "checkpoints", asynchronous=False, keep=99)
    outcome = writer.save(snapshot(step, meta={"note": note, "run_id": RUN_ID}, **options))
    writer.finish()
    assert not outcome.failure
    return outcome


def uploads_of(folder, keep=3, best_metric=None, *, process="a", has_claimed=False):
    return Uploads(
        Mirror(URL, process=process),
        folder / "checkpoints",
        keep=keep,
        best_metric=best_metric,
        run_files=lambda: [folder / "run_id.txt"],
        has_claimed=has_claimed,
    )


def upload(folder, *outcomes, **options):
    """Upload saved checkpoints, each to its end; return why the last one is not in the mirror."""
    uploads = uploads_of(folder, **options)
    for outcome in outcomes:
        uploads.add(outcome)
        failure = uploads.finish()
    return failure
