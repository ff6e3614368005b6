"""Any source -> shards: `python -m trainer.data.prepare SRC DST --image_size=64 --channels=3`.

Decodes once what every run would decode again. Image folders and TFRecord files pass through memory a shard at a time.
Interrupted, the same command goes on after the last whole shard.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.command import quiet_start, run_command
from trainer.config.flags import Parser, refuse_unknown, whole
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig, said_kind
from trainer.errors import DONE, UserError
from trainer.log import log

with quiet_start():
    from trainer.data import image_folder, sources, tfrecord
    from trainer.data.arrays import numbered_classes
    from trainer.data.dataset import Arrays, Examples
    from trainer.data.destination import Destination, LocalFolder, RemoteFolder
    from trainer.data.image_folder import Bad
    from trainer.data.shards import FORMAT, INDEX, LABEL, parse_index
    from trainer.storage import Address, local_path, output_address, parse
    from trainer.storage.staging import Staged

JOURNAL = ".prepare.json"
_SETTINGS = ("image_size", "channels", "skip_bad_images", "evaluation_fraction", "seed", "cache_dir")

Present = Callable[[Sequence[Path]], AbstractContextManager[Any]]  # makes files whole within its block


@dataclass(frozen=True)
class Piece:
    """What becomes one shard: how many source items (files or examples) it takes, and how to get them."""

    items: int
    get: Callable[[Bad], Arrays | None]


@dataclass(frozen=True)
class Source:
    """Splits of pieces. The fingerprint is of all that would change a shard. Without class names labels are numbers."""

    splits: dict[str, list[Piece]]
    class_names: tuple[str, ...]
    fingerprint: str


def prepare(
    config: TrainConfig, destination: Path | Address, shard_mib: int, on_piece: Callable[[int, int], None]
) -> dict[str, Any]:
    """Writes the shards and, last, index.json; returns the index. `on_piece(items done, items in all)` hears of each.

    UserError where the source cannot be read, or has images that cannot be decoded and may not be skipped.
    """
    place = RemoteFolder(destination) if isinstance(destination, Address) else LocalFolder(destination)
    source = _source(config, max(1, shard_mib * 2**20 // (config.image_size**2 * config.channels)))
    if before := place.read(INDEX):
        index = parse_index(before, destination)
        if index.get("fingerprint") == source.fingerprint:
            return index
        raise UserError(
            f"{destination} holds shards of other data or settings ({_differing(config, index)}): give another folder, "
            "or remove it"
        )
    journal = Journal(place, source.fingerprint)
    total, done = sum(piece.items for pieces in source.splits.values() for piece in pieces), 0
    written: dict[str, list[dict[str, Any]]] = {}
    for split, pieces in source.splits.items():
        written[split] = []
        for number, piece in enumerate(pieces):
            name = f"{split}-{number:05d}.bin"
            written[split].append(journal.known(name) or journal.write(name, piece))
            done += piece.items
            on_piece(done, total)
    index = _index(config, source, written)
    place.write(INDEX, (json.dumps(index, indent=1) + "\n").encode())
    place.remove(JOURNAL)
    return index


def _about(config: TrainConfig) -> dict[str, Any]:
    """The settings that an index keeps beside the source, to name what differs."""
    return {name: getattr(config, name) for name in ("image_size", "channels", "evaluation_fraction", "seed")}


def _differing(config: TrainConfig, index: Mapping[str, Any]) -> str:
    """Why these are not the shards of an index, as far as it tells."""
    kept, here = index.get("settings"), {"SRC": config.data, **_about(config)}
    there = {"SRC": index.get("source"), **(kept if isinstance(kept, dict) else {})}
    shown = [f"{key}: {there[key]} there, {here[key]} here" for key in here if there.get(key, here[key]) != here[key]]
    return "; ".join(shown) or "its files changed, or the size of a shard"


class Journal:
    """Which shards of this very source are written already."""

    def __init__(self, place: Destination, fingerprint: str) -> None:
        self.place, self.fingerprint = place, fingerprint
        try:
            content = json.loads(place.read(JOURNAL) or b"{}")
            self.shards: dict[str, Any] = content["shards"] if content["fingerprint"] == fingerprint else {}
        except (ValueError, KeyError, TypeError):
            self.shards = {}

    def known(self, name: str) -> dict[str, Any] | None:
        """The entry of a shard that stands there whole."""
        entry: dict[str, Any] | None = self.shards.get(name)
        if entry and entry["examples"] and not self.place.holds(name, entry):
            return None
        return entry

    def write(self, name: str, piece: Piece) -> dict[str, Any]:
        """Makes and writes one shard whole, and notes it; one without any image is only noted."""
        bad = Bad()
        arrays = piece.get(bad)
        content = b"" if arrays is None else arrays.images.tobytes()
        if arrays is not None and arrays.labels is not None:
            content += arrays.labels.astype(LABEL).tobytes()
        entry: dict[str, Any] = {
            "file": name,
            "examples": 0 if arrays is None else arrays.count,
            "labelled": arrays is not None and arrays.labelled,
            "most_label": -1 if arrays is None or arrays.labels is None else int(arrays.labels.max()),
            "sha256": hashlib.sha256(content).hexdigest(),
            "converted": dict(bad.converted),
            "skipped": [[str(file), why] for file, why in bad.files],
        }
        if content:
            entry |= self.place.write(name, content)
        self.shards[name] = entry
        self.place.write(JOURNAL, json.dumps({"fingerprint": self.fingerprint, "shards": self.shards}).encode())
        return entry


def _index(config: TrainConfig, source: Source, written: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    entries = [entry for split in written.values() for entry in split]
    bad = Bad([(Path(file), why) for entry in entries for file, why in entry["skipped"]])
    bad.converted = sum((Counter(entry["converted"]) for entry in entries), Counter())
    image_folder.refuse_or_skip(config, bad)
    splits = {
        split: [{key: entry[key] for key in ("file", "examples", "sha256")} for entry in some if entry["examples"]]
        for split, some in written.items()
    }
    if not splits["train"]:
        raise UserError(f"SRC={config.data}: no image is left to train on")
    return {
        "format": FORMAT,
        "fingerprint": source.fingerprint,
        "image_shape": [config.image_size, config.image_size, config.channels],
        "class_names": list(source.class_names or numbered_classes(max(entry["most_label"] for entry in entries))),
        "labelled": {split: _labelled(config, some) for split, some in written.items()},
        "splits": splits,
        "source": config.data,
        "settings": _about(config),
        **bad.notes,
    }


def _labelled(config: TrainConfig, entries: list[dict[str, Any]]) -> bool:
    """Whether the examples of a split have labels; UserError where only some have."""
    found = {entry["labelled"] for entry in entries if entry["examples"]}
    if len(found) > 1:
        raise UserError(f"SRC={config.data}: some files have labels and some have none: label all of them, or none")
    return found == {True}


def _source(config: TrainConfig, per_shard: int) -> Source:
    kind, path, present = _located(config)
    if kind == "folder" and not config.evaluation_fraction:
        return _folder_source(config, path, per_shard, present)
    if kind == "tfrecord" and not config.evaluation_fraction:
        return _tfrecord_source(config, path, present)
    fingerprint = _fingerprint(config, per_shard, path, _files(kind, path))  # before they are read: of nothing newer
    dataset = sources.load_dataset(config)
    parts = {"train": dataset.train, "evaluation": dataset.evaluation}
    splits = {name: _slices(part, per_shard) for name, part in parts.items() if part is not None}
    return Source(splits, dataset.class_names, fingerprint)


def _located(config: TrainConfig) -> tuple[str, Path, Present]:
    """The kind of the data, where its files lie, and how they are made present: remote ones a piece at a time."""
    if sources.is_named(config.data):
        return "", Path(), nullcontext
    said, where = said_kind(config.data)
    address = parse(where, "SRC")
    if address is None:
        return *sources.kind_and_path(config.data), nullcontext
    staged = Staged(address, "SRC", config.cache_dir)
    path = staged.outline()
    return said or sources.recognise(config.data, path), path, staged.present


def _files(kind: str, path: Path) -> list[Path]:
    """What a source at `path` is read from; nothing for a name or a user's own function."""
    if not kind:
        return []
    if kind == "folder":
        return [file for part in image_folder.find(path) if part for file in part.files]
    if kind == "tfrecord":
        return [file for files in tfrecord.find(path) for file in files]
    if not path.is_dir():
        return [path]
    return [file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith(".")]


def _folder_source(config: TrainConfig, path: Path, per_shard: int, present: Present) -> Source:
    train, evaluation = image_folder.find(path)
    splits = {}
    for name, folder in (("train", train), ("evaluation", evaluation)):
        if folder is not None:
            starts = range(0, len(folder.files), per_shard)
            parts = [folder.part(start, start + per_shard) for start in starts]
            splits[name] = [Piece(len(part.files), _decoder(config, part, present)) for part in parts]
    files = [file for folder in (train, evaluation) if folder for file in folder.files]
    return Source(splits, train.class_names, _fingerprint(config, per_shard, path, files))


def _decoder(config: TrainConfig, part: image_folder.Folder, present: Present) -> Callable[[Bad], Arrays | None]:
    def decode(bad: Bad) -> Arrays | None:
        with present(part.files):
            return image_folder.decode_folder(config, part, bad)

    return decode


def _tfrecord_source(config: TrainConfig, path: Path, present: Present) -> Source:
    """One shard a file: how many records a file holds is known only when it was read."""
    train, evaluation = tfrecord.find(path)

    def piece(file: Path) -> Piece:
        def read(bad: Bad) -> Arrays | None:
            with present([file]):
                return tfrecord.read(config, [file], bad)

        return Piece(1, read)

    splits = {"train": [piece(file) for file in train], "evaluation": [piece(file) for file in evaluation]}
    return Source(splits, (), _fingerprint(config, 0, path, [*train, *evaluation]))


def _slices(part: Examples, per_shard: int) -> list[Piece]:
    import numpy as np

    def piece(start: int, stop: int) -> Piece:
        def get(bad: Bad) -> Arrays:
            return Arrays(*(found.numpy() for found in part.gather(np.arange(start, stop, dtype=np.int32))))

        return Piece(stop - start, get)

    return [piece(start, min(start + per_shard, part.count)) for start in range(0, part.count, per_shard)]


def _fingerprint(config: TrainConfig, per_shard: int, path: Path, files: Sequence[Path]) -> str:
    stats = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    what = [config.data, config.image_size, config.channels, config.evaluation_fraction, config.seed, per_shard, stats]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares SRC into DST with a progress bar. Returns the exit code."""
    return run_command(lambda: _prepare(arguments), "resumes after the last whole shard")


def _prepare(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m trainer.data.prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", metavar="SRC", help="what --data takes: a folder, a file, a name")
    parser.add_argument("destination", metavar="DST", help="the folder that the shards go to, here or at gs://")
    parser.add_argument("--shard_mib", type=whole(1, 4096), default=64, help="size of a shard (default: 64)")
    parser.epilog = f"And of the trainer's settings: {' '.join(f'--{name}' for name in _SETTINGS)}"
    options, flags = parser.parse_known_args(arguments)
    refuse_unknown(flags, [*_SETTINGS, "shard_mib"])
    config = resolve(["--global_batch_size=1", "--model=any:model", *flags, f"--data={options.source}"]).config
    index = _with_bar(config, _destination(options.destination), options.shard_mib)
    counts = {split: sum(entry["examples"] for entry in entries) for split, entries in index["splits"].items()}
    shown = ", ".join(f"{count:,} {split}" for split, count in counts.items() if count)
    log.info(f"{options.destination}: {shown}, {'x'.join(map(str, index['image_shape']))} (height x width x channels)")
    return DONE


def _destination(path: str) -> Path | Address:
    return output_address(path, "DST") or local_path(path, "DST")


def _with_bar(config: TrainConfig, destination: Path | Address, shard_mib: int) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prepare"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("", total=None)
        return prepare(
            config, destination, shard_mib, lambda done, total: bar.update(task, completed=done, total=total)
        )


if __name__ == "__main__":
    sys.exit(main())
