"""A run proves before it trains that replicas change nothing, or stops in a line."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.drill import read
from tests.fixtures import SLOW, Log, Patch, parametrize
from tests.planted_dependences import DEPENDENT, INDEPENDENT
from tests.support import refused, resolved
from trainer.base.errors import PlatformFault
from trainer.base.settings.train_config import TrainConfig
from trainer.run import job, replica_check
from trainer.run.replica_check import ReplicaVerdict, act_on_verdict, compare_few_rows, comparing


def flags_of(model: str) -> list[str]:
    own = [f"--model=tests.planted_dependences:{model}", "--data=tests.own_data:arrays"]
    return [*own, "--steps=2", "--global_batch_size=16"]


def settings(model: str, *flags: str) -> TrainConfig:
    return resolved(*flags_of(model), *flags)


def started(tmp_path: Path, model: str, *flags: str) -> dict[str, Any]:
    """Trains two steps on two replicas, and returns run.json."""
    words = [*flags_of(model), "--replicas=2", f"--job_dir={tmp_path / 'run'}", *flags]
    job.run(resolved(*words), ["python", "-m", "trainer.task", *words], 0.0)
    about: dict[str, Any] = read(tmp_path / "run" / "run.json")
    return about


@pytest.fixture(autouse=True)
def _proves(monkeypatch: Patch) -> None:
    monkeypatch.delenv(replica_check.SKIP, raising=False)


@SLOW
def test_a_dependence_stops_a_new_run_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    with refused("tests.planted_dependences:root_of_mean: on 2 replicas sequential"):
        started(tmp_path, "root_of_mean")
    # the same directory: compared anew
    about = started(tmp_path, "root_of_mean", "--allow_replica_dependence")
    assert about["replica_check"]["agrees"] is False
    result = read(tmp_path / "run" / "result.json")
    assert result["depends_on_replicas"] == about["replica_check"]["problems"]
    monkeypatch.setattr(job, "comparing", None)  # a restart makes no other comparison
    again = started(tmp_path, "root_of_mean", "--allow_replica_dependence", "--steps=4")
    assert (again["replica_check"], again["total_steps"]) == (about["replica_check"], 4)


@SLOW
def test_planted_dependences_are_found_and_no_other() -> None:
    verdicts = {name: compare_few_rows(settings(name)) for name in (*DEPENDENT, *INDEPENDENT)}
    assert {name for name, verdict in verdicts.items() if verdict["agrees"] is False} == set(
        DEPENDENT
    )
    for name in ("summed", "own_sum"):
        assert "is about half as large: it is a sum over rows" in " ".join(
            verdicts[name]["problems"]
        )
    assert all(verdicts[name]["agrees"] for name in INDEPENDENT)


@SLOW
@parametrize("flag", ["--sync_batch_norm=false", "--micro_batches=2"])
def test_what_settings_ask_of_batch_norm_is_exempt_and_hides_nothing_else(flag: str) -> None:
    verdicts = [
        compare_few_rows(settings("batch_norm", flag, *more)) for more in ([], ["--of_batch"])
    ]
    assert [verdict["agrees"] for verdict in verdicts] == [True, False]
    assert verdicts[0]["reason"] == "with --sync_batch_norm=true and --micro_batches=1"


@SLOW
def test_a_process_that_compares_twice_keeps_the_sums_apart() -> None:
    """Bits first, then float64: TensorFlow remembers what the key of a sum was first used for."""
    words = ["--model=tests.own_data:masked_text", "--data=tests.own_data:next_tokens"]
    config = resolved(*words, "--steps=2", "--global_batch_size=16", "--virtual_replicas=2")
    verdict = {
        "agrees": True,
        "problems": [],
        "reason": "",
        "equal_bits": True,
        "precision": "in float64",
    }
    assert compare_few_rows(config) == verdict


def test_what_float64_lacks_is_compared_in_float32() -> None:
    agree, differ = (compare_few_rows(settings(name)) for name in ("pooled", "pooled_root"))
    assert (agree["agrees"], differ["agrees"]) == (True, False)
    assert (
        agree["precision"]
        == "in float32 (up to 0.0001 of a loss, as the model does not run in float64)"
    )
    act_on_verdict(ReplicaVerdict(**agree), allowed=False, paid=True)


def test_nan_on_one_replica_is_told_as_such() -> None:
    with refused("infinite: loss is nan within the first 5 steps, on one replica too"):
        compare_few_rows(settings("infinite"))


@parametrize(
    "flag, line",
    [
        (
            "--data=tests.planted_dependences:other_rows",
            "a second reading gives other rows (training digest: ",
        ),
        (
            "--model=tests.planted_dependences:other_weights",
            "a second model starts from other weights, ",
        ),
    ],
)
def test_what_differs_before_any_step_is_not_blamed_on_the_loss(flag: str, line: str) -> None:
    (problem,) = compare_few_rows(settings("mean_losses", flag))["problems"]
    assert line in problem


def test_what_was_not_compared_is_recorded_and_several_paid_replicas_do_not_train(
    monkeypatch: Patch, caplog: Log
) -> None:
    monkeypatch.setattr(replica_check, "LONGEST_SECONDS", 0.01)
    child = subprocess.Popen
    children = []

    def kept(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        children.append(child(*arguments, **options))
        return children[0]

    monkeypatch.setattr(subprocess, "Popen", kept)
    with comparing(["--model=tests.planted_dependences:root_of_mean", "--data=digits"]) as wait:
        verdict = wait()
    assert children[0].returncode is not None
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


def test_a_comparison_that_fails_ends_the_run_and_a_mistake_in_the_child_is_the_reason() -> None:
    fault = ReplicaVerdict(None, reason="Collective instance 100", fault=True)
    act_on_verdict(fault, allowed=True)
    with pytest.raises(
        PlatformFault,
        match="not compared before training: Collective instance 100: --allow_replica",
    ):
        act_on_verdict(fault, allowed=False)
    with comparing(["--model=tests.planted_dependences:nothing", "--data=digits"]) as wait:
        verdict = wait()
    assert (verdict.agrees, verdict.fault) == (None, False)
    assert "no function nothing" in verdict.reason
