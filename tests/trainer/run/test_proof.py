"""The graph of a step shows whether replicas change its updates, with the line of the user's file
that mixes rows."""

import pytest

from tests.fixtures import SLOW, Log, parametrize
from tests.golden import RUNS
from tests.planted_dependences import DEPENDENT, INDEPENDENT
from tests.rows_mixed import FINDINGS
from tests.support import refused, resolved
from trainer.base.errors import UserError
from trainer.run.proof import MAY_MIX, MIXES, NOT_PROVED, PROVED
from trainer.run.replica_check import (
    ReplicaVerdict,
    act_on_verdict,
    compare_few_rows,
    judge,
    proof_of,
)


def flags_of(name: str, *more: str) -> list[str]:
    data = "tokens" if name in ("recurrent", "attentive") else "table"
    return [
        f"--model=tests.rows_mixed:{name}",
        f"--data=tests.rows_mixed:{data}",
        "--global_batch_size=16",
        *more,
    ]


@parametrize("name", FINDINGS)
def test_each_trap_is_found_with_its_line_and_no_other(name: str) -> None:
    proof = proof_of(resolved(*flags_of(name)))
    lines = " ".join([*proof.mixes, *proof.unknown])
    assert proof.holds == (not FINDINGS[name]), lines
    assert not (proof.holds and proof.metrics)
    assert FINDINGS[name] in lines
    assert proof.verdict() == (PROVED if proof.holds else MAY_MIX if proof.mixes else NOT_PROVED)
    if proof.mixes and name not in ("by_number",):
        assert "rows_mixed.py:" in lines


@parametrize("precision", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_every_precision_is_traced(precision: str) -> None:
    assert proof_of(resolved(*flags_of("attentive", f"--precision={precision}"))).holds


@parametrize("name", [*DEPENDENT, *INDEPENDENT])
def test_planted_dependences_are_not_proved(name: str) -> None:
    words = [
        f"--model=tests.planted_dependences:{name}",
        "--data=tests.own_data:arrays",
        "--global_batch_size=16",
    ]
    assert proof_of(resolved(*words)).holds == (name in INDEPENDENT)


@SLOW
@parametrize("name", RUNS)
def test_recipes_and_examples_are_proved(name: str) -> None:
    proof = proof_of(resolved(*RUNS[name], "--global_batch_size=16"))
    assert (proof.holds, proof.metrics) == (True, []), proof


def test_what_each_micro_batch_assigns_is_told() -> None:
    proof = proof_of(resolved(*flags_of("spectral", "--micro_batches=2")))
    assert (proof.verdict(), proof.mixes) == (MAY_MIX, [])
    assert proof.parts == [
        "sequential/spectral_normalization/vector_u is assigned in each micro-batch, not once a"
        " step"
    ]
    assert proof_of(resolved(*flags_of("noisy", "--micro_batches=2"))).holds


def test_rows_that_may_mix_are_told_and_several_paid_replicas_do_not_train(caplog: Log) -> None:
    verdict = ReplicaVerdict(**judge(resolved(*flags_of("shifted"))))
    assert (verdict.agrees, verdict.proof) == (True, MAY_MIX)
    act_on_verdict(verdict, allowed=False)
    assert "may mix rows, though 5 steps on 1 and on 2 replicas give the same" in caplog.text
    act_on_verdict(verdict, allowed=True, paid=True)
    with refused("rows_mixed.py:"):
        act_on_verdict(verdict, allowed=False, paid=True)


def test_a_layer_s_losses_are_its_own_replica_s_while_batch_norm_waits_for_others() -> None:
    assert compare_few_rows(resolved(*flags_of("noisy")))["problems"] == []


def test_rows_that_mix_are_refused_with_the_line() -> None:
    verdict = ReplicaVerdict(**judge(resolved(*flags_of("rolled"))))
    assert (verdict.agrees, verdict.proof) == (False, MIXES)
    with pytest.raises(UserError, match=r"rows_mixed.py:\d+: rolled = .*Roll changes the order"):
        act_on_verdict(verdict, allowed=False)


def test_a_layer_of_a_fixed_dtype_hides_nothing() -> None:
    verdict = ReplicaVerdict(**judge(resolved(*flags_of("faint"))))
    assert (verdict.agrees, verdict.proof) == (False, MIXES)
    assert "differs by" in verdict.problems[0]


def test_a_proof_says_what_the_settings_ask_of_batch_norm(caplog: Log) -> None:
    verdict = ReplicaVerdict(**judge(resolved(*flags_of("noisy", "--sync_batch_norm=false"))))
    act_on_verdict(verdict, allowed=False, paid=True)
    assert "whatever the data (batch norm as with --sync_batch_norm=true" in caplog.text
