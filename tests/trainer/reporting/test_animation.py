"""Tests the animated picture of sample grids: bounded, exact in grey, and continued by a resumed run."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from tests.support import run_job, small
from trainer.reporting.reporter import animated, frames_of


def saved(folder: Path, step: int, size: tuple[int, int] = (40, 30), mode: str = "L") -> Path:
    shape = (size[1], size[0]) if mode == "L" else (size[1], size[0], 3)
    pixels = np.random.default_rng(step).integers(0, 256, shape, dtype=np.uint8)
    file = folder / f"step-{step:08d}.png"
    Image.fromarray(pixels).save(file)
    return file


def frames(content: bytes) -> list[np.ndarray]:
    with Image.open(io.BytesIO(content)) as image:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]


def test_frames_are_the_first_the_last_and_some_between() -> None:
    names = [f"step-{step:08d}.png" for step in range(1000)]
    shown = frames_of([*reversed(names), "progress.gif", "../step-00000001.png", "step-1.png"])
    assert (shown[0], shown[-1], len(shown)) == (names[0], names[-1], 24)
    steps = [int(name[5:13]) for name in shown]
    assert set(np.diff(steps)) <= {43, 44}
    assert frames_of(names[:3]) == names[:3]
    assert frames_of(names[:1]) == names[:1]
    assert frames_of(["x.png"]) == []


def test_greys_are_exact_and_a_photo_has_a_palette(tmp_path: Path) -> None:
    for mode, most in (("L", 0), ("RGB", 40)):
        files = [saved(tmp_path, step, mode=mode) for step in range(3)]
        found = frames(animated(files))
        assert len(found) == 3
        for one, file in zip(found, files, strict=True):
            with Image.open(file) as image:
                apart = np.abs(np.asarray(image.convert("RGB"), int) - one)
            assert np.median(apart) <= most


def test_large_pictures_are_reduced(tmp_path: Path) -> None:
    found = frames(animated([saved(tmp_path, 2, (2000, 1000))]))
    assert [one.shape for one in found] == [(320, 640, 3)]


@pytest.mark.slow
def test_a_resumed_run_continues_it(tmp_path: Path) -> None:
    flags = (
        "--width=2", "--latent_dim=4", "--global_batch_size=4", "--critic_steps=1", "--jit_compile=false",
        "--sample_every_steps=2", "--tensorboard=false", f"--job_dir={tmp_path / 'run'}",
    )  # fmt: skip
    for steps, count in ((4, 2), (7, 4)):
        run = run_job(small(*flags, f"--steps={steps}"))
        grids = sorted(run.glob("samples/step-*.png"))
        shown = frames((run / "samples" / "progress.gif").read_bytes())
        assert len(shown) == len(grids) == count
        for one, file in zip(shown, grids, strict=True):
            with Image.open(file) as image:
                assert np.array_equal(one, np.asarray(image.convert("RGB")))
    assert [file.name for file in run.glob("samples/.*")] == []
