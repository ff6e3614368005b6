"""The folder of a comparison: whose it is, what was asked for in it, and how far each of its runs is."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.report.collection import COMPARISON
from trainer.errors import USER_MUST_CHANGE, UserError
from trainer.reporting.json_files import read_json
from trainer.reporting.run_files import read_result
from trainer.storage import make_writable, write_whole
from trainer.storage.run_layout import CHECKPOINTS, RUN_INFO, STATS

_MOST_SHOWN = 5


def check_folder(out: Path, asked: Mapping[str, Any]) -> None:
    """UserError where `out` cannot be written, or holds what is no part of the comparison `asked`; makes no folder.

    More repeats and other prices are welcome, and so is any change as long as nothing came of a run.
    """
    make_writable(next((folder for folder in (out, *out.parents) if os.path.exists(folder)), out), "out")
    if (out / RUN_INFO).exists():
        raise UserError(f"out={out} holds a training run (run.json): give another --out")
    if not any_begun(out):
        return
    before, now = _identity(read_json(out / COMPARISON)[0]), _identity(asked)
    if before is None or now is None:
        what = "damaged" if (out / COMPARISON).exists() else "missing"
        raise UserError(
            f"{out / COMPARISON} is {what}, but runs lie here, and nothing says of what: give another --out, or look "
            f"at them: `python -m deploy report {out}`"
        )
    tiers_of_one = {key for key in before.keys() ^ now.keys() if key.startswith("tier ")}  # their names are told
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in tiers_of_one]
    if differing:
        none = "not given"
        shown = (f"{key}: {before.get(key, none)} there, {now.get(key, none)} here" for key in differing[:_MOST_SHOWN])
        raise UserError(f"{out} holds another comparison ({'; '.join(shown)}): give another --out")


def remember(out: Path, asked: Mapping[str, Any]) -> None:
    """Writes comparison.json. UserError: see check_folder."""
    check_folder(out, asked)
    before = read_json(out / COMPARISON)[0].get("parallel") if any_begun(out) else None
    most = max(asked["parallel"], before if isinstance(before, int) else 1)
    write_whole(out / COMPARISON, json.dumps({**asked, "parallel": most}, indent=2) + "\n")


def _identity(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """What makes it another comparison where it differs, by names that a user knows; None where `asked` is damaged."""
    try:
        tiers = {tier["name"]: {**tier, "price_per_hour": None} for tier in asked["tiers"]}
        parts = [flag.removeprefix("--").partition("=") for flag in asked["flags"]]
        flags = {name: value if equals else "true" for name, equals, value in parts}
        about = {"on": asked["on"], "scaling": asked["scaling"], "tiers": ", ".join(tiers)}
    except (KeyError, TypeError, AttributeError):
        return None
    return {**about, **{f"tier {name}": facts for name, facts in tiers.items()}, **flags}


def is_done(job_dir: Path) -> bool:
    """Whether the run ended as planned."""
    return bool(read_result(job_dir)[0].get("state") == "done")


def any_begun(out: Path) -> bool:
    """Whether anything came of a run in `out`, or may yet come of a job that was sent."""
    return any(is_begun(job_dir) for job_dir in out.glob("*/repeat-*"))


def is_begun(job_dir: Path) -> bool:
    """Whether anything came of the run, or may yet come of its job."""
    state = read_result(job_dir)[0].get("state")
    sent = (job_dir / "vertex.json").exists() and state != "failed"
    reported = (job_dir / STATS).is_file() or any((job_dir / CHECKPOINTS).glob("*"))
    return sent or reported or state == "done"


def refusal(job_dir: Path) -> str:
    """In one line why the trainer ended before it knew its data and model; empty where that is not how it ended."""
    result, _ = read_result(job_dir)
    refused = result.get("exit_code") == USER_MUST_CHANGE and not (job_dir / RUN_INFO).exists()
    return error_of(job_dir) if refused else ""


def error_of(job_dir: Path) -> str:
    """In one line why the run failed; empty where result.json does not say."""
    return " ".join(str(read_result(job_dir)[0].get("error") or "").split())
