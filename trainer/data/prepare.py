"""Converts any source to .npy shards: `python -m trainer.data.prepare SRC DST --image_size=64
--channels=3`.

It decodes once what every run would decode again, with one shard of an image folder or of TFRecord
files in memory at a time. After an interruption, the same command starts anew; `shards.py` reads
the result.
"""

import hashlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import DONE, UserError
from trainer.base.log import ProgressBar, log, set_verbose
from trainer.base.settings.fields import (
    VERBOSE,
    Usage,
    fields_of,
    options_class,
    parse_command,
    setting,
)
from trainer.base.settings.own_settings import is_named
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig, split_kind
from trainer.user_code.command import command, quiet_start

with quiet_start():
    import keras

    from trainer.base.storage import expanded, make_writable, output_address, parse, write_whole
    from trainer.base.storage.staging import naming
    from trainer.data import sources
    from trainer.data.examples import Arrays, Examples, as_numpy
    from trainer.data.fingerprint import content_of, files_of
    from trainer.data.image_arrays import numbered_classes
    from trainer.data.image_files import (
        DecodingReport,
        find_images,
        find_records,
        read_records,
        refuse_empty_classes,
        refuse_or_skip,
    )
    from trainer.data.order import RowNumbers
    from trainer.data.shards import FORMAT, INDEX, LABEL, SPLITS, open_split, read_index

_SETTINGS = (
    "image_size",
    "channels",
    "skip_bad_images",
    "evaluation_fraction",
    "seed",
    "cache_dir",
)
_SHARD_BYTES = 64 * 2**20  # of the images of a shard
# A function decodes a shard, and returns None if none of its images can be decoded.
Shard = Callable[[DecodingReport], Arrays | None]


@dataclass(frozen=True)
class Source:
    """Holds the shards of each split, and a fingerprint of everything that would change a shard."""

    splits: Mapping[str, Sequence[Shard]]
    class_names: tuple[str, ...]  # empty: classes are called by their numbers
    left_out: Counter[str]  # number of files that are no images, by suffix
    fingerprint: str


def source_of(config: TrainConfig, per_shard: int) -> Source:
    """Divides `config.data` into shards of `per_shard` images.

    Each TFRecord file is one shard.
    """
    content = files_of(config)  # before they are read: they may change meanwhile
    kind = ""
    path = Path()
    if not is_named(config.data):
        kind, path = sources.kind_and_path(config.data, config.cache_dir)
    class_names: tuple[str, ...] = ()
    left_out: Counter[str] = Counter()
    splits: list[list[Shard]] = []
    address = parse(split_kind(config.data)[1], "SRC")
    with naming(path, address):  # errors name the address, not the path of its local copy
        # The records of a file are counted when it is read.
        if kind == "tfrecord" and not config.evaluation_fraction:

            def decoded(file: Path, report: DecodingReport) -> Arrays | None:
                return read_records(config, [file]).decode(config, report)

            splits = [[partial(decoded, file) for file in files] for files in find_records(path)]
        elif kind == "folder" and not config.evaluation_fraction:
            folders = [split for split in find_images(path) if split]
            for folder in folders:
                splits.append([partial(part.decode, config) for part in folder.parts(per_shard)])
                left_out += folder.left_out
            class_names = folders[0].class_names
        # Other data are loaded as a whole. Their content is compared too, as a built-in source or a
        # function may change without a file.
        else:
            keras.utils.set_random_seed(config.seed)
            dataset = sources.load_dataset(config)
            for split in SPLITS if dataset.evaluation else SPLITS[:1]:
                examples = dataset.images(split)
                bounds = range(per_shard, examples.count, per_shard)
                blocks = np.split(np.arange(examples.count), bounds)

                def gathered(examples: Examples, rows: RowNumbers, _: DecodingReport) -> Arrays:
                    return Arrays(*as_numpy(examples.gather(rows)))

                splits.append([partial(gathered, examples, rows) for rows in blocks])
            class_names = dataset.class_names
            content = content or content_of(dataset, rows=True)

    # Whatever would change a shard is part of the fingerprint.
    settings = (
        config.data,
        config.image_size,
        config.channels,
        config.evaluation_fraction,
        config.seed,
        per_shard,
    )
    text = json.dumps([*settings, content], sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    return Source(dict(zip(SPLITS, splits, strict=False)), class_names, left_out, fingerprint)


def write_shards(
    config: TrainConfig,
    folder: Path,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Writes the shards, and pieces.json at the end.

    Returns its content. Calls `on_shard(done, total)`. Raises UserError if the source cannot be
    read, or has images that cannot be decoded and must not be skipped.
    """
    # A folder that is prepared already from the same source is left as it is.
    make_writable(folder, "DST")
    source = source_of(config, max(1, _SHARD_BYTES // (config.image_size**2 * config.channels)))
    if (folder / INDEX).exists():
        before = read_index(folder)
        if before.get("fingerprint") == source.fingerprint:
            return before
        raise UserError(
            f"{folder} contains shards of other data or settings: use another folder, or remove it"
        )

    # Each shard is written as a whole, with its checksums.
    index: dict[str, Any] = {
        "format": FORMAT,
        "source": config.data,
        "fingerprint": source.fingerprint,
        "image_shape": (config.image_size, config.image_size, config.channels),
        "class_names": (),
        "splits": {split: [] for split in source.splits},
    }
    report = DecodingReport(left_out=source.left_out)
    shards = []
    for split, of_split in source.splits.items():
        shards += [(split, number, shard) for number, shard in enumerate(of_split)]
    for done, (split, number, shard) in enumerate(shards, 1):
        files = {}
        images = shard(report)
        for part, array in zip("xy", images.arrays if images else (), strict=False):
            content = io.BytesIO()
            file = f"{split}-{number:05d}.{part}.npy"
            np.save(content, array.astype(LABEL) if part == "y" else array)
            write_whole(folder / file, content.getvalue())
            files[file] = hashlib.sha256(content.getbuffer()).hexdigest()
        index["splits"][split].append({"examples": images.count if images else 0, "files": files})
        on_shard(done, len(shards))

    # The index comes last, so that a folder without one is not finished.
    refuse_or_skip(config, report)
    train, evaluation = (open_split(folder, index, split) for split in SPLITS)
    if train is None:
        raise UserError(f"SRC={config.data}: no image is left to train on")
    refuse_empty_classes(config, source.class_names, train.targets)
    labels = [rows.targets for rows in (train, evaluation) if rows and rows.targets is not None]
    largest = [int(numbers.max()) for numbers in labels]
    index["class_names"] = source.class_names or numbered_classes(largest)
    index |= vars(report)
    write_whole(folder / INDEX, json.dumps(index, indent=1) + "\n")
    return index


USAGE = Usage(
    "python -m trainer.data.prepare", "SRC DST [--image_size=64] [--setting=value …]", __doc__
)


@options_class
class PrepareOptions:
    """Holds the options of `trainer.data.prepare` that are not settings of a run."""

    source: str = setting(
        meaning="a folder, a file or a name, as for --data", metavar="SRC", positional=True
    )
    destination: str = setting(meaning="the folder for the shards", metavar="DST", positional=True)
    verbose: bool = VERBOSE


@command("starts anew")
def main(arguments: Sequence[str]) -> int:
    """Prepares SRC into DST with a progress bar. Returns the exit code."""
    options, settings = parse_command(
        PrepareOptions, arguments, USAGE, fields_of(TrainConfig, *_SETTINGS)
    )
    set_verbose(options.verbose)
    # A config needs a model, which is not built here; with a batch of 1 no data are too few.
    values = {"global_batch_size": 1, "model": "any:model", "data": options.source, **settings}
    config = Overrides.read(values).config
    if address := output_address(options.destination, "DST"):
        raise UserError(
            f"DST={options.destination}: must be a local folder: prepare into one, as shards, and"
            f" then copy it: gcloud storage cp -r shards {address}"
        )
    with closing(ProgressBar("text", "bar", "count", "left", text="prepare")) as bar:
        folder = expanded(options.destination)
        index = write_shards(
            config, folder, lambda done, total: bar.update(completed=done, total=total)
        )
    counts = []
    for split, entries in index["splits"].items():
        if count := sum(entry["examples"] for entry in entries):
            counts.append(f"{count:,} {split}")
    shape = "x".join(map(str, index["image_shape"]))
    log.info(f"{options.destination}: {', '.join(counts)}, {shape} (height x width x channels)")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
