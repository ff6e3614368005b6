"""Plants job directories for trackers, and reads back what MLflow's store and W&B's offline files
have of them."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.base.run_files.job_files import append_stats, write_json


def plant_run(
    folder: Path, steps: int = 30, *, state: str = "done", first: int = 0, **more: Any
) -> Path:
    """Writes a run that reported every 10 steps, with an epoch's means at 20, and appends to an
    earlier one."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    config = {"model": "mlp", "learning_rate": 0.01, "track": "", **more}
    info = {
        "config": config,
        "id": "0123456789abcdef",
        "git_commit": "c0ffee",
        "started": "2026-11-01T00:00:00Z",
    }
    write_json(folder / "run.json", {**info, "data": {"content": {"classes": 10}}})
    for step in range(first + 10, steps + 1, 10):
        values: Any = {
            "losses": {"loss": 1.0 / step},
            "metrics": {"accuracy": step / 100},
            "time": 1.7e9 + step,
        }
        if step == 20:
            append_stats(
                folder,
                {"kind": "epoch", "step": step, "losses": {"loss": 0.5}, "time": 1.7e9 + step},
            )
        values |= {"kind": "report", "step": step, "step_seconds": 0.01}
        append_stats(folder, values)
    write_json(
        folder / "result.json",
        {
            "state": state,
            "steps": steps,
            "wall_seconds": 12.5,
            "history": {"loss": [0.5]},
            "written_at": 1.7e9,
            "final": {"losses": {"loss": 1.0 / steps}},
        },
    )
    picture = (
        b"\x89PNG\r\n\x1a\n"
        b"\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU"
    )
    end = (
        b"\x00\x00\x00\nIDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
    )
    (folder / "samples" / f"step-{steps:08d}.png").write_bytes(picture + end)
    return folder


LOSSES = [(10, 0.1), (20, 0.05), (30, 1 / 30)]  # of a planted run


def mlflow_runs(server: str, experiment: str) -> list[Any]:
    """Returns the runs of an experiment, the oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient(server)
    known = client.get_experiment_by_name(experiment)
    return (
        list(client.search_runs([known.experiment_id], order_by=["attributes.start_time"]))
        if known
        else []
    )


def mlflow_history(server: str, run: Any, name: str) -> list[tuple[int, float]]:
    """Returns the points of a metric, in the order in which they came."""
    from mlflow import MlflowClient

    return [
        (metric.step, metric.value)
        for metric in MlflowClient(server).get_metric_history(run.info.run_id, name)
    ]


def mlflow_files(server: str, run: Any) -> list[str]:
    """Returns the names of the files that a run has."""
    from mlflow import MlflowClient

    return sorted(
        Path(file.path).name for file in MlflowClient(server).list_artifacts(run.info.run_id)
    )


def wandb_records(file: Path) -> Iterator[Any]:
    """Yields the records of a small offline file, which has the form of LevelDB's log after a
    header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content = file.read_bytes()
    at = 7
    assert len(content) < 32768, "records of a longer file come in parts"
    while at < len(content):
        _, length, _ = struct.unpack("<IHB", content[at : at + 7])
        at += 7 + length
        yield wandb_internal_pb2.Record.FromString(content[at - length : at])


def wandb_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of the history in an offline file."""
    histories = [
        record.history
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "history"
    ]
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in history.item
        }
        for history in histories
    ]
