"""A comparison: what it asks of each tier, in which order, and how it goes on after whatever
happened."""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from deploy.comparison import execution
from deploy.comparison.execution import ComparisonRequest
from deploy.comparison.runners import LocalRunner
from deploy.job.workload import Workload
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.tiers.machine_table import Price
from deploy.tiers.tier import Tier, TierFacts
from tests.deploy.conftest import ROOT, Capture, Command, run
from tests.deploy.planted import edit, noisy, plant
from tests.fixtures import Json, Patch
from tests.support import refused
from trainer.base.errors import UserError
from trainer.base.settings.request import Overrides

FLAGS = (
    "--recipe=mlp_mnist",
    "--data=digits",
    "--image_size=16",
    "--width=8",
    "--global_batch_size=8",
    "--steps=40",
    "--report_every_steps=10",
    "--checkpoint_every_steps=10",
)
ONE = TierFacts("one", "n1")
TWO = TierFacts("two", "g2", "NVIDIA_L4", 2)
FOUR = TierFacts("four", "g2", "NVIDIA_L4", 4)


def compare(
    runner: "Planting",
    *tiers: TierFacts,
    flags: Sequence[str] = FLAGS,
    out: str = ".",
    parallel: int = 1,
    **more: Any,
) -> int:
    known = [
        Tier(**dataclasses.asdict(tier), spec={"workerPoolSpecs": [{}]}, price=Price())
        for tier in tiers
    ]
    plan = ComparisonRequest(known, Overrides.parse(flags), **more)
    return execution.run_comparison(plan, plan.resolve(), Path(out), runner, parallel)


class Planting(LocalRunner):
    """Plants job directories instead of training; `script` may do something else for a run."""

    def __init__(
        self, script: Callable[[TierFacts, Path], int | None] = lambda tier, job_dir: None
    ) -> None:
        self.script = script
        self.stopped = threading.Event()
        self.asked: list[tuple[str, str, list[str]]] = []

    def preflight(self, runs: Sequence[tuple[Workload, Path]]) -> None:
        pass

    def run(self, run: Workload, job_dir: Path) -> int:
        tier = run.tier.facts
        self.asked.append((tier.name, job_dir.name, run.arguments()[:-1]))
        code = self.script(tier, job_dir)
        if code is None:
            devices = [f"CPU:{i}" for i in range(tier.devices)]
            plant(job_dir, noisy(0.1 / tier.devices), devices=devices)
        return code or 0

    def stop(self) -> None:
        self.stopped.set()


def asked(runner: Planting) -> list[str]:
    return [f"{tier}/{repeat}" for tier, repeat, _ in runner.asked]


def test_repeats_alternate_and_what_is_done_is_not_repeated() -> None:
    runner = Planting()
    assert compare(runner, ONE, TWO, repeats=2) == 0
    assert asked(runner) == ["one/repeat-1", "two/repeat-1", "two/repeat-2", "one/repeat-2"]
    again = Planting()
    assert compare(again, ONE, TWO, repeats=3) == 0
    assert asked(again) == ["one/repeat-3", "two/repeat-3"]
    rows = [(row.tier, row.repeats, row.machine) for row in summarize(collect(["."]))]
    assert rows == [("one", 3, "this computer"), ("two", 3, "this computer")]


def test_a_tier_that_fails_is_recorded_and_the_rest_goes_on() -> None:
    def script(tier: TierFacts, job_dir: Path) -> int | None:
        if tier == ONE:
            plant(job_dir, [0.1, 0.1], state="failed", error="out of memory")
            return 2
        if tier == TWO:
            raise RuntimeError("the service is away")
        return None

    assert compare(Planting(script), ONE, TWO, FOUR) == 1
    assert [row.state for row in summarize(collect(["."]))] == ["failed", "missing", "done"]
    Path("one/repeat-1/stats.jsonl").unlink()
    again = Planting(
        lambda tier, job_dir: (
            edit(job_dir / "result.json", state="done") or 0 if tier == ONE else None
        )
    )
    assert compare(again, ONE, TWO, FOUR) == 0
    assert asked(again) == ["one/repeat-1", "two/repeat-1"]


@pytest.mark.parametrize(
    ("codes", "whole"), [((0, 2), 2), ((1, 2), 1), ((75, 1), 75), ((0, -9), 1), ((0, 0), 0)]
)
def test_the_exit_code_says_what_to_do(codes: tuple[int, int], whole: int) -> None:
    assert compare(Planting(lambda tier, job_dir: codes[tier == TWO]), ONE, TWO) == whole


def test_another_comparison_in_the_folder_is_refused() -> None:
    compare(Planting(), ONE, TWO)
    longer = (*FLAGS[:-3], "--steps=20", *FLAGS[-2:], "--seed=1")
    two_workers = dataclasses.replace(TWO, workers=2)
    both = (ONE, TWO)
    others: list[tuple[str, tuple[TierFacts, ...], Json]] = [
        ("steps: 40 stored, 20 given; seed: unset stored, 1 given", both, {"flags": longer}),
        ("checkpoint_every_steps: 10 stored, unset given", both, {"flags": FLAGS[:-1]}),
        ("tiers: one, two stored, one given", (ONE,), {}),
        ("tier two: {.*'workers': 1.* stored, .*'workers': 2.*", (ONE, two_workers), {}),
        ("scaling: strong stored, weak given", both, {"scaling": "weak"}),
    ]
    for key, tiers, more in others:
        runner = Planting()
        with pytest.raises(UserError, match=rf"another comparison \({key}\): use another --out"):
            compare(runner, *tiers, **more)
        assert runner.asked == []
    priced = TierFacts("one", "n1", price_per_hour=0.5)
    # the price may be told later
    assert compare(Planting(), priced, TWO, command="x") == 0
    assert summarize(collect(["."]))[0].facts.price_per_hour == 0.5


def test_a_command_that_came_to_nothing_may_be_mended_in_its_folder() -> None:
    compare(Planting(lambda tier, job_dir: 1), ONE, TWO)
    assert compare(Planting(), ONE, FOUR, flags=(*FLAGS, "--seed=1"), parallel=2) == 0
    assert [row.tier for row in summarize(collect(["."]))] == ["one", "four"]


@pytest.mark.parametrize(
    ("content", "what"), [(None, "missing"), ("{", "damaged"), ('{"tiers": [1]}', "damaged")]
)
def test_runs_of_which_nothing_says_what_they_are_are_not_adopted(
    content: str | None, what: str
) -> None:
    compare(Planting(), ONE, TWO)
    Path("comparison.json").unlink()
    if content is not None:
        Path("comparison.json").write_text(content)
    line = (
        rf"comparison\.json is {what}, but the folder holds runs .* or see `python -m deploy report"
        rf" .`"
    )
    with pytest.raises(UserError, match=line):
        compare(Planting(), ONE, TWO)


def test_the_folder_of_a_training_is_refused() -> None:
    plant("run", [0.1, 0.1])
    with pytest.raises(
        UserError, match=r"out=.*run holds a training run \(run\.json\): use another --out"
    ):
        compare(Planting(), ONE, out="run")


def refuses(tier: TierFacts, job_dir: Path) -> int:
    """As the trainer leaves its folder where it does not come to train."""
    job_dir.mkdir(parents=True, exist_ok=True)
    (job_dir / "result.json").write_text(
        '{"state": "failed", "error": "data=x: no images", "exit_code": 2}'
    )
    return 2


def test_what_the_first_run_is_refused_for_keeps_the_others_from_starting(capsys: Capture) -> None:
    """What only a later run is refused for keeps none from starting."""
    runner = Planting(refuses)
    with refused("data=x: no images"):
        compare(runner, ONE, TWO, FOUR, out="first")
    assert asked(runner) == ["one/repeat-1"]
    runner = Planting(lambda tier, job_dir: refuses(tier, job_dir) if tier == TWO else None)
    assert compare(runner, ONE, TWO, FOUR, out="later") == 2
    assert asked(runner) == ["one/repeat-1", "two/repeat-1", "four/repeat-1"]
    line = "two, repeat 1: exit code 2: data=x: no images; fix that, then run the command again ("
    assert line in capsys.readouterr().out


def test_a_second_comparison_at_the_same_time_is_refused() -> None:
    said = []

    def second(tier: TierFacts, job_dir: Path) -> None:
        command = ["compare", "l4x1", *FLAGS, f"--out={Path('out').absolute()}"]
        said.append(run([sys.executable, "-m", "deploy", *command], cwd=ROOT).stderr)

    assert compare(Planting(second), ONE, out="out") == 0
    assert "another run is writing to it: wait, or use another --out\n" in said[0]


def test_strong_scaling_keeps_the_global_batch_and_weak_the_batch_per_replica() -> None:
    runner = Planting()
    compare(runner, ONE, TWO, scaling="strong", out="strong")
    assert {tuple(flags) for _, _, flags in runner.asked} == {FLAGS}
    runner = Planting()
    compare(runner, TWO, ONE, FOUR, scaling="weak", out="weak")
    batches = {tier: [flag for flag in flags if "batch" in flag] for tier, _, flags in runner.asked}
    assert batches == {
        "two": ["--global_batch_size=8"],
        "one": ["--global_batch_size=4"],
        "four": ["--global_batch_size=16"],
    }


def test_what_can_be_known_to_fail_is_refused_before_anything_runs() -> None:
    three = TierFacts("three", "g2", "NVIDIA_L4", 3)
    for line, tier, flags in (
        ("three: global_batch_size=8 does not divide over 3 replicas: take 6", three, FLAGS),
        ("--job_dir is not for a comparison: --out names", ONE, (*FLAGS, "--job_dir=x")),
        ("--replicas is not for a comparison: the tiers", ONE, (*FLAGS, "--replicas=2")),
    ):
        runner = Planting()
        with refused(line):
            compare(runner, ONE, tier, flags=flags, out="out")
        assert runner.asked == []
        assert not Path("out").exists()


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
def test_an_interrupt_stops_the_runs_and_starts_no_other(
    numbers: list[signal.Signals], monkeypatch: Patch
) -> None:
    """A terminal that is closed is heard of from the shell and, when the shell ends, from the
    kernel."""
    waits = threading.Event()

    def script(tier: TierFacts, job_dir: Path) -> int:
        assert waits.wait(60)  # with all runs in the pool
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)
        return 75 if runner.stopped.wait(10) else 1

    def waiting(*given: Any, **more: Any) -> Any:
        waits.set()
        return wait(*given, **more)

    def unheard(number: int, frame: object) -> None:
        """Else the signal would end the tests where `compare` does not hear it."""

    runner = Planting(script)
    monkeypatch.setattr("deploy.comparison.execution.wait", waiting)
    before = signal.signal(numbers[0], unheard)
    try:
        with pytest.raises(KeyboardInterrupt):
            compare(runner, ONE, TWO, FOUR)
        assert signal.getsignal(numbers[0]) == unheard
    finally:
        signal.signal(numbers[0], before)
    assert runner.stopped.is_set()
    assert asked(runner) == ["one/repeat-1"]
    again = Planting()
    assert compare(again, ONE, TWO, FOUR) == 0
    assert len(again.asked) == 3


def test_data_that_are_not_there_start_nothing(typed: Command) -> None:
    flags = [flag.replace("=digits", "=idx:nothere") for flag in FLAGS]
    shown = typed("compare", "l4x1", "l4x2", *flags, "--out=out", code=2)
    assert "error: data=idx:nothere: there is no such path: " in shown
    assert "runs; its output" not in shown
    assert list(Path("out").iterdir()) == []
