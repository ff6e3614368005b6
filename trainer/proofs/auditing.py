"""Audits a run: trains stretches of it again on this machine, compares their last checkpoints, writes a certificate."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError
from trainer.base.log import log
from trainer.base.run_files.provenance import instruction_set, packages, trainer_commit, user_sources
from trainer.base.run_files.records import mapping
from trainer.base.run_files.run_layout import CHECKPOINTS, MODEL, RUN_INFO, step_name
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import write_whole
from trainer.base.storage.checksum import sha256_of
from trainer.cluster.strategy import make_replicas
from trainer.proofs.golden_file import root_mean_square
from trainer.proofs.reordering import reordered
from trainer.proofs.stretches import Stretch, broken_links, chosen, manifests, stretches
from trainer.proofs.verdicts import CHANGED, EQUAL, ROUNDING, TIMES_CONTROL
from trainer.run.requested_run import RequestedRun
from trainer.run.training_setup import build_setup, starting_weights
from trainer.training.checkpoint import Damaged, read_checkpoint
from trainer.training.state import LearningRates, check_fits, put_back, snapshot, variables_of

STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://in-toto.io/attestation/test-result/v0.1"
_FLOAT64 = 1e-10  # relative, of a tensor: what rounding may do, as in trainer.check
_ORDER = 7  # the seed of the other order of rows, the control
Values = Mapping[str, npt.NDArray[Any]]


class Finding(NamedTuple):
    """Holds what training a stretch again gave."""

    stretch: Stretch
    kind: str
    reason: str


def audit(request: RequestedRun, count: int, seed: int, out: Path) -> int:
    """Trains `count` stretches again, logs a line each, writes the certificate; returns the exit code."""
    with request.naming():
        checkpoints = manifests(request.folder)
        every = stretches(checkpoints)
        if not every:
            raise UserError(
                f"{request.name} keeps no two checkpoints that follow each other: only runs that kept them can be "
                "audited (--keep_checkpoints=all)"
            )
        links, picked = broken_links(checkpoints), chosen(every, count, seed)
        for link in links:
            log.error("%s", link)
        log.info(f"trains {len(picked)} of {len(every)} stretches again, by seed {seed}: one forged stretch is found "
                 f"with probability {100 * len(picked) / len(every):.0f} %")  # fmt: skip
        again = Reexecution(request)
        findings = [_finding(again, request.folder / CHECKPOINTS, stretch) for stretch in picked]
    statement = _statement(request, checkpoints, every, findings, links, seed)
    write_whole(out, json.dumps(statement, indent=2) + "\n")
    log.info(f"the certificate is in {out}: {statement['predicate']['result']}")
    return DONE if statement["predicate"]["result"] == "PASSED" else USER_MUST_CHANGE


class Reexecution:
    """Holds the data and the model of a run, built as the run built them, and trains stretches of it again."""

    def __init__(self, request: RequestedRun) -> None:
        self.config = _config(request)
        self._setup = build_setup(self.config, make_replicas(self.config))
        starting_weights(self.config, self._setup)
        self._compiled = bool(mapping(request.info, "compilation").get("compiled"))
        self._variables, self._rates = variables_of(self._setup.model), LearningRates(self._setup.model)
        self._folder, self._initial = request.folder / CHECKPOINTS, snapshot(self._variables)

    def after(self, stretch: Stretch, order: int | None = None) -> Values:
        """Returns the variables after the stretch; order: a seed by which the rows of each batch are reordered.

        Raises Damaged for its first checkpoint, UserError if that is of another model.
        """
        values, setup = self._initial, self._setup
        if stretch.first:
            manifest, values = read_checkpoint(self._folder / step_name(stretch.first))
            check_fits(self._variables, {name: value.shape for name, value in values.items()}, str(stretch))
            self._rates.resume(manifest["state"].get("learning_rates") or self._rates.state())
        put_back(self._variables, values, setup.replicas)
        if order is None:
            runner, rows = setup.step_runner(compiled=self._compiled), setup.rows_from(stretch.first)
        else:
            runner, rows = reordered(setup, order, stretch.first)
        with setup.dataset.reading():
            runner(rows, stretch.first, stretch.last - stretch.first)
        return snapshot(self._variables)


def _config(request: RequestedRun) -> TrainConfig:
    """Returns the settings by which the run trained, with the devices and the place of the data of the command line."""
    stored = mapping(request.info, "config")
    if stored.get("callbacks"):
        raise UserError(
            f"{request.name} has callbacks={stored['callbacks']}, which may change rates or weights between steps: "
            "only a run without can be audited"
        )
    began = {name: stored.get(name, "") for name in ("initial_checkpoint", "initial_model")}
    data, replicas = request.flags.get("data", request.trained.data), request.config.replicas or 1
    return dataclasses.replace(request.trained, data=data, replicas=replicas, **began)


def _finding(again: Reexecution, folder: Path, stretch: Stretch) -> Finding:
    """Trains a stretch again and compares."""
    try:
        _, values = read_checkpoint(folder / step_name(stretch.last))
        finding = Finding(stretch, *_compared(again, stretch, values))
    except Damaged as error:
        finding = Finding(stretch, CHANGED, f"a checkpoint is damaged ({error})")
    reason = f": {finding.reason}" if finding.reason else ""
    (log.error if finding.kind == CHANGED else log.info)("%s   %s%s", stretch, finding.kind, reason)
    return finding


def _compared(again: Reexecution, stretch: Stretch, values: Values) -> tuple[str, str]:
    """Returns the verdict on the variables that the run kept after a stretch, and its reason."""
    trained = again.after(stretch)
    if values.keys() != trained.keys() or any(values[name].shape != trained[name].shape for name in values):
        return CHANGED, "the run has other variables"
    if all(np.array_equal(values[name], trained[name]) for name in values):
        return EQUAL, ""
    distances = _distances(values, trained)
    worst = max(distances, key=lambda name: distances[name])
    if again.config.precision == "float64":
        within = distances[worst] <= _FLOAT64
        return (ROUNDING if within else CHANGED), f"{worst} differs by {distances[worst]:.1e} (relative)"
    control = _distances(trained, again.after(stretch, _ORDER))
    times = root_mean_square([*distances.values()]) / max(root_mean_square([*control.values()]), 1e-300)
    reason = f"{times:.2g} times what another order of the rows does"
    return (ROUNDING, reason) if times <= TIMES_CONTROL else (CHANGED, f"most in {worst}, {reason}")


def _distances(values: Values, others: Values) -> dict[str, float]:
    """Returns the L2 norm of the difference of each variable, relative to that of its values."""

    def norm(array: npt.NDArray[Any]) -> float:
        return float(np.linalg.norm(array.ravel()))

    pairs = {name: (np.asarray(values[name], np.float64), np.asarray(others[name], np.float64)) for name in values}
    return {name: norm(a - b) / max(norm(a), 1e-30) for name, (a, b) in pairs.items()}


def _statement(
    request: RequestedRun, saved: Mapping[int, Mapping[str, Any]], every: Sequence[Stretch],
    findings: Sequence[Finding], links: Sequence[str], seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns the certificate: https://github.com/in-toto/attestation, its Statement and its test-result predicate."""
    subjects = {path.relative_to(request.folder).as_posix(): sha256_of(path)
                for path in sorted((request.folder / MODEL).rglob("*.keras"))}  # fmt: skip
    subjects |= {f"{CHECKPOINTS}/{step_name(step)}": str(manifest.get("sha256")) for step, manifest in saved.items()}
    checked = {finding.stretch for finding in findings}
    failed = [f"{finding.stretch}: {finding.reason}" for finding in findings if finding.kind == CHANGED]
    about = {
        "run": {name: request.info.get(name) for name in ("git_commit", "sources", "data", "versions", "image_digest")},
        "auditor": {
            "commit": trainer_commit(), "instructions": instruction_set(), "sources": user_sources(request.trained),
            "packages": packages(), "seed": seed,
        },
        "not_checked": [str(stretch) for stretch in every if stretch not in checked],
        "probability_of_finding_one_forged": len(findings) / len(every),
    }  # fmt: skip
    settings = json.dumps(request.info.get("config"), sort_keys=True).encode()
    digest = {"sha256": hashlib.sha256(settings).hexdigest()}
    return {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": sha256}} for name, sha256 in subjects.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "result": "FAILED" if failed or links else "PASSED",
            "configuration": [{"name": RUN_INFO, "digest": digest, "annotations": about}],
            "passedTests": [f"{finding.stretch}: {finding.kind}" for finding in findings if finding.kind != CHANGED],
            "failedTests": [*failed, *links],
        },
    }
