"""Audits a run: trains stretches of it again on this machine, compares their last checkpoints, writes a certificate."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError
from trainer.base.log import log
from trainer.base.run_files.provenance import instruction_set, packages, trainer_commit, user_sources
from trainer.base.run_files.run_layout import CHECKPOINTS, MODEL, RUN_INFO, step_name
from trainer.base.storage import write_whole
from trainer.base.storage.checksum import sha256_of
from trainer.proofs.reexecution import trained_again
from trainer.proofs.stretches import Stretch, broken_links, chosen, manifests, probability, stretches
from trainer.proofs.verdicts import CHANGED, EQUAL, ROUNDING, TIMES_CONTROL
from trainer.run.requested_run import RequestedRun
from trainer.training.checkpoint import Damaged, read_checkpoint

STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://in-toto.io/attestation/test-result/v0.1"
_FLOAT64 = 1e-10  # relative, of a tensor: what rounding may do, as in trainer.check
Values = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Finding:
    """Holds what training a stretch again gave."""

    stretch: Stretch
    kind: str
    reason: str = ""


def audit(request: RequestedRun, count: int, seed: int, out: Path) -> int:
    """Trains `count` stretches again, logs a line each, writes the certificate; returns the exit code."""
    with request.naming():
        kept = manifests(request.folder)
        every = stretches(kept)
        if not every:
            raise UserError(
                f"{request.name} keeps no two checkpoints that follow each other: only runs that kept them can be "
                "audited (--keep_checkpoints=all)"
            )
        links, picked = broken_links(kept), chosen(every, count, seed)
        for link in links:
            log.error("%s", link)
        found = probability(len(every), len(picked))
        log.info(f"trains {len(picked)} of {len(every)} stretches again, by seed {seed}: one forged stretch is found "
                 f"with probability {100 * found:.0f} %")  # fmt: skip
        findings = [_finding(request, stretch) for stretch in picked]
    statement = _statement(request, kept, every, findings, links, seed)
    write_whole(out, json.dumps(statement, indent=2) + "\n")
    passed = not links and all(finding.kind != CHANGED for finding in findings)
    log.info(f"the certificate is in {out}: {statement['predicate']['result']}")
    return DONE if passed else USER_MUST_CHANGE


def _finding(request: RequestedRun, stretch: Stretch) -> Finding:
    """Trains a stretch again and compares."""
    try:
        _, values = read_checkpoint(request.folder / CHECKPOINTS / step_name(stretch.last))
        if stretch.first:
            read_checkpoint(request.folder / CHECKPOINTS / step_name(stretch.first))
        again = trained_again(request, stretch)
        finding = Finding(stretch, *_compared(request, stretch, values, again))
    except Damaged as error:
        finding = Finding(stretch, CHANGED, f"a checkpoint is damaged ({error})")
    reason = f": {finding.reason}" if finding.reason else ""
    (log.error if finding.kind == CHANGED else log.info)("%s   %s%s", finding.stretch, finding.kind, reason)
    return finding


def _compared(request: RequestedRun, stretch: Stretch, values: Values, again: Values) -> tuple[str, str]:
    """Returns the verdict on the weights of two checkpoints of one step, and its reason."""
    if values.keys() != again.keys() or any(values[name].shape != again[name].shape for name in values):
        return CHANGED, "the run has other variables"
    if all(np.array_equal(values[name], again[name]) for name in values):
        return EQUAL, ""
    distances = {name: _distance(values[name], again[name]) for name in values}
    worst = max(distances, key=lambda name: distances[name])
    if request.trained.precision == "float64":
        within = distances[worst] <= _FLOAT64
        return (ROUNDING if within else CHANGED), f"{worst} differs by {distances[worst]:.1e} (relative)"
    # What rounding does to these very steps: the same on another number of replicas.
    control = trained_again(request, stretch, others=True)
    allowed = TIMES_CONTROL * _together(again, control)
    apart = _together(values, again)
    told = f"{apart / max(allowed / TIMES_CONTROL, 1e-300):.2g} times what another number of replicas does"
    return (ROUNDING, told) if apart <= allowed else (CHANGED, f"first in {worst}, {told}")


def _distance(values: npt.NDArray[Any], others: npt.NDArray[Any]) -> float:
    """Returns the L2 norm of the difference, relative to that of the values."""
    a, b = (np.asarray(each, np.float64).ravel() for each in (values, others))
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), 1e-30))


def _together(values: Values, others: Values) -> float:
    """Returns the root mean square of the tensors' relative differences."""
    return float(np.sqrt(np.mean([_distance(values[name], others[name]) ** 2 for name in values])))


def _statement(
    request: RequestedRun, kept: Mapping[int, Mapping[str, Any]], every: Sequence[Stretch],
    findings: Sequence[Finding], links: Sequence[str], seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns the certificate: https://github.com/in-toto/attestation, its Statement and its test-result predicate."""
    model = sorted((request.folder / MODEL).rglob("*.keras"))
    subjects = [{"name": path.relative_to(request.folder).as_posix(), "digest": {"sha256": sha256_of(path)}}
                for path in model]  # fmt: skip
    subjects += [
        {"name": f"{CHECKPOINTS}/{step_name(step)}", "digest": {"sha256": str(manifest.get("sha256"))}}
        for step, manifest in kept.items()
    ]
    failed = [f"{finding.stretch}: {finding.reason}" for finding in findings if finding.kind == CHANGED]
    checked = {finding.stretch for finding in findings}
    about = {
        "run": {name: request.info.get(name) for name in ("git_commit", "sources", "data", "versions", "image_digest")},
        "auditor": {
            "commit": trainer_commit(), "instructions": instruction_set(), "sources": user_sources(request.trained),
            "packages": packages(), "seed": seed,
        },
        "not_checked": [str(stretch) for stretch in every if stretch not in checked],
        "probability_of_finding_one_forged": probability(len(every), len(findings)),
    }  # fmt: skip
    settings = json.dumps(request.info.get("config"), sort_keys=True)
    return {
        "_type": STATEMENT,
        "subject": subjects,
        "predicateType": PREDICATE,
        "predicate": {
            "result": "FAILED" if failed or links else "PASSED",
            "configuration": [{
                "name": RUN_INFO, "digest": {"sha256": hashlib.sha256(settings.encode()).hexdigest()},
                "annotations": about,
            }],
            "passedTests": [f"{finding.stretch}: {finding.kind}" for finding in findings if finding.kind != CHANGED],
            "failedTests": [*failed, *links],
        },
    }  # fmt: skip
