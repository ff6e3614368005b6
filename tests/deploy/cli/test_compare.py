"""A comparison: what it asks of each tier, in which order, and how it goes on after whatever
happened."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from deploy.__main__ import main
from deploy.comparison import execution
from deploy.comparison.execution import ComparisonRequest
from deploy.comparison.runners import LocalRunner
from deploy.job.workload import Workload
from deploy.report.collection import collect
from deploy.report.measures import summarize
from deploy.tiers.machine_table import Price
from deploy.tiers.tier import Tier, TierFacts
from tests.deploy.conftest import ROOT, Capture
from tests.deploy.planted import edit, noisy, plant
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


def planned(
    tiers: Sequence[TierFacts], flags: Sequence[str], *scaling: str, **more: Any
) -> ComparisonRequest:
    known = [
        Tier(**dataclasses.asdict(tier), spec={"workerPoolSpecs": [{}]}, price=Price())
        for tier in tiers
    ]
    return ComparisonRequest(known, Overrides.parse(flags), *scaling, **more)  # type: ignore[arg-type]


def compare(plan: ComparisonRequest, out: Path, runner: "Planting", parallel: int = 1) -> int:
    return execution.run_comparison(plan, plan.resolve(), out, runner, parallel)


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
            plant(
                job_dir,
                noisy(0.1 / tier.devices),
                devices=[f"CPU:{i}" for i in range(tier.devices)],
            )
        return code or 0

    def stop(self) -> None:
        self.stopped.set()


def asked(runner: Planting) -> list[str]:
    return [f"{tier}/{repeat}" for tier, repeat, _ in runner.asked]


def test_repeats_alternate_and_what_is_done_is_not_repeated(tmp_path: Path) -> None:
    runner = Planting()
    assert compare(planned((ONE, TWO), FLAGS, repeats=2), tmp_path, runner) == 0
    assert asked(runner) == ["one/repeat-1", "two/repeat-1", "two/repeat-2", "one/repeat-2"]
    again = Planting()
    assert compare(planned((ONE, TWO), FLAGS, repeats=3), tmp_path, again) == 0
    assert asked(again) == ["one/repeat-3", "two/repeat-3"]
    rows = [(row.tier, row.repeats, row.machine) for row in summarize(collect([str(tmp_path)]))]
    assert rows == [("one", 3, "this computer"), ("two", 3, "this computer")]


def test_a_tier_that_fails_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    def script(tier: TierFacts, job_dir: Path) -> int | None:
        if tier == ONE:
            plant(job_dir, [0.1, 0.1], state="failed", error="out of memory")
            return 2
        if tier == TWO:
            raise RuntimeError("the service is away")
        return None

    assert compare(planned((ONE, TWO, FOUR), FLAGS), tmp_path, Planting(script)) == 1
    assert [row.state for row in summarize(collect([str(tmp_path)]))] == [
        "failed",
        "missing",
        "done",
    ]
    (tmp_path / "one" / "repeat-1" / "stats.jsonl").unlink()
    again = Planting(
        lambda tier, job_dir: (
            edit(job_dir / "result.json", state="done") or 0 if tier == ONE else None
        )
    )
    assert compare(planned((ONE, TWO, FOUR), FLAGS), tmp_path, again) == 0
    assert asked(again) == ["one/repeat-1", "two/repeat-1"]


@pytest.mark.parametrize(
    ("codes", "whole"), [((0, 2), 2), ((1, 2), 1), ((75, 1), 75), ((0, -9), 1), ((0, 0), 0)]
)
def test_the_exit_code_says_what_to_do(tmp_path: Path, codes: tuple[int, int], whole: int) -> None:
    assert (
        compare(
            planned((ONE, TWO), FLAGS), tmp_path, Planting(lambda tier, job_dir: codes[tier == TWO])
        )
        == whole
    )


def test_another_comparison_in_the_folder_is_refused(tmp_path: Path) -> None:
    compare(planned((ONE, TWO), FLAGS), tmp_path, Planting())
    longer = (*FLAGS[:-3], "--steps=20", *FLAGS[-2:], "--seed=1")
    two_workers = dataclasses.replace(TWO, workers=2)
    for key, other in {
        "steps: 40 stored, 20 given; seed: unset stored, 1 given": planned((ONE, TWO), longer),
        "skip_bad_images: unset stored, true given": planned(
            (ONE, TWO), (*FLAGS, "--skip_bad_images")
        ),
        "checkpoint_every_steps: 10 stored, unset given": planned((ONE, TWO), FLAGS[:-1]),
        "tiers: one, two stored, one given": planned((ONE,), FLAGS),
        "tier two: {.*'workers': 1.* stored, .*'workers': 2.*": planned((ONE, two_workers), FLAGS),
        "scaling: strong stored, weak given": planned((ONE, TWO), FLAGS, "weak"),
    }.items():
        runner = Planting()
        with pytest.raises(
            UserError, match=rf"holds another comparison \({key}\): use another --out"
        ):
            compare(other, tmp_path, runner)
        assert runner.asked == []
    priced = TierFacts("one", "n1", price_per_hour=0.5)
    # the price may be told later
    assert compare(planned((priced, TWO), FLAGS, command="x"), tmp_path, Planting()) == 0
    assert summarize(collect([str(tmp_path)]))[0].facts.price_per_hour == 0.5


def test_a_command_that_came_to_nothing_may_be_mended_in_its_folder(tmp_path: Path) -> None:
    compare(planned((ONE, TWO), FLAGS), tmp_path, Planting(lambda tier, job_dir: 1))
    assert (
        compare(planned((ONE, FOUR), (*FLAGS, "--seed=1")), tmp_path, Planting(), parallel=2) == 0
    )
    assert [row.tier for row in summarize(collect([str(tmp_path)]))] == ["one", "four"]


@pytest.mark.parametrize(
    ("content", "what"), [(None, "missing"), ("{", "damaged"), ('{"tiers": [1]}', "damaged")]
)
def test_runs_of_which_nothing_says_what_they_are_are_not_adopted(
    tmp_path: Path, content: str | None, what: str
) -> None:
    compare(planned((ONE, TWO), FLAGS), tmp_path, Planting())
    (tmp_path / "comparison.json").unlink()
    if content is not None:
        (tmp_path / "comparison.json").write_text(content)
    line = (
        rf"comparison\.json is {what}, but the folder holds runs .* or see `python -m deploy report"
        rf" {tmp_path}`"
    )
    with pytest.raises(UserError, match=line):
        compare(planned((ONE, TWO), FLAGS), tmp_path, Planting())


def test_the_folder_of_a_training_is_refused(tmp_path: Path) -> None:
    plant(tmp_path / "run", [0.1, 0.1])
    with pytest.raises(
        UserError, match=r"out=.*run holds a training run \(run\.json\): use another --out"
    ):
        compare(planned((ONE,), FLAGS), tmp_path / "run", Planting())


def refuses(tier: TierFacts, job_dir: Path) -> int:
    """As the trainer leaves its folder where it does not come to train."""
    job_dir.mkdir(parents=True, exist_ok=True)
    (job_dir / "result.json").write_text(
        '{"state": "failed", "error": "data=x: no images", "exit_code": 2}'
    )
    return 2


def test_what_the_first_run_is_refused_for_keeps_the_others_from_starting(
    tmp_path: Path, capsys: Capture
) -> None:
    """What only a later run is refused for keeps none from starting."""
    runner = Planting(refuses)
    with pytest.raises(UserError, match=r"^data=x: no images$"):
        compare(planned((ONE, TWO, FOUR), FLAGS), tmp_path / "first", runner)
    assert asked(runner) == ["one/repeat-1"]
    runner = Planting(lambda tier, job_dir: refuses(tier, job_dir) if tier == TWO else None)
    assert compare(planned((ONE, TWO, FOUR), FLAGS), tmp_path / "later", runner) == 2
    assert asked(runner) == ["one/repeat-1", "two/repeat-1", "four/repeat-1"]
    line = "two, repeat 1: exit code 2: data=x: no images; fix that, then run the command again ("
    assert line in capsys.readouterr().out


def test_a_second_comparison_at_the_same_time_is_refused(tmp_path: Path) -> None:
    said = []

    def second(tier: TierFacts, job_dir: Path) -> None:
        with deploy("compare", "l4x1", *FLAGS, f"--out={tmp_path / 'out'}") as process:
            said.append(process.communicate(timeout=60)[1])

    assert compare(planned((ONE,), FLAGS), tmp_path / "out", Planting(second)) == 0
    assert said == [
        f"error: out={tmp_path}/out: another run is writing to it: wait, or use another --out\n"
    ]


def test_strong_scaling_keeps_the_global_batch_and_weak_the_batch_per_replica(
    tmp_path: Path,
) -> None:
    runner = Planting()
    compare(planned((ONE, TWO), FLAGS, "strong"), tmp_path / "strong", runner)
    assert {tuple(flags) for _, _, flags in runner.asked} == {FLAGS}
    runner = Planting()
    compare(planned((TWO, ONE, FOUR), FLAGS, "weak"), tmp_path / "weak", runner)
    batches = {tier: [flag for flag in flags if "batch" in flag] for tier, _, flags in runner.asked}
    assert batches == {
        "two": ["--global_batch_size=8"],
        "one": ["--global_batch_size=4"],
        "four": ["--global_batch_size=16"],
    }


def test_what_can_be_known_to_fail_is_refused_before_anything_runs(tmp_path: Path) -> None:
    three = TierFacts("three", "g2", "NVIDIA_L4", 3)
    for line, plan in {
        "three: global_batch_size=8 does not divide over 3 replicas: take 6 or 9": planned(
            (ONE, three), FLAGS
        ),
        "--job_dir is not for a comparison: --out names the folder": planned(
            (ONE,), (*FLAGS, "--job_dir=x")
        ),
        "--replicas is not for a comparison: the tiers set the number": planned(
            (ONE,), (*FLAGS, "--replicas=2")
        ),
    }.items():
        runner = Planting()
        with pytest.raises(UserError, match=line):
            compare(plan, tmp_path / "out", runner)
        assert (runner.asked, (tmp_path / "out").exists()) == ([], False)


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]], ids=["SIGTERM", "closed"]
)
def test_an_interrupt_stops_the_runs_and_starts_no_other(
    tmp_path: Path, numbers: list[signal.Signals], monkeypatch: pytest.MonkeyPatch
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
            compare(planned((ONE, TWO, FOUR), FLAGS), tmp_path, runner)
        assert signal.getsignal(numbers[0]) == unheard
    finally:
        signal.signal(numbers[0], before)
    assert runner.stopped.is_set()
    assert asked(runner) == ["one/repeat-1"]
    again = Planting()
    assert compare(planned((ONE, TWO, FOUR), FLAGS), tmp_path, again) == 0
    assert len(again.asked) == 3


def test_data_that_are_not_there_start_nothing(tmp_path: Path, capsys: Capture) -> None:
    flags = [
        *(flag for flag in FLAGS if "data=" not in flag),
        f"--data=idx:{tmp_path / 'nothere'}",
        f"--out={tmp_path / 'out'}",
    ]
    assert main(["compare", "l4x1", "l4x2", *flags]) == 2
    shown = capsys.readouterr()
    line = (
        f"error: data=idx:{tmp_path}/nothere: there is no such path: give a folder or file of this"
        " machine\n"
    )
    assert shown.err == line
    assert ("runs; its output" in shown.out, list((tmp_path / "out").iterdir())) == (False, [])


def deploy(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow  # quick ones: test_script.py compares a script, test_local.py runs the trainer
def test_end_to_end_on_this_machine(tmp_path: Path) -> None:
    """Real runs on 1 and 2 simulated devices: the same losses, and a report."""
    with deploy(
        "compare", "l4x1", "l4x2", *FLAGS, f"--out={tmp_path / 'out'}", "--parallel=2"
    ) as process:
        out, error = process.communicate(timeout=300)
    assert (process.returncode, error) == (0, "")
    assert (
        "Simulated devices: l4x1, l4x2: their speeds do not apply to real machines, so they are not"
        in out
    )
    assert "Up to 2 runs shared this machine and slowed each other down" in out
    one, two = summarize(collect([str(tmp_path / "out")]))
    assert (one.batch_per_replica, two.batch_per_replica, one.steps, two.steps) == (8, 4, 40, 40)
    assert one.final_loss == pytest.approx(two.final_loss, rel=1e-3)
    assert (one.step_seconds.count, one.values["step_seconds"]) == (3, None)
    page = (tmp_path / "out" / "report.html").read_text()
    assert (
        "<summary>l4x1, l4x2</summary><pre>python -m deploy compare l4x1 l4x2"
        f" --out={tmp_path / 'out'}" in page
    )
    assert "trainer.task" not in page
