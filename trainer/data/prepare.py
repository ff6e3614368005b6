"""Converts any source to shards: `python -m trainer.data.prepare SRC DST --image_size=64 --channels=3`.

Decodes once what every run would decode again, with one shard of an image folder or of TFRecord files in memory at a
time. After an interruption, the same command resumes after the last complete shard.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import DONE, UserError
from trainer.base.log import log, set_verbose
from trainer.base.settings.flags import VERBOSE, Parser, refuse_unknown, whole
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.base.terminal import ProgressBar
from trainer.user_code.command import quiet_start, run_command

with quiet_start():
    from trainer.base.storage import Address, local_path, output_address
    from trainer.data.destination import LocalFolder, RemoteFolder
    from trainer.data.encoded_images import DecodingReport, refuse_empty_classes, refuse_or_skip
    from trainer.data.image_arrays import labelled, numbered_classes
    from trainer.data.pieces import Piece, Source, source_of
    from trainer.data.shards import INDEX, INDEX_FORMAT, LABEL, parse_index

JOURNAL = ".prepare.json"
_SETTINGS = ("image_size", "channels", "skip_bad_images", "evaluation_fraction", "seed", "cache_dir")


def prepare(
    config: TrainConfig, destination: Path | Address, shard_mib: int, on_piece: Callable[[int, int], None]
) -> dict[str, Any]:
    """Writes the shards and, last, index.json; returns the index. Calls `on_piece(items done, all items)` after each.

    Raises UserError if the source cannot be read, or has images that cannot be decoded and must not be skipped.
    """
    folder = RemoteFolder(destination) if isinstance(destination, Address) else LocalFolder(destination)
    source = source_of(config, max(1, shard_mib * 2**20 // (config.image_size**2 * config.channels)))
    if before := folder.read(INDEX):
        index = parse_index(before, destination)
        if index.get("fingerprint") == source.fingerprint:
            return index
        raise UserError(f"{destination} contains shards of other data or settings: use another folder, or remove it")
    journal = Journal(folder, source.fingerprint)
    total, items = sum(piece.items for pieces in source.splits.values() for piece in pieces), 0
    written: dict[str, list[dict[str, Any]]] = {}
    for split, pieces in source.splits.items():
        written[split] = []
        for number, piece in enumerate(pieces):
            name = f"{split}-{number:05d}.bin"
            written[split].append(journal.entry(name) or journal.write(name, piece))
            items += piece.items
            on_piece(items, total)
    index = _index(config, source, written)
    folder.write(INDEX, (json.dumps(index, indent=1) + "\n").encode())
    folder.remove(JOURNAL)
    return index


class Journal:
    """Records which shards of a source are already written."""

    def __init__(self, folder: LocalFolder | RemoteFolder, fingerprint: str) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        try:
            content = json.loads(folder.read(JOURNAL) or b"{}")
            self._shards: dict[str, Any] = content["shards"] if content["fingerprint"] == fingerprint else {}
        except (ValueError, KeyError, TypeError):
            self._shards = {}

    def entry(self, name: str) -> dict[str, Any] | None:
        """Returns the entry of a shard, or None if its file is missing or of another size."""
        entry: dict[str, Any] | None = self._shards.get(name)
        return None if entry and entry["examples"] and self._folder.size(name) != entry.get("bytes") else entry

    def write(self, name: str, piece: Piece) -> dict[str, Any]:
        """Writes one shard and records it; only records a shard without images."""
        bad = DecodingReport()
        arrays = piece.get(bad)
        content = b"" if arrays is None else arrays.images.tobytes()
        if arrays is not None and arrays.labels is not None:
            content += arrays.labels.astype(LABEL).tobytes()
        entry: dict[str, Any] = {
            "file": name,
            "examples": 0 if arrays is None else arrays.count,
            "labelled": arrays is not None and arrays.labelled,
            "labels": [] if arrays is None or arrays.labels is None else np.unique(arrays.labels).tolist(),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "converted": dict(bad.converted),
            "skipped": [[str(file), why] for file, why in bad.files],
        }
        if content:
            self._folder.write(name, content)
        self._shards[name] = entry
        self._folder.write(JOURNAL, json.dumps({"fingerprint": self._fingerprint, "shards": self._shards}).encode())
        return entry


def _index(config: TrainConfig, source: Source, written: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    entries = [entry for split in written.values() for entry in split]
    bad = DecodingReport([(Path(file), why) for entry in entries for file, why in entry["skipped"]])
    bad.converted = sum((Counter(entry["converted"]) for entry in entries), Counter())
    bad.left_out = source.left_out
    refuse_or_skip(config, bad)
    filled = {split: [entry for entry in shards if entry["examples"]] for split, shards in written.items()}
    if not filled["train"]:
        raise UserError(f"SRC={config.data}: no image is left to train on")
    labels = {split: {label for entry in shards for label in entry["labels"]} for split, shards in filled.items()}
    if labels["train"]:
        refuse_empty_classes(config, source.class_names, labels["train"])
    origin = f"SRC={config.data}"
    return {
        "format": INDEX_FORMAT,
        "fingerprint": source.fingerprint,
        "image_shape": [config.image_size, config.image_size, config.channels],
        "class_names": list(source.class_names or numbered_classes(set().union(*labels.values()))),
        "labelled": {
            split: labelled((entry["labelled"] for entry in shards), origin, "files")
            for split, shards in filled.items()
        },
        "splits": {
            split: [{key: entry[key] for key in ("file", "examples", "sha256")} for entry in shards]
            for split, shards in filled.items()
        },
        "source": config.data,
        **bad.notes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares SRC into DST with a progress bar. Returns the exit code."""
    return run_command(lambda: _prepare(arguments), "resumes after the last complete shard")


def _prepare(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="python -m trainer.data.prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", metavar="SRC", help="a folder, a file or a name, as for --data")
    parser.add_argument("destination", metavar="DST", help="the folder for the shards, local or at gs://")
    parser.add_argument("--shard_mib", type=whole(1, 4096), default=64, help="size of a shard (default: 64)")
    parser.epilog = f"These settings of the trainer apply too: {' '.join(f'--{name}' for name in _SETTINGS)}"
    parser.add_boolean("verbose", VERBOSE)
    options, flags = parser.parse_known_args(arguments)
    refuse_unknown(flags, [*_SETTINGS, "shard_mib", "verbose"])
    set_verbose(options.verbose)
    config = resolve(["--global_batch_size=1", "--model=any:model", *flags, f"--data={options.source}"]).config
    destination = output_address(options.destination, "DST") or local_path(options.destination, "DST")
    with closing(ProgressBar("text", "bar", "count", "left", text="prepare")) as bar:
        index = prepare(
            config, destination, options.shard_mib, lambda count, total: bar.update(completed=count, total=total)
        )
    counts = {split: sum(entry["examples"] for entry in entries) for split, entries in index["splits"].items()}
    shown = ", ".join(f"{count:,} {split}" for split, count in counts.items() if count)
    log.info(f"{options.destination}: {shown}, {'x'.join(map(str, index['image_shape']))} (height x width x channels)")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
