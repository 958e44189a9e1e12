"""Config that a request asks for: of a new run, with the verification sets that the data has; or of an earlier one."""

from __future__ import annotations

from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facetrain.checkpoint.mirror import Mirror
from facetrain.config.loading import (
    CONFIG_FILE,
    build_config,
    is_set,
    load_config,
    override_keys,
    parse_values,
    plain_config,
    read_merged,
)
from facetrain.config.own_code import allow_code_of, require_code_allowed
from facetrain.config.paths import address_of_set
from facetrain.config.schema import Config
from facetrain.data.formats.set_names import has_bin_suffix, is_bin, set_name, without_suffixes
from facetrain.errors import PairsError, UsageError
from facetrain.files import require_temporary_folder
from facetrain.remote.address import is_read_in_place, is_remote, public
from facetrain.remote.listing import list_names
from facetrain.run.folder.run_files import find_advice, name_of_run, newest_run
from facetrain.run.request import CHOSEN_KEYS, TrainRequest, as_override
from facetrain.verify.sets.pair_set import set_file


@dataclass(frozen=True)
class AskedConfig:
    """Config as a command asks for it, before anything of the run is read."""

    config: Config
    set_keys: frozenset[str]
    """Config keys and sections that the command sets itself: a run that continues may change by them."""
    given: dict[str, Any]
    """All values, without what the data has decided: the command of another host must give the same."""
    remarks: tuple[str, ...] = ()
    """What the data has decided, a line each."""


def asked_config(request: TrainRequest) -> AskedConfig:
    """Read the config of a new run.

    Raises:
        UsageError: a value is given and to be chosen.
        ConfigError: the config or a value is invalid.
        DataError: the dataset is in a store that does not answer, or that has no such folder.
    """
    set_keys = override_keys(request.overrides)
    for choice in request.choose:
        if both := [key for key in CHOSEN_KEYS[choice] if is_set(set_keys, key)]:
            word = "auto" if choice == "batch" else "find"
            raise UsageError(f"--{choice} {word} and --set {both[0]}: give one of them")
    set_keys |= request.measured.keys()
    config = _build(request)
    allow_code_of(config)
    given = plain_config(config)
    if not request.own_data:
        return AskedConfig(config, set_keys, given)
    # Only folders and stores can be listed: the sets beside other data are downloaded when the run starts.
    has_list = not is_remote(config.eval_dir) or is_read_in_place(config.eval_dir)
    if is_set(set_keys, "eval.targets", "eval.dir") or not has_list:
        return AskedConfig(config, set_keys, given)
    targets, remarks = _sets_that_exist(config)
    config = _build(request, as_override("eval.targets", targets))
    return AskedConfig(config, set_keys | {"eval.targets"}, given, remarks)


def recorded_config(request: TrainRequest) -> tuple[Path, AskedConfig]:
    """Read the config of the run that `resume` names: from its folder, or from its mirror if that is newer.

    Return the folder on this disk, and the config.

    Raises:
        UsageError: there is no such run; or no folder for the temporary files of its mirror.
        ConfigError: its config or a value is invalid.
        CheckpointError: the mirror does not answer.
    """
    remarks, overrides, mirror = list[str](), list(request.overrides), None
    if request.run_dir and is_remote(request.run_dir):
        require_temporary_folder()
        parent, _, name = request.run_dir.rstrip("/").rpartition("/")
        folder, mirror = Path("runs", name), Mirror(f"{parent}/{name}")
        overrides.insert(0, f"checkpoint.mirror={parent}")
    elif request.run_dir:
        folder = Path(request.run_dir)
    else:
        folder = newest_run()
        remarks.append(f"{folder}: the newest run")
    path = folder / CONFIG_FILE
    values, where = (read_merged(path), str(path)) if path.is_file() else (None, "")
    if values is not None and mirror is None:
        mirror = open_mirror(build_config(values, where, overrides), folder)
    if mirror and (values is None or _is_behind(folder, mirror)):
        where = f"{public(mirror.url)}/{CONFIG_FILE}"
        values = parse_values(mirror.read_text(CONFIG_FILE), where)
    if values is None:
        raise UsageError(
            f"{folder}: not the folder of a run (it has no {CONFIG_FILE}); {find_advice(folder)}"
        )
    config = build_config(values, where, overrides)
    if request.allow_code:
        allow_code_of(config)
    require_code_allowed(config, where)
    keys = override_keys(request.overrides)
    return folder, AskedConfig(config, keys, plain_config(config), tuple(remarks))


def open_mirror(config: Config, folder: Path) -> Mirror | None:
    """Return the mirror of the run in a folder; None without `checkpoint.mirror`.

    Raises:
        UsageError: there is no folder for the temporary files of a mirror.
    """
    url = config.checkpoint.mirror
    if not url:
        return None
    require_temporary_folder()
    return Mirror(f"{url}/{name_of_run(folder)}")


def _is_behind(folder: Path, mirror: Mirror) -> bool:
    # Imported here, with torch: a wrong path is then found in a fraction of the time.
    from facetrain.run.folder.starting_point import is_behind

    return is_behind(folder, mirror)


def _build(request: TrainRequest, *more: str) -> Config:
    measured = (as_override(key, value) for key, value in request.measured.items())
    source, overrides = request.config, [*request.overrides, *measured, *more]
    if isinstance(source, str):
        return load_config(Path(source), overrides)
    return build_config(source or {}, "the defaults" if source is None else "config", overrides)


def _sets_that_exist(config: Config) -> tuple[list[str], tuple[str, ...]]:
    """Return the sets of a config that lie beside the user's data, or all that lie there if none does; and remarks."""
    folder = config.eval_dir
    stored = list_names(folder) if is_remote(folder) else None
    # Of two files of a set, the .bin. Without its suffix: every other target names its file.
    in_store = {
        set_name(Path(name)): name.removesuffix(".bin")
        for name in sorted(stored or (), reverse=True)
        if has_bin_suffix(Path(name))
    }
    targets = [in_store.get(without_suffixes(target), target) for target in config.eval.targets]
    present = [target for target in targets if _exists(target, folder, stored)]
    absent = [target for target in targets if target not in present]
    if present:
        missing = f"{folder} has no verification sets {', '.join(absent)}: training goes without"
        return present, (missing,) if absent else ()
    if stored is None:
        found = sorted({set_name(path) for path in Path(folder).glob("*") if is_bin(path)})
    else:
        found = sorted(in_store.values())
    if found:
        return found, (f"verified on the sets that lie in {folder}: {', '.join(found)}",)
    if not targets:
        return [], ()
    return [], (
        f"{folder} has no verification sets {', '.join(absent)}: training goes without; give the folder of others "
        "with --set eval.dir=FOLDER and their names with --set 'eval.targets=[NAME]'",
    )


def _exists(target: str, folder: str, stored: Set[str] | None) -> bool:
    """Return whether a set is an address, a path, or in a folder; `stored`: what a folder in a store has."""
    if stored is not None and (address := address_of_set(target, folder)):
        return address == target or address.rpartition("/")[2] in stored
    with suppress(PairsError):  # the run opens the set, and says what is wrong
        return is_remote(target) or is_bin(set_file(target, Path(folder)))
    return True
