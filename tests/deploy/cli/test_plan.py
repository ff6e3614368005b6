"""The plan with runs at hand: what follows from a short run, what is not known, and how far it was
off afterwards."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.__main__ import main
from deploy.cli import plan
from deploy.planning.extrapolation import Extrapolation, extrapolate
from deploy.platform.gcloud_and_sdk import Session
from deploy.report.collection import Collection, collect, repeat_folder
from deploy.tiers.tier import TierFacts
from tests.deploy.cli.test_compare import Planting, compare, planned
from tests.deploy.conftest import Capture, output_of, trains
from tests.deploy.emulator import Emulator
from tests.deploy.planted import edit, plant, planted_plan
from trainer.base.errors import UserError
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


def short_run(tmp_path: Path, tier: TierFacts, device: str = "GPU", gpu: str = "NVIDIA L4") -> Path:
    """A comparison of one tier and 200 steps: 5 s to start, then steps of 0.1 s and nothing
    else."""

    def script(tier: TierFacts, job_dir: Path) -> int:
        devices = [f"{device}:{index}" for index in range(tier.devices)]
        plant(job_dir, [0.1] * 20, devices=devices, gpu=gpu if device == "GPU" else "")
        return 0

    flags = ("--recipe=mlp_mnist", "--global_batch_size=100")
    assert compare(planned((tier,), flags), tmp_path / "short", Planting(script)) == 0
    return tmp_path / "short"


def test_a_tier_of_the_short_run_has_its_own_times(tmp_path: Path) -> None:
    cpu, assumptions = known(collect([str(short_run(tmp_path, CPU, device="CPU"))]), CPU)
    assert cpu.seconds.middle == pytest.approx(5 + 10_000 * 0.1)
    # its start is less sure
    assert (cpu.seconds.low, cpu.seconds.high) == pytest.approx((2.5 + 1000, 10 + 1000))
    assert "cpu: its own step times, the quartiles as interval" in assumptions
    assert "cpu: the CPU of the short run is taken for n1" in assumptions


def test_more_devices_lie_between_ideal_and_no_gain(tmp_path: Path) -> None:
    four, assumptions = known(collect([str(short_run(tmp_path, L4X2))]), L4X4)
    assert (four.seconds.low, four.seconds.high) == pytest.approx((2.5 + 500, 10 + 1000))
    assert four.seconds.middle == pytest.approx(5 + 1000 / 2**0.5)
    assert any("4 devices take 0.500 to 1.00 x the time of 2" in line for line in assumptions)


def ring(devices: int) -> float:
    """Seconds of a step: 0.16 of work that is shared, 0.02 fixed, a ring all-reduce of 0.01 x 2 (N
    - 1) / N."""
    return 0.16 / devices + 0.02 + 0.01 * 2 * (devices - 1) / devices


def two_tiers(tmp_path: Path, *seconds: float) -> Path:
    for devices, each in enumerate(seconds, start=1):
        names = [f"GPU:{index}" for index in range(devices)]
        plant(
            repeat_folder(tmp_path, f"l4x{devices}", 1), [each] * 20, devices=names, gpu="NVIDIA L4"
        )
    return tmp_path


def test_two_measured_tiers_tell_of_a_larger_one_and_fewer_rows_leave_it_wide(
    tmp_path: Path,
) -> None:
    measured = collect([str(two_tiers(tmp_path, ring(1), ring(2)))])
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
    tmp_path: Path, batches: tuple[int, int], micro_batches: tuple[int, int]
) -> None:
    """25 rows a pass on 1 and 2 devices, for 100 on 4: each run's time is taken for as many rows as
    are planned."""
    for devices, batch, count in zip((1, 2), batches, micro_batches, strict=True):
        names = [f"GPU:{index}" for index in range(devices)]
        run = plant(
            repeat_folder(tmp_path, f"l4x{devices}", 1),
            [0.1 * batch / 25 / devices] * 20,
            devices=names,
            gpu="NVIDIA L4",
            batch=batch,
        )
        edit(
            run / "run.json",
            config={**json.loads((run / "run.json").read_text())["config"], "micro_batches": count},
        )
    four, assumptions = known(collect([str(tmp_path)]), L4X4)
    assert four.step.middle == pytest.approx(0.1)
    assert (four.step.low, four.step.high) == pytest.approx((0.0877, 0.134))
    assert not any("fewer rows" in line for line in assumptions)


@pytest.mark.parametrize(("seconds", "expected"), [((0.1, 0.04), 0.02), ((0.1, 0.2), 0.2)])
def test_more_than_ideal_and_less_than_nothing_are_not_extrapolated(
    tmp_path: Path, seconds: tuple[float, float], expected: float
) -> None:
    four, _ = known(collect([str(two_tiers(tmp_path, *seconds))]), L4X4)
    assert four.step.low < expected < four.step.high < 2.2 * expected


@pytest.mark.parametrize(
    ("measured", "device", "asked"),
    [
        (CPU, "CPU", [L4X2]),
        (L4X2, "GPU", [CPU]),
        (L4X2, "CPU", [L4X4, L4X2, CPU]),
    ],
    ids=["cpu", "gpu", "simulated"],
)
def test_another_kind_of_device_and_a_simulated_one_say_nothing_of_a_tier(
    tmp_path: Path, measured: TierFacts, device: str, asked: list[TierFacts]
) -> None:
    assert extrapolate(collect([str(short_run(tmp_path, measured, device))]), asked, CONFIG) == (
        [],
        [],
    )


def test_a_gpu_of_this_machine_is_the_tiers_only_by_its_name(tmp_path: Path) -> None:
    another = collect(
        [str(short_run(tmp_path / "another", L4X2, gpu="NVIDIA GeForce RTX 4090 Laptop GPU"))]
    )
    assert extrapolate(another, [L4X2, L4X4], CONFIG) == ([], [])
    unnamed = collect([str(short_run(tmp_path / "unnamed", L4X2, gpu=""))])
    (same,), assumptions = extrapolate(unnamed, [L4X2, L4X4], CONFIG)
    assert same.tier == "l4x2"
    assert "l4x2: the GPU of the short run is taken for NVIDIA_L4" in assumptions


EPOCHS = replace(CONFIG, steps=None, epochs=100)


def test_epochs_are_counted_in_the_steps_of_the_short_run_and_refused_if_their_length_is_unknown(
    tmp_path: Path,
) -> None:
    folder = plant(tmp_path / "cpu", [0.1] * 20, devices=["CPU:0"])
    assert known(collect([str(folder)]), CPU, EPOCHS)[0].seconds.middle == pytest.approx(
        5 + 100 * 60 * 0.1
    )
    edit(folder / "run.json", data=None)
    with pytest.raises(
        UserError,
        match="does not say how many steps an epoch has: give --steps= instead of --epochs=",
    ):
        extrapolate(collect([str(folder)]), [CPU], EPOCHS)
    assert known(collect([str(folder)]), CPU)[0].seconds.middle == pytest.approx(5 + 10_000 * 0.1)


def test_what_the_short_run_cannot_tell_is_refused(tmp_path: Path) -> None:
    measured = collect([str(short_run(tmp_path, CPU, device="CPU"))])
    other = TrainConfig(model="mlp", global_batch_size=200, learning_rate=0.1, steps=100)
    with pytest.raises(
        UserError,
        match=r"was trained with other settings \(global_batch_size: 100 there, 200 here\)",
    ):
        extrapolate(measured, [CPU], other)
    plant(tmp_path / "one-report", [0.1])
    with pytest.raises(UserError, match="the short run has no step times"):
        extrapolate(collect([str(tmp_path / "one-report")]), [CPU], CONFIG)


def test_the_verb_plans_by_a_short_run(tmp_path: Path, capsys: Capture) -> None:
    short = short_run(tmp_path, CPU, device="CPU")
    out = tmp_path / "out"
    flags = [
        "--recipe=mlp_mnist",
        "--model=mlp",
        "--global_batch_size=100",
        "--learning_rate=0.1",
        "--steps=200",
    ]
    given = ["cpu", *flags, f"--from={short}", f"--out={out}", "--price-per-hour=cpu=0.5"]
    assert main(["plan", *given, f"--plan={planted_plan(tmp_path)}", "--fit"]) == 0
    shown, notes = capsys.readouterr()
    assert "# cpu: --fit is ignored: a run of --from shows this tier as it is\n" in notes
    assert (
        "  cheapest    cpu standard          0.02 USD (0.01 - 0.05)        2.4 min (1.4 - 6)"
        in shown
    )
    assert (
        "the time to get machines and to start a container is not included"
        in (out / "plan.md").read_text()
    )
    assert json.loads((out / "forecast.json").read_text())["tiers"][0]["seconds"][
        "middle"
    ] == pytest.approx(25)


SETTINGS = [
    "--recipe=mlp_mnist",
    "--model=mlp",
    "--global_batch_size=100",
    "--learning_rate=0.1",
    "--steps=20000",
]


def test_some_steps_are_measured_on_a_tier_once_and_the_plan_says_so(
    cloud: Emulator, session: Session, bucket: Address, tmp_path: Path, capsys: Capture
) -> None:
    """As many steps as XLA needs to compile them as in the whole run; a second tier is added to the
    first."""
    cloud.run = trains(tmp_path / "trained")
    where = [
        "--region=us-central1",
        f"--bucket=gs://{bucket.bucket}",
        "--max_cost=1",
        "--backend=sdk",
        "--image=us-docker.pkg.dev/p/r/x:1",
    ]
    words = [
        "l4x1",
        "l4x2",
        *SETTINGS,
        f"--plan={planted_plan(tmp_path)}",
        f"--out={tmp_path / 'out'}",
        *where,
    ]
    assert plan.main([*words, "--measure=l4x1", "--dry_run"], session) == 0
    shown = capsys.readouterr().out
    assert "nothing was sent: 500 steps would be measured; the plan does without them" in shown
    assert "; surer: --measure=l4x" in shown
    assert cloud.requests == []
    for tier, by, jobs in (
        ("l4x1", ["l4x1", ""], 1),
        ("l4x1", ["l4x1", ""], 1),
        ("l4x2", ["l4x1", "l4x2"], 2),
    ):
        assert plan.main([*words, f"--measure={tier}"], session) == 0
        assert " x as long, measured on l4x" in capsys.readouterr().out
        tiers = json.loads((tmp_path / "out" / "forecast.json").read_text())["tiers"]
        assert [each["measured"] for each in tiers] == by
        assert len(cloud.jobs) == jobs
    assert len({str(output_of(job)).rpartition("/")[0] for job in cloud.jobs.values()}) == 1
    args = next(iter(cloud.jobs.values()))["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["args"]
    assert {"--steps=500", "--report_every_steps=100"} <= {*args}
    assert "--steps=20000" not in args
