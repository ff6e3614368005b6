"""Sends runs to Weights & Biases by its package, also where it is offline:
https://docs.wandb.ai/ref/python/

W&B numbers rows by steps that only rise: a row that it has is never sent again.
"""

import os
import shutil
from collections.abc import Sequence
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.tracker import Opened, Point, TrackedRun, TrackerAddress

# Only what `send` passes is logged: no code, packages, host name, console output or load of the
# machine.
_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "host": "",
    "init_timeout": 60,
    "finish_timeout": 50,
}
_REFUSALS = ("permission denied", "401", "403", "not found")  # in the text of an error of W&B


class WandbRuns:
    """Implements `Tracker` for W&B: resumes a run by its id.

    Raises UserError if a login is missing.
    """

    def __init__(self, address: TrackerAddress) -> None:
        import wandb
        from requests.utils import get_netrc_auth

        self._address = address
        self._offline = os.environ.get("WANDB_MODE") == "offline"
        self._run: Any = None
        if not (
            self._offline
            or os.environ.get("WANDB_API_KEY")
            or get_netrc_auth(wandb.Settings().base_url)
        ):
            raise UserError(  # the package would ask for the key on a terminal
                f"track={address.text}: no key of W&B: set WANDB_API_KEY, run `wandb login`, or set"
                " WANDB_MODE=offline and send the files later by `wandb sync`"
            )

    def begin(self, run: TrackedRun) -> Opened:
        import wandb

        for file in (run.folder / "wandb").glob(f"offline-run-*-{run.id}/*.wandb"):
            if self._offline and not file.with_name(f"{file.name}.synced").exists():
                # of an earlier start: this one sends all its points
                shutil.rmtree(file.parent, ignore_errors=True)
        entity, _, project = self._address.name.rpartition("/")
        try:
            self._run = wandb.init(
                entity=entity or None,
                project=project,
                id=run.id,
                name=run.name,
                group=run.parent or None,
                notes=run.description or None,
                dir=run.folder,
                resume=None if self._offline else "allow",
                settings=wandb.Settings(**_SETTINGS),
            )
        except wandb.errors.Error as error:
            refused = any(word in str(error).lower() for word in _REFUSALS)
            if refused or isinstance(error, wandb.errors.UsageError):
                raise UserError(
                    f"track={self._address.text}: W&B refuses it: {reason(error)}"
                ) from error
            raise
        next_step = self._run.step
        link = f"{self._run.settings.sync_dir} (offline)" if self._offline else self._run.url
        return Opened(link, lambda name: next_step - 1)

    def send(self, run: TrackedRun, points: Sequence[Point]) -> None:
        import wandb

        self._run.config.update({**run.parameters, "tags": dict(run.tags)}, allow_val_change=True)
        for point in points:
            self._run.log({**point.values, "_timestamp": point.time}, step=point.step)
        if run.state == "running":
            return
        for file in run.files:
            if file.suffix == ".png" and points:
                picture = {file.parent.name: wandb.Image(str(file)), "_timestamp": points[-1].time}
                self._run.log(picture, step=points[-1].step)
            else:
                self._run.save(str(file), base_path=str(file.parent), policy="now")
        self._run.summary["state"] = run.state
        if run.state == "killed":
            self._run.mark_preempting()
        self._run.finish(exit_code=int(run.state != "finished"))
