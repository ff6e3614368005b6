"""Manages the folder of a comparison: which comparison it holds, and how far each of its runs
is."""

import json
import os
from pathlib import Path
from typing import Any

from deploy.job.ledger import RECORD
from deploy.report.collection import COMPARISON
from trainer.base.errors import USER_MUST_CHANGE, UserError
from trainer.base.run_files.job_files import (
    CHECKPOINTS,
    RUN_INFO,
    STATS,
    Content,
    read_json,
    read_result,
    read_run_info,
)
from trainer.base.storage import make_writable, write_whole


def check_folder(out: Path, request: Content) -> None:
    """Raises UserError if `out` is not writable or holds another comparison; creates no folder.

    More repeats and other prices are allowed, and so is any change while no run has produced
    anything.
    """
    existing = next((folder for folder in (out, *out.parents) if os.path.exists(folder)), out)
    make_writable(existing, "out")
    if (out / RUN_INFO).exists():
        raise UserError(f"out={out} holds a training run (run.json): use another --out")
    for job_dir in out.glob("*/repeat-*"):
        read_run_info(job_dir)  # refuses a run of a version before 0.3
    if not any_begun(out):
        return
    try:
        stored = _identity(read_json(out / COMPARISON)[0])
        requested = _identity(request)
    except (KeyError, TypeError, AttributeError):
        problem = "damaged" if (out / COMPARISON).exists() else "missing"
        raise UserError(
            f"{out / COMPARISON} is {problem}, but the folder holds runs of unknown settings: use"
            f" another --out, or see `python -m deploy report {out}`"
        ) from None
    # What differs; of tiers that only one of the two has, "tiers" alone says it.
    added_tiers = {key for key in stored.keys() ^ requested.keys() if key.startswith("tier ")}
    names = [name for name in {**stored, **requested} if name not in added_tiers]
    differing = [name for name in names if stored.get(name) != requested.get(name)]
    if differing:
        changes = []
        for name in differing[:5]:
            now = requested.get(name, "unset")
            changes.append(f"{name}: {stored.get(name, 'unset')} stored, {now} given")
        raise UserError(f"{out} holds another comparison ({'; '.join(changes)}): use another --out")


def write_comparison(out: Path, request: Content) -> None:
    """Writes comparison.json; raises UserError as `check_folder` does."""
    check_folder(out, request)
    stored = read_json(out / COMPARISON)[0].get("parallel") if any_begun(out) else None
    parallel = max(request["parallel"], stored if isinstance(stored, int) else 1)
    write_whole(out / COMPARISON, json.dumps({**request, "parallel": parallel}, indent=2) + "\n")


def _identity(request: Content) -> dict[str, Any]:
    """Returns the settings that define a comparison, by the names that users know."""
    tiers = {tier["name"]: {**tier, "price_per_hour": None} for tier in request["tiers"]}
    parts = [flag.removeprefix("--").partition("=") for flag in request["flags"]]
    flags = {name: value if equals else "true" for name, equals, value in parts}
    common = {"on": request["on"], "scaling": request["scaling"], "tiers": ", ".join(tiers)}
    return {**common, **{f"tier {name}": facts for name, facts in tiers.items()}, **flags}


def is_done(job_dir: Path) -> bool:
    """Returns whether the run ended as planned."""
    return bool(read_result(job_dir)[0].get("state") == "done")


def any_begun(out: Path) -> bool:
    """Returns whether a run in `out` has produced anything, or its job may still do so."""
    return any(is_begun(job_dir) for job_dir in out.glob("*/repeat-*"))


def is_begun(job_dir: Path) -> bool:
    """Returns whether the run has produced anything, or its job may still do so."""
    state = read_result(job_dir)[0].get("state")
    sent = (job_dir / RECORD).exists() and state != "failed"
    reported = (job_dir / STATS).is_file() or any((job_dir / CHECKPOINTS).glob("*"))
    return sent or reported or state == "done"


def refusal(job_dir: Path) -> str:
    """Returns in one line why the trainer refused its settings or data at startup; empty if it did
    not."""
    result, _ = read_result(job_dir)
    refused = result.get("exit_code") == USER_MUST_CHANGE and not (job_dir / RUN_INFO).exists()
    return error_of(job_dir) if refused else ""


def error_of(job_dir: Path) -> str:
    """Returns in one line why the run failed; empty if result.json has no error."""
    return " ".join(str(read_result(job_dir)[0].get("error") or "").split())
