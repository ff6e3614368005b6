"""The plan with runs at hand: what follows from a short run, what is not known, and how far it was
off afterwards."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.planning.extrapolation import Extrapolation, extrapolate
from deploy.report.collection import Collection, collect
from deploy.tiers.tier import TierFacts
from tests.deploy.cli.test_compare import Planting, compare
from tests.deploy.conftest import Command, output_of, task_of, trains
from tests.deploy.emulator import Emulator
from tests.deploy.planted import content, edit, plant, planted_plan
from tests.support import refused
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage.local_files import Address

CONFIG = TrainConfig(model="mlp", global_batch_size=100, learning_rate=0.1, steps=10_000)
CPU = TierFacts("cpu", "n1", price_per_hour=0.5)
L4X2 = TierFacts("l4x2", "g2", "NVIDIA_L4", 2, price_per_hour=2.0)
L4X4 = TierFacts("l4x4", "g2", "NVIDIA_L4", 4)


def known(
    measured: Collection, tier: TierFacts, config: TrainConfig = CONFIG
) -> tuple[Extrapolation, list[str]]:
    """Returns the estimate of one tier, for which a time must be known, and the assumptions."""
    (estimated,), assumptions = extrapolate(measured, [tier], config)
    return estimated, assumptions


def short_run(
    tier: TierFacts, device: str = "GPU", gpu: str = "NVIDIA L4", out: str = "short"
) -> Collection:
    """A comparison of one tier and 200 steps: 5 s to start, then steps of 0.1 s and nothing
    else."""

    def script(tier: TierFacts, job_dir: Path) -> int:
        devices = [f"{device}:{index}" for index in range(tier.devices)]
        plant(job_dir, [0.1] * 20, devices=devices, gpu=gpu if device == "GPU" else "")
        return 0

    flags = ("--recipe=mlp_mnist", "--global_batch_size=100")
    assert compare(Planting(script), tier, flags=flags, out=out) == 0
    return collect([out])


def test_a_tier_of_the_short_run_has_its_own_times() -> None:
    cpu, assumptions = known(short_run(CPU, device="CPU"), CPU)
    assert cpu.seconds.middle == pytest.approx(5 + 10_000 * 0.1)
    # its start is less sure
    assert (cpu.seconds.low, cpu.seconds.high) == pytest.approx((2.5 + 1000, 10 + 1000))
    assert "cpu: its own step times, the quartiles as interval" in assumptions
    assert "cpu: the CPU of the short run is taken for n1" in assumptions


def test_more_devices_lie_between_ideal_and_no_gain() -> None:
    four, assumptions = known(short_run(L4X2), L4X4)
    assert (four.seconds.low, four.seconds.high) == pytest.approx((2.5 + 500, 10 + 1000))
    assert four.seconds.middle == pytest.approx(5 + 1000 / 2**0.5)
    assert any("4 devices take 0.500 to 1.00 x the time of 2" in line for line in assumptions)


def ring(devices: int) -> float:
    """Seconds of a step: 0.16 of work that is shared, 0.02 fixed, a ring all-reduce of 0.01 x 2 (N
    - 1) / N."""
    return 0.16 / devices + 0.02 + 0.01 * 2 * (devices - 1) / devices


def on_l4s(devices: int, seconds: float, **more: Any) -> Path:
    names = [f"GPU:{index}" for index in range(devices)]
    folder = f"l4x{devices}/repeat-1"
    return plant(folder, [seconds] * 20, devices=names, gpu="NVIDIA L4", **more)


def two_tiers(*seconds: float) -> Collection:
    for devices, each in enumerate(seconds, start=1):
        on_l4s(devices, each)
    return collect(["."])


def test_two_measured_tiers_tell_of_a_larger_one_and_fewer_rows_leave_it_wide() -> None:
    measured = two_tiers(ring(1), ring(2))
    four, assumptions = known(measured, L4X4)
    # no gain at all
    assert four.step.low < ring(4) < four.step.high == pytest.approx(1.05 * ring(2))
    words = next(
        line for line in assumptions if "by a / N + b through 1 and 2 devices, 4 take" in line
    )
    assert words.endswith("; a micro-batch has fewer rows there, for which no rule held")
    two_machines, _ = known(measured, replace(L4X4, accelerators=2, workers=2))
    # another network: not measured, so ideal to no gain
    assert two_machines.seconds.low < four.seconds.low


@pytest.mark.parametrize(("batches", "micro_batches"), [((25, 50), (1, 1)), ((100, 100), (4, 2))])
def test_equal_rows_of_micro_batches_are_asked_by_weak_scaling_or_by_their_number(
    batches: tuple[int, int], micro_batches: tuple[int, int]
) -> None:
    """25 rows a pass on 1 and 2 devices, for 100 on 4: each run's time is taken for as many rows as
    are planned."""
    for devices, batch, count in zip((1, 2), batches, micro_batches, strict=True):
        seconds = 0.1 * batch / 25 / devices
        run = on_l4s(devices, seconds, batch=batch) / "run.json"
        edit(run, config={**content(run)["config"], "micro_batches": count})
    four, assumptions = known(collect(["."]), L4X4)
    assert four.step.middle == pytest.approx(0.1)
    assert (four.step.low, four.step.high) == pytest.approx((0.0877, 0.134))
    assert not any("fewer rows" in line for line in assumptions)


@pytest.mark.parametrize(("seconds", "expected"), [((0.1, 0.04), 0.02), ((0.1, 0.2), 0.2)])
def test_more_than_ideal_and_less_than_nothing_are_not_extrapolated(
    seconds: tuple[float, float], expected: float
) -> None:
    four, _ = known(two_tiers(*seconds), L4X4)
    assert four.step.low < expected < four.step.high < 2.2 * expected


@pytest.mark.parametrize(
    ("measured", "device", "asked"),
    [(CPU, "CPU", [L4X2]), (L4X2, "GPU", [CPU]), (L4X2, "CPU", [L4X4, L4X2, CPU])],
)
def test_another_kind_of_device_and_a_simulated_one_say_nothing_of_a_tier(
    measured: TierFacts, device: str, asked: list[TierFacts]
) -> None:
    assert extrapolate(short_run(measured, device), asked, CONFIG) == ([], [])


def test_a_gpu_of_this_machine_is_the_tiers_only_by_its_name() -> None:
    another = short_run(L4X2, gpu="NVIDIA GeForce RTX 4090 Laptop GPU", out="another")
    assert extrapolate(another, [L4X2, L4X4], CONFIG) == ([], [])
    unnamed = short_run(L4X2, gpu="", out="unnamed")
    (same,), assumptions = extrapolate(unnamed, [L4X2, L4X4], CONFIG)
    assert same.tier == "l4x2"
    assert "l4x2: the GPU of the short run is taken for NVIDIA_L4" in assumptions


EPOCHS = replace(CONFIG, steps=None, epochs=100)


def test_epochs_are_counted_in_the_steps_of_the_short_run_or_refused() -> None:
    folder = plant("cpu", [0.1] * 20, devices=["CPU:0"])
    assert known(collect([str(folder)]), CPU, EPOCHS)[0].seconds.middle == pytest.approx(
        5 + 100 * 60 * 0.1
    )
    edit(folder / "run.json", data=None)
    with refused("does not say how many steps an epoch has: give --steps= instead of --epochs="):
        extrapolate(collect([str(folder)]), [CPU], EPOCHS)
    assert known(collect([str(folder)]), CPU)[0].seconds.middle == pytest.approx(5 + 10_000 * 0.1)


def test_what_the_short_run_cannot_tell_is_refused() -> None:
    measured = short_run(CPU, device="CPU")
    other = TrainConfig(model="mlp", global_batch_size=200, learning_rate=0.1, steps=100)
    with refused("was trained with other settings (global_batch_size: 100 there, 200 here)"):
        extrapolate(measured, [CPU], other)
    plant("one-report", [0.1])
    with refused("the short run has no step times"):
        extrapolate(collect(["one-report"]), [CPU], CONFIG)


def test_the_verb_plans_by_a_short_run(typed: Command) -> None:
    short_run(CPU, device="CPU")
    given = [*SETTINGS, "--from=short", "--out=out", "--price-per-hour=cpu=0.5"]
    shown = typed("plan", "cpu", *given, "--steps=200", f"--plan={planted_plan()}", "--fit")
    assert "# cpu: --fit is ignored: a run of --from shows this tier as it is\n" in shown
    assert re.search(r"cheapest +cpu standard +0\.02 USD \(0\.01 - 0\.05\) +2\.4 min", shown)
    written = Path("out/plan.md").read_text()
    assert "the time to get machines and to start a container is not included" in written
    (cpu,) = content("out/forecast.json")["tiers"]
    assert cpu["seconds"]["middle"] == pytest.approx(25)


SETTINGS = ["--recipe=mlp_mnist", "--model=mlp", "--global_batch_size=100", "--learning_rate=0.1"]


def test_some_steps_are_measured_on_a_tier_once_and_the_plan_says_so(
    cloud: Emulator, bucket: Address, typed: Command
) -> None:
    """As many steps as XLA needs to compile them as in the whole run; a second tier is added to the
    first."""
    cloud.run = trains(Path("trained"))
    where = [f"--bucket=gs://{bucket.bucket}", "--max_cost=1", "--steps=20000", "--out=out"]
    flags = ["--region=us-central1", "--backend=sdk", "--image=us-docker.pkg.dev/p/r/x:1", *where]
    words = ["l4x1", "l4x2", *SETTINGS, *flags, f"--plan={planted_plan()}"]
    shown = typed("plan", *words, "--measure=l4x1", "--dry_run")
    assert "nothing was sent: 500 steps would be measured; the plan does without them" in shown
    assert "; surer: --measure=l4x" in shown
    assert cloud.requests == []
    for tier, by, jobs in (
        ("l4x1", ["l4x1", ""], 1),
        ("l4x1", ["l4x1", ""], 1),
        ("l4x2", ["l4x1", "l4x2"], 2),
    ):
        assert " x as long, measured on l4x" in typed("plan", *words, f"--measure={tier}")
        tiers = content("out/forecast.json")["tiers"]
        assert [each["measured"] for each in tiers] == by
        assert len(cloud.jobs) == jobs
    assert len({str(output_of(job)).rpartition("/")[0] for job in cloud.jobs.values()}) == 1
    args = task_of(cloud.jobs["1000"])["args"]
    assert {"--steps=500", "--report_every_steps=100"} <= {*args}
    assert "--steps=20000" not in args
