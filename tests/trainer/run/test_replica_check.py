"""A run proves before it trains that replicas change nothing, or stops in a line."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures import Log, Patch
from tests.planted_dependences import DEPENDENT, INDEPENDENT
from tests.support import refused, run_steps
from trainer.base.errors import PlatformFault
from trainer.base.settings.request import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.run import job, replica_check
from trainer.run.replica_check import (
    ReplicaCheck,
    ReplicaVerdict,
    act_on_verdict,
    compare_few_rows,
)
from trainer.training.checkpoint import snapshot, variables_of, write_checkpoint


def flags_of(model: str) -> list[str]:
    own = [f"--model=tests.planted_dependences:{model}", "--data=tests.own_data:arrays"]
    return [*own, "--steps=2", "--global_batch_size=16"]


def settings(model: str, *flags: str) -> TrainConfig:
    return resolve([*flags_of(model), *flags]).config


def started(tmp_path: Path, model: str, *flags: str) -> dict[str, Any]:
    """Trains two steps on two replicas, and returns run.json."""
    words = [*flags_of(model), "--replicas=2", f"--job_dir={tmp_path / 'run'}", *flags]
    job.run(resolve(words).config, ["python", "-m", "trainer.task", *words], 0.0)
    about: dict[str, Any] = json.loads((tmp_path / "run" / "run.json").read_text())
    return about


@pytest.fixture(autouse=True)
def _proves(monkeypatch: Patch) -> None:
    monkeypatch.delenv(replica_check.SKIP, raising=False)


@pytest.mark.slow
def test_a_dependence_stops_a_new_run_unless_it_is_allowed(tmp_path: Path, monkeypatch: Patch) -> None:
    with refused("tests.planted_dependences:root_of_mean: on 2 replicas sequential"):
        started(tmp_path, "root_of_mean")
    about = started(tmp_path, "root_of_mean", "--allow_replica_dependence")  # the same directory: compared anew
    assert about["replica_check"]["agrees"] is False
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["depends_on_replicas"] == about["replica_check"]["problems"]
    monkeypatch.setattr(job, "ReplicaCheck", None)  # a restart makes no other comparison
    again = started(tmp_path, "root_of_mean", "--allow_replica_dependence", "--steps=4")
    assert (again["replica_check"], again["total_steps"]) == (about["replica_check"], 4)


@pytest.mark.slow
def test_planted_dependences_are_found_and_no_other() -> None:
    verdicts = {name: compare_few_rows(settings(name)) for name in (*DEPENDENT, *INDEPENDENT)}
    assert {name for name, verdict in verdicts.items() if verdict["agrees"] is False} == set(DEPENDENT)
    for name in ("summed", "own_sum"):
        assert "is about half as large: it is a sum over rows" in " ".join(verdicts[name]["problems"])
    assert all(verdicts[name]["agrees"] for name in INDEPENDENT)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--sync_batch_norm=false", "--micro_batches=2"])
def test_what_settings_ask_of_batch_norm_is_exempt_and_hides_nothing_else(flag: str) -> None:
    verdicts = [compare_few_rows(settings("batch_norm", flag, *more)) for more in ([], ["--of_batch"])]
    assert [verdict["agrees"] for verdict in verdicts] == [True, False]
    assert verdicts[0]["reason"] == "with --sync_batch_norm=true and --micro_batches=1"


@pytest.mark.slow
def test_a_process_that_compares_twice_keeps_the_sums_apart() -> None:
    """Bits first, then float64: TensorFlow remembers what the key of a sum was first used for."""
    words = ["--model=tests.own_data:masked_text", "--data=tests.own_data:next_tokens"]
    config = resolve([*words, "--steps=2", "--global_batch_size=16", "--virtual_replicas=2"]).config
    verdict = {"agrees": True, "problems": [], "reason": "", "equal_bits": True, "draws": []}
    assert compare_few_rows(config) == verdict


@pytest.mark.parametrize(("flag", "line"), [
    ("--data=tests.planted_dependences:other_rows", "a second reading gives other rows (training digest: "),
    ("--model=tests.planted_dependences:other_weights", "a second model starts from other weights, "),
])  # fmt: skip
def test_what_differs_before_any_step_is_not_blamed_on_the_loss(flag: str, line: str) -> None:
    (problem,) = compare_few_rows(settings("mean_losses", flag))["problems"]
    assert line in problem


def verdict_after(tmp_path: Path, config: TrainConfig, steps: int) -> dict[str, Any]:
    """Returns the verdict on the steps that follow on so many of one replica."""
    model, _ = run_steps(config, steps)
    write_checkpoint(tmp_path / "state", snapshot(variables_of(model)), {"step": steps, "state": {"epoch": steps // 3}})
    return compare_few_rows(config, tmp_path / "state")


@pytest.mark.parametrize(("model", "flags", "drawn"), [
    ("annealed", ["--callbacks=tests.planted_dependences:annealing"], []),
    pytest.param("counted", [], [], marks=pytest.mark.slow),
    pytest.param("drawn_later", [], ["tf.random.normal"], marks=pytest.mark.slow),
])  # fmt: skip
def test_what_begins_after_the_compared_steps_is_found_later(
    model: str, flags: list[str], drawn: list[str], tmp_path: Path, caplog: Log
) -> None:
    config = settings(model, *flags)
    verdict = ReplicaVerdict(**compare_few_rows(config))
    assert (verdict.agrees, verdict.draws) == (True, drawn)
    act_on_verdict(verdict, allowed=False)
    assert ("agree so far, but the step draws by tf.random.normal" in caplog.text) == bool(drawn)
    later = ReplicaVerdict(**verdict_after(tmp_path, config, 24))
    assert (later.agrees, later.outcome) == (False, "differ")


@pytest.mark.parametrize("model", ["last_layer_in_32_bits", "several_optimizers"])
def test_steps_that_agree_do_so_later_too(model: str, tmp_path: Path) -> None:
    assert verdict_after(tmp_path, settings(model, "--precision=mixed_float16"), 24)["agrees"]


def child(arguments: Any, *state: Any) -> Any:
    """Stands for a ReplicaCheck: it finds no difference before training, and one later."""
    verdict = ReplicaVerdict(not state, ["dense differs"] if state else [])
    return SimpleNamespace(ended=True, verdict=lambda *seconds: verdict, close=lambda: None)


def test_a_later_difference_ends_the_run_and_its_restarts_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    for module in (job, replica_check):
        monkeypatch.setattr(module, "ReplicaCheck", child)
    with refused("dense differs (steps 4 to 8, from the state of this run): change that, train on one replica"):
        started(tmp_path, "mean_losses", "--steps=9", "--steps_per_loop=1", "--checkpoint_every_steps=1")
    checks = {"1 to 5": "agree", "4 to 8": "differ"}
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["state"], result["replica_checks"]) == ("failed", checks)
    with refused("steps 4 to 8 differ on 1 and on 2 replicas, as an earlier start found"):
        started(tmp_path, "mean_losses", "--steps=9")
    assert started(tmp_path, "mean_losses", "--steps=9", "--allow_replica_dependence")["replica_checks"] == checks


@pytest.mark.slow
def test_a_child_beside_the_job_finds_what_a_callback_begins(tmp_path: Path) -> None:
    about = started(tmp_path, "annealed", "--callbacks=tests.planted_dependences:annealing", "--steps=9",
                    "--allow_replica_dependence")  # fmt: skip
    assert about["replica_check"]["agrees"]
    assert about["replica_checks"] == {"1 to 5": "agree", "4 to 8": "differ"}


def test_what_was_not_compared_is_recorded_and_several_paid_replicas_do_not_train(
    monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_check, "LONGEST_SECONDS", 0.01)
    check = ReplicaCheck(["--model=tests.planted_dependences:root_of_mean", "--data=digits"])
    verdict = check.verdict()
    check.close()
    assert check._child.returncode is not None
    assert (verdict.agrees, verdict.fault) == (None, False)
    assert verdict.not_compared.startswith("it took longer than")
    act_on_verdict(verdict, allowed=False)
    act_on_verdict(verdict, allowed=True, paid=True)
    assert "one replica and two were not compared before training: it took longer" in caplog.text
    with refused("then pay for several replicas with --allow_replica_dependence"):
        act_on_verdict(verdict, allowed=False, paid=True)
    by_settings = ReplicaVerdict(None, reason="sync_batch_norm=false", by_settings=True)
    act_on_verdict(by_settings, allowed=False, paid=True)
    assert by_settings.not_compared == ""


def test_a_comparison_that_fails_by_itself_ends_the_run_and_a_mistake_in_the_child_is_the_reason() -> None:
    fault = ReplicaVerdict(None, reason="Collective instance 100", fault=True)
    act_on_verdict(fault, allowed=True)
    with pytest.raises(PlatformFault, match="not compared before training: Collective instance 100: --allow_replica"):
        act_on_verdict(fault, allowed=False)
    with closing(ReplicaCheck(["--model=tests.planted_dependences:nothing", "--data=digits"])) as check:
        verdict = check.verdict()
    assert (verdict.agrees, verdict.fault) == (None, False)
    assert "no function nothing" in verdict.reason
