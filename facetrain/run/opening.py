"""Opening lines of a run: what it trains and how, and what differs from its checkpoint. For the leader only."""

from __future__ import annotations

from collections.abc import Callable

from facetrain.backbone.low_rank import trained_share
from facetrain.data.build import read_training_cards
from facetrain.data.dataset_card import card_text
from facetrain.data.skipped_files import skipped_count, skipped_summary, skipped_table
from facetrain.device.capability import float32_name
from facetrain.files import write_atomically
from facetrain.models.model_file import CARDS_KEY
from facetrain.run.build import Parts
from facetrain.run.folder.run_files import CARDS_FILE, LEFT_OUT_FILE
from facetrain.run.outputs import RunOutputs
from facetrain.text import count_text, images_text


def report_start(parts: Parts, outputs: RunOutputs) -> None:
    """Report what a run begins with, and copy the cards of its data to the run folder."""
    outputs.report(_opening_line(parts))
    for line in parts.plan.chosen:
        outputs.report(line)
    if parts.state.centers_remark:
        outputs.report(parts.state.centers_remark)
    _report_config_changes(parts, outputs)
    report_skipped_files(parts, outputs.print)
    # The cards beside the data may change, and the model may have been trained on other data before.
    cards = card_text(read_training_cards(parts.config.data), before=parts.state.earlier.get(CARDS_KEY))
    write_atomically(parts.folder / CARDS_FILE, cards)


def _opening_line(parts: Parts) -> str:
    config, world, schedule, step = parts.config, parts.world, parts.schedule, parts.state.step
    verified = float32_name(world.device)
    trained = verified if config.train.precision == "fp32" else config.train.precision
    batches = sorted({stage.global_batch_size for stage in schedule.stages})
    sizes = f"{batches[0]:,}" + (f" to {batches[-1]:,}" if len(batches) > 1 else "")
    return (
        f"{parts.folder}: {images_text(parts.data.source.num_images, parts.data.source.num_classes)}; "
        f"{config.model.backbone}{_adapters_text(parts)}, {config.head.margin.type}; "
        f"{count_text(schedule.total_steps, 'step')} of {sizes} images "
        f"on {world.size} × {world.device.type} in {trained}"
        + (f", verified in {verified}" if parts.data.sets and verified != trained else "")
        + f"; {parts.state.describe_execution()}"
        + (f"; resuming from step {step:,}" if step else "")
    )


def _adapters_text(parts: Parts) -> str:
    lora = parts.config.model.lora
    if lora is None:
        return ""
    return f" with adapters of rank {lora.rank} ({trained_share(parts.state.backbone):.2%} of its parameters)"


def _report_config_changes(parts: Parts, outputs: RunOutputs) -> None:
    """Report every config key that differs from the checkpoint: printed, in log.txt and in metrics.jsonl."""
    for change in parts.plan.changes:
        outputs.report(f"config changed since the checkpoint of step {parts.state.step}: {change}")
        values = {"config_key": change.key, "before": change.before, "now": change.now}
        if outputs.journal:
            outputs.journal.write(parts.state.step, values)


def report_skipped_files(parts: Parts, print_message: Callable[[str], None]) -> None:
    """Print the counts of the files of the dataset that are not images of it, and list them in the run folder."""
    skipped = parts.data.source.skipped
    if skipped:
        path = parts.folder / LEFT_OUT_FILE
        write_atomically(path, skipped_table(skipped))
        print_message(
            f"left out {skipped_count(skipped)} of {parts.config.data.train}, see {path}: "
            + "; ".join(skipped_summary(skipped))
        )
