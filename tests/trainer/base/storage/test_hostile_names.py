"""Tests that object names that are invalid as file names are rejected or ignored, and write nothing
elsewhere."""

import re
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures import Folders
from tests.fuzz import WORDS, examples, one_line
from tests.support import resolved
from tests.trainer.base.storage.conftest import Bucket
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.run_files.serving_file import fetch_checkpoint, fetch_model
from trainer.base.storage.staging import stage
from trainer.data.sources import load_dataset

STEP = "checkpoints/step-00000001"
COLLIDING = (
    "a",
    "a/b",
    "a//b",
    "a/./b",
    "a/../../b",
    f"{STEP}/manifest.json",
    f"{STEP}/manifest.json/x",
    STEP,
    f"{STEP}/a/b",
    f"{STEP}/../../../x",
    f"{STEP}/a\nb",
    f"checkpoints/step-{'9' * 300}/manifest.json",
    "checkpoints/../x/manifest.json",
    "checkpoints/step-00000002/manifest.json",
    "run.json",
    "run.json/x",
    "model/model.keras/../../x",
    "pieces.json",
    "x.tfrecord",
    "../x.tfrecord",
)
_part = st.sampled_from(
    ["..", "a", "b", "step-1", "manifest.json", "checkpoints", "x" * 260, "\n", "é" * 130]
)
_name = st.sampled_from(
    [word for word in (*WORDS, *COLLIDING) if word and "\0" not in word and "\ud800" not in word]
)
_name |= st.lists(_part, min_size=1, max_size=4).map("/".join)
_names = st.lists(
    _name.filter(lambda name: len(name.encode()) < 900), min_size=1, max_size=4, unique=True
)


def readers(url: str, cache: str) -> list[Callable[[], Any]]:
    """Returns everything that downloads an address to `cache`."""
    flags = [f"--cache_dir={cache}", "--model=mlp", "--image_size=8"]
    job = resolved(*flags, f"--job_dir={url}")
    data = resolved(*flags, f"--data={url}")

    def checkpoints() -> None:
        job_dir = open_job_dir(job)
        for folder in sorted(job_dir.checkpoints.glob("*")):
            job_dir.mirror.fetch(folder)

    return [
        lambda: stage(url, "data", cache),
        lambda: load_dataset(data),
        checkpoints,
        lambda: fetch_checkpoint(url, "initial_checkpoint", cache),
        lambda: fetch_model(url, "initial_model", cache),
    ]


@examples(4)
@given(names=_names)
def test_names_in_a_bucket(bucket: Bucket, tmp_path_factory: Folders, names: list[str]) -> None:
    base = tmp_path_factory.mktemp("names")
    prefix = base.name
    for number, name in enumerate(names):
        bucket.put(f"{prefix}/{name}", b"{}" if number % 2 else b"content")
    for read in readers(bucket.url(prefix), str(base / "cache")):
        one_line(read)
    files = [path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()]
    # One cache folder per address, of `url` or of a checkpoint below it: the copy, a job's files,
    # locks.
    allowed = re.compile(
        rf"cache/{bucket.name}-[0-9a-f]{{16}}/(local/({prefix}|step-\d+)/|run/|\.?lock$)"
    )
    assert [file for file in files if not allowed.match(file)] == []
