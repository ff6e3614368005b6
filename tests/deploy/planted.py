"""Writes job directories with given times, in the format of the trainer."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from deploy.packaging.image_choice import BuiltImage, remember
from deploy.packaging.packages import packages_with
from tests.fixtures import Json
from trainer.base.run_files.plan_file import (
    CpuSteps,
    LinearInRows,
    Memory,
    StepPlan,
    StepWork,
    Work,
    kept_plan,
    plan_key,
    write_plan,
)
from trainer.base.settings.request import Overrides

EXAMPLES = 6_000


def planted_plan(
    precision: str = "float32", place: str = ".", /, row_gib: float = 0.01, gflop: float = 1.0
) -> Path:
    """Writes a plan of mlp_mnist: 1 GiB of state and so much a row; 100 products of so many GFLOP,
    and 50 MB, a row.

    There is one update. Each of two replicas has 100 small operations more, and an all-reduce. On 2
    virtual CPUs a step took 1 s, and 0.5 a row.
    """
    gib = 2.0**30
    config = Overrides.parse(["--recipe=mlp_mnist", f"--precision={precision}"]).config
    lines = [LinearInRows(gib, row_gib * gib)]
    memory = Memory(
        lines, [LinearInRows(1.5 * gib, row_gib * gib / 2)], lines, 2**30, (8, 16, 32), 1.1
    )
    products = StepWork("MatMul", 100, LinearInRows(0.0, gflop * 1e9), LinearInRows(1e6, 50e6))
    one, of_two = (
        [products, StepWork("Mul", times, LinearInRows(0.0, 0.0), LinearInRows(1.0, 0.0))]
        for times in (900, 1000)
    )
    folder = Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    plan = StepPlan(
        config.model,
        config.data,
        plan_key(config, {}),
        {},
        EXAMPLES,
        1,
        0,
        memory,
        10**8,
        Work(one),
        Work(of_two, 1, 10**8),
        False,
        False,
        CpuSteps(LinearInRows(1.0, 0.5), 2),
    )
    write_plan(folder / "plan.json", plan)
    return folder / "plan.json"


def keep_plan(flags: Sequence[str], **numbers: float) -> None:
    """Writes such a plan where that of these settings is kept."""
    path = kept_plan(Overrides.parse(flags).config)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(planted_plan(**numbers), path)


def plant(
    place: Path | str,
    seconds: Sequence[float],
    *,
    devices: Sequence[str] = ("GPU:0",),
    gpu: str = "",
    batch: int = 100,
    losses: Sequence[float] = (),
    state: str = "done",
    error: str | None = None,
    startup: float = 5.0,
    steps_per_report: int = 10,
    epochs: bool = False,
    waited: float = 0.0,
    tflop: float = 0.0,
    quality: Mapping[str, Any] | None = None,
    **final: float,
) -> Path:
    """Writes a run with one report (or epoch) for each of `seconds`, the time of its steps; the
    first is warm-up.

    `gpu`: the model of its GPUs. `losses`: of the same reports. `waited`: the share of the time
        that was lost waiting for input. `tflop`: of a step. `final`: more final metrics, as fid=12.
        `quality`: what these were computed with.
    """
    per_epoch = EXAMPLES // batch
    steps = per_epoch if epochs else steps_per_report
    losses = losses or [1 / (number + 1) for number in range(len(seconds))]
    now = 0.0
    lines: list[Json] = []
    for number, (each, loss) in enumerate(zip(seconds, losses, strict=True), start=1):
        now += steps * each
        lines.append(
            {
                "kind": "epoch" if epochs else "report",
                "step": number * steps,
                "epoch": number * steps / per_epoch,
                "seconds": now,
                "images_per_second": batch / each,
                "step_seconds": each,
                "input_wait_seconds": waited * each,
                "tflop_per_second": tflop / each,
                "mfu": tflop / each / 494,
                "losses": {"loss": loss},
                "metrics": {"accuracy": 0.9},
                "memory_gib": 1.0,
                "gpus": [],
            }
        )
    total = steps * len(seconds)
    run = {
        "config": {
            "model": "mlp",
            "global_batch_size": batch,
            "steps": total,
            "seed": 0,
            "learning_rate": 0.1,
        },
        "cluster": {
            "workers": 1,
            "replicas": len(devices),
            "rows_per_replica": batch // len(devices),
        },
        "devices": list(devices),
        "gpus": [gpu] * len(devices) if gpu else [],
        "data": {"examples": EXAMPLES, "examples_per_step": batch, "steps_per_epoch": per_epoch},
        "total_steps": total,
        "versions": {"tensorflow": "2.21.0"},
        "command": "python -m trainer.task --recipe=x",
        "started": "2026-11-20T10:00:00Z",
    }
    result: Json = {
        "state": state,
        "error": error,
        "steps": total,
        "wall_seconds": startup + now,
        "startup_seconds": startup,
        "training_seconds": now,
        "peak_memory_gib": 1.5,
        "final": {
            "losses": {"loss": losses[-1]},
            "metrics": {"accuracy": 0.9, **final},
            **({"quality": dict(quality)} if quality else {}),
        },
        "history": {"loss": [*losses]} if epochs else {},
    }
    folder = Path(place)
    folder.mkdir(parents=True)
    (folder / "stats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def write_files(files: Mapping[str, str], place: Path | str = ".") -> Path:
    """Writes texts below a folder, which it returns."""
    for name, text in files.items():
        file = Path(place, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Path(place)


def remember_built(tensorflow: str = "", **more: str) -> None:
    """Records an image with the sources of this folder, and `more`."""
    sources = {package.name: package.digest for package in packages_with("")}
    uri = "us-docker.pkg.dev/p/r/mine:1"
    remember(BuiltImage(uri, tensorflow, {**sources, **more}, "2026-11-22"))


def content(file: Path | str) -> Any:
    """Returns what a JSON file holds."""
    return json.loads(Path(file).read_text())


def edit(file: Path | str, **changes: Any) -> None:
    """Changes top-level keys of a JSON file; None removes one."""
    kept = {key: value for key, value in {**content(file), **changes}.items() if value is not None}
    Path(file).write_text(json.dumps(kept))


def sample(folder: Path, side: int = 8) -> None:
    """Writes two grids of grey pixels, of steps 10 and 500."""
    (folder / "samples").mkdir()
    for step in (10, 500):
        Image.new("L", (side, side), 128).save(folder / "samples" / f"step-{step:08d}.png")


def noisy(middle: float, count: int = 20) -> list[float]:
    """Returns `count` times within 5 % of `middle`, always the same; the first is twice as long, as
    warm-up."""
    return [
        2 * middle,
        *(middle * (1 + 0.05 * ((7 * number) % 11 - 5) / 5) for number in range(count - 1)),
    ]
