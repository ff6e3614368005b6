"""What is sent: the full spec of every tier, word for word, and the refusals that need the
trainer's settings."""

import copy
import dataclasses
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec

from deploy.api.submit import describe
from deploy.job.cost import cost_confirmation
from deploy.job.job import Job
from deploy.job.options import JobOptions
from deploy.job.sending import check_resources
from deploy.job.spec import NCCL_SETTINGS, machine_spec
from deploy.job.workload import workload_on
from deploy.packaging import distributions
from deploy.packaging.image_choice import (
    BOOTSTRAP,
    IMAGE_RECORD,
    START,
    BuiltImage,
    remember,
    remembered,
)
from deploy.packaging.packages import Package
from deploy.platform import buckets
from deploy.platform.gcloud_and_sdk import to_yaml
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.tier import JOB_CONFIGS, Tier, load_tier, machine_tier
from tests.deploy.cli.wrong_inputs import TWO
from tests.deploy.conftest import Capture, error_of, run, start_of, variables_of
from tests.deploy.emulator import Emulator
from tests.fixtures import Json, Patch
from trainer.base.errors import UserError
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import DATA_KINDS
from trainer.data import sources

GOLDEN = Path(__file__).parent / "golden"
GCP = GcpConfig("my-proj", "us-central1", "gs://my-bucket")
FLAGS = ["--recipe=wgan_gp_photos", "--data=gs://my-bucket/photos"]


def wheel(name: str, version: str, files: dict[str, bytes | Path]) -> Package:
    """Returns a package whose wheel counts as built."""
    package = Package(name, version, files)
    vars(package)["sha256"] = "0123456789abcdef"
    return package


PACKAGE = wheel("vertex_trainer", "1.0", {})


def job(
    tier: str | Tier,
    *flags: str,
    gcp: GcpConfig = GCP,
    code: Sequence[Package] = (PACKAGE,),
    **wanted: Any,
) -> Any:
    options = JobOptions(name="demo", **wanted)
    on = load_tier(tier, "", partial(machine_spec, options)) if isinstance(tier, str) else tier
    return Job(workload_on(on, Overrides.parse(flags or FLAGS)), gcp, options, "", code)


def task(made: Job, pool: int = 0) -> Any:
    spec = made.spec["workerPoolSpecs"][pool]
    return spec.get("containerSpec") or spec["pythonPackageSpec"]


@pytest.mark.parametrize("path", sorted(JOB_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_dry_run_of_a_tier_is_the_golden_one(path: Path, monkeypatch: Patch) -> None:
    """What `submit` says of the job, and its whole spec but for one hash. UPDATE_GOLDEN=1 writes
    them anew."""
    monkeypatch.setattr(
        distributions, "versions", lambda: {"tensorflow": "2.21.0", "keras": "3.15.1"}
    )
    submitted = job(path.stem)
    spec = copy.deepcopy(dict(submitted.spec))
    for pool in spec["workerPoolSpecs"]:
        command = pool["containerSpec"]["command"]
        assert command == ["python3", "-c", START, BOOTSTRAP.uri(GCP.bucket)]
        command[3] = command[3].replace(BOOTSTRAP.sha256, "(SHA-256)")
    made = "".join(f"# {line}\n" for line in describe([submitted])) + to_yaml(spec)
    golden = GOLDEN / path.name
    assert {path.name for path in GOLDEN.glob("*.yaml")} <= {
        path.name for path in JOB_CONFIGS.glob("*.yaml")
    }
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(made)
    before = golden.read_text() if golden.exists() else ""
    assert made == before, f"if that is meant: UPDATE_GOLDEN=1 python -m pytest {__file__}"
    CustomJobSpec.from_json(json.dumps(yaml.safe_load(made)))


def test_reading_data_from_another_region_is_priced_and_the_question_counts_it(
    cloud: Emulator, capsys: Capture, monkeypatch: Patch
) -> None:
    cloud.objects["my-bucket/photos/a.jpg"] = bytes(2**20)
    made = job("l4x1-2workers")
    assert check_resources([made]) == 0
    cloud.bucket_location = "US-EAST1"
    assert check_resources([made]) == pytest.approx(2 * 0.02 / 1024)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "gs://my-bucket is in US-EAST1, the job runs in us-central1: slower, and 0.02 USD a GiB"
    )
    assert line.endswith("): 0.00 GiB of data, 0.00 USD if each worker reads them once")
    monkeypatch.setattr(buckets, "_MANY", 1)  # a listing would be long
    assert check_resources([made]) == 0
    assert capsys.readouterr().out.endswith("#network-buckets)\n")
    confirmation = cost_confirmation(
        [made.tier], [(1.0, 2.0)], JobOptions(), alternatives=True, transfer_usd=7.0
    )
    assert "by plan 8.00 to 9.00 USD" in confirmation.text
    unplanned = cost_confirmation(
        [made.tier], [None], JobOptions(), alternatives=False, transfer_usd=500.0
    )
    assert unplanned.refusal.endswith("not submitted: set a limit, such as --max_cost=20")


H200 = ("a3-ultragpu-8g", "NVIDIA_H200_141GB:8")
GB200 = ("a4x-highgpu-4g", "NVIDIA_GB200:4")
T4 = ("n1-standard-8", "NVIDIA_TESLA_T4:1")


@pytest.mark.parametrize(
    ("machine", "changes", "data", "warned"),
    [
        (H200, {}, "gs://b/x", ["a reservation or SPOT is recommended"]),
        (H200, {"spot": True}, "/gcs/b/x", ["/gcs may be missing there (https:"]),
        (H200, {"reservation": "projects/p/zones/z/reservations/r"}, "gs://b/x", []),
        (GB200, {"spot": True}, "gs://b/x", ["its host is Arm, where x86 images do not run"]),
        (T4, {}, "gs://b/x", ["no bfloat16, use --precision=mixed_float16"]),
    ],
)
def test_what_is_known_of_a_machine_is_said_where_it_matters(
    machine: tuple[str, str], changes: Json, data: str, warned: list[str]
) -> None:
    options = JobOptions(image="x/y", **changes)
    flags = ["--precision=mixed_bfloat16", "--checkpoint_every_minutes=9", f"--data={data}"]
    tier = machine_tier(*machine, "", partial(machine_spec, options))
    made = job(tier, "--recipe=wgan_gp_photos", *flags, image="x/y", **changes)
    for line, text in zip(made.warnings, warned, strict=True):
        assert f": {text}" in line


@pytest.mark.parametrize(
    ("here", "installed", "why"),
    [
        (
            {"tensorflow": "2.20.0", "keras": "3.15.0"},
            ["tensorflow==2.20.0", "keras==3.15.0"],
            ", as here, at each start",
        ),
        (
            {"tensorflow": "2.22.0", "keras": "3.15.0"},
            ["tensorflow==2.21.*", "keras==3.15.0"],
            "job cannot have the tensorflow 2.22.0 of this machine, at each start",
        ),
        (
            {"tensorflow": "2.21.0+nv25", "keras": "3.16.0.dev2"},
            ["tensorflow==2.21.*", "keras==3.15.*"],
            "cannot have the tensorflow 2.21.0+nv25 and keras 3.16.0.dev2 of this machine",
        ),
        (
            {"keras": "3.15.1"},
            ["tensorflow==2.21.*", "keras==3.15.1"],
            "cannot have the tensorflow (missing) of",
        ),
    ],
)
def test_a_job_installs_the_versions_of_the_desk_if_they_are_admitted(
    here: dict[str, str], installed: list[str], why: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(distributions, "versions", lambda: here)
    made = job("cpu", image="install")
    assert start_of(task(made))["requirements"] == installed
    assert " ".join(installed) + ", " in made.about[0]
    assert why in made.about[0]


OWN = BuiltImage(
    "us-docker.pkg.dev/p/r/mine:1", "", {PACKAGE.name: PACKAGE.digest}, "2026-11-22 18:00"
)


@pytest.mark.parametrize(
    ("tier", "change", "line"),
    [
        ("l4x1", {}, ""),
        ("cpu", {"tensorflow": "tensorflow==2.21.*"}, ""),
        ("l4x1", {"tensorflow": "tensorflow==2.21.*"}, "has no CUDA"),
        (
            "l4x1",
            {"sources": {PACKAGE.name: "000000000000"}},
            "has other sources of vertex_trainer than this folder",
        ),
        (
            "l4x1",
            {"sources": {**OWN.sources, "mine": "1"}},
            "has other sources of mine than this folder",
        ),
    ],
)
def test_the_image_that_was_built_in_this_folder_is_used_where_it_fits(
    tier: str, change: Json, line: str
) -> None:
    remember(dataclasses.replace(OWN, **change))
    made = job(tier)
    if line:
        assert task(made)["imageUri"] == "python:3.12-slim"
        assert made.about[0].startswith(
            f"{OWN.uri}, built in this folder, {line}: not used; build it again"
        )
        assert made.about[1].startswith("runs in python:3.12-slim: each worker installs")
    else:
        assert task(made)["imageUri"] == OWN.uri
        assert made.packages == ()
        assert "command" not in task(made)
        assert made.about == (
            f"runs in {OWN.uri}, built in this folder on 2026-11-22 18:00 from these sources",
        )


@pytest.mark.parametrize("text", ["{", "[]", '{"uri": 1}'])
def test_a_damaged_record_of_an_image_is_one_line(text: str) -> None:
    remember(OWN)
    assert remembered() == OWN
    IMAGE_RECORD.write_text(text)
    with pytest.raises(
        UserError, match=r"^runs/image\.json: not a record of an image \(.*\): remove it$"
    ):
        remembered()


def test_a_recipe_file_goes_along_as_flags_and_flags_win(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "model: mlp\ndata: digits\nimage_size: 8\nepochs: 3\njit_compile: true\nlearning_rate:"
        " 1.0e-3\n"
    )
    made = job("cpu", f"--recipe={recipe}", "--steps=7", "--image_size=12", "--skip_bad_images")
    arguments = task(made)["args"]
    assert not any("recipe" in argument or "epochs" in argument for argument in arguments)
    there = Overrides.parse(arguments).config
    here = made.workload.config
    assert there.model == "mlp"
    assert there.image_size == 12
    assert there.steps == 7
    assert there.epochs is None
    assert there.jit_compile == "true"
    assert there.skip_bad_images
    assert there.learning_rate == here.learning_rate


def test_what_a_tier_says_is_passed_through_untouched() -> None:
    """Its image too, unless another is asked for."""
    pools = yaml.safe_load((JOB_CONFIGS / "l4x1.yaml").read_text())["workerPoolSpecs"]
    del pools[0]["pythonPackageSpec"]
    env = [{"name": "A", "value": "b"}]
    pools[0]["containerSpec"] = {"imageUri": "a/b", "env": env}
    changes = {
        "network": "projects/1/global/networks/n",
        "serviceAccount": "a@b.iam.gserviceaccount.com",
        "enableWebAccess": True,
        "tensorboard": "projects/p/locations/us-central1/tensorboards/1",
        "scheduling": {"timeout": "600s", "strategy": "SPOT", "disableRetries": True},
    }
    made = dict(job(tier_with(workerPoolSpecs=pools, **changes)).spec)
    assert changes.items() <= made.items()
    remember(OWN)
    tier = tier_with(workerPoolSpecs=pools)
    assert task(job(tier))["env"] == env
    other = "eu-docker.pkg.dev/p/r/python:3"
    images = {"": "a/b", "install": "python:3.12-slim", f"install:{other}": other}
    for image, uri in images.items():
        assert task(job(tier, image=image))["imageUri"] == uri


def test_max_cost_sets_the_timeout_by_the_price_and_retries_may_be_off() -> None:
    made = job("l4x4", max_cost=5.0)
    hourly = load_tier("l4x4").price_per_hour
    seconds = int(made.spec["scheduling"]["timeout"].removesuffix("s"))
    assert 5 - hourly / 3600 < seconds / 3600 * hourly <= 5
    assert made.tier.timeout_s == seconds
    # never longer than the tier's own
    assert job("l4x4", max_cost=1e5).tier.timeout_s == load_tier("l4x4").timeout_s
    # no lack of money
    assert job(tier_with(scheduling={"timeout": "300s"}), max_cost=100.0).tier.timeout_s == 300
    assert job("l4x4", disable_retries=True).spec["scheduling"] == {
        "timeout": "86400s",
        "disableRetries": True,
    }


def tier_with(**changes: object) -> Tier:
    """l4x1 with other keys in its spec."""
    file = Path("changed.yaml")
    file.write_text(
        yaml.safe_dump({**yaml.safe_load((JOB_CONFIGS / "l4x1.yaml").read_text()), **changes})
    )
    return load_tier(str(file))


DIGITS = "--recipe=wgan_gp_digits"
BOARD = "projects/p/locations/us-east1/tensorboards/1"


@pytest.mark.parametrize(
    "given", ["gs://my-bucket/here", "gs://my-bucket/here/", "/gcs/my-bucket/here"]
)
def test_a_job_dir_is_an_address(given: str) -> None:
    made = job("cpu", DIGITS, f"--job_dir={given}")
    assert made.output == "gs://my-bucket/here"
    assert made.spec["baseOutputDirectory"] == {"outputUriPrefix": made.output}
    assert not any("job_dir" in argument for argument in task(made)["args"])
    deep = dataclasses.replace(GCP, bucket="gs://my-bucket/deep")
    assert job("cpu", DIGITS, gcp=deep).output == "gs://my-bucket/deep/jobs/demo"


def test_the_kinds_of_data_are_the_trainers() -> None:
    assert set(DATA_KINDS) == set(sources.LOADERS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data", "idx:/gcs/my-bucket/x"),
        ("data", "shards:gs://my-bucket/x"),
        ("initial_model", "/gcs/my-bucket/m"),
    ],
)
def test_what_the_machines_can_see_may_be_read(name: str, value: str) -> None:
    assert (
        getattr(
            job("cpu", "--model=mlp", "--data=mnist", f"--{name}={value}").workload.config, name
        )
        == value
    )


@pytest.mark.parametrize(
    ("changes", "gcp", "line"),
    [
        (
            {"tensorboard": "my-board"},
            GCP,
            "write projects/PROJECT/locations/REGION/tensorboards/ID",
        ),
        (
            {"tensorboard": BOARD, "serviceAccount": "a@b.iam.gserviceaccount.com"},
            GCP,
            "tensorboards/1 is in us-east1, and the job would run in us-central1: use one of",
        ),
        ({"tensorboard": BOARD}, GCP, "tensorboard without serviceAccount"),
        (
            {"baseOutputDirectory": {"outputUriPrefix": "my-bucket/x"}},
            GCP,
            "baseOutputDirectory=my-bucket/x: an address looks",
        ),
        (
            {},
            dataclasses.replace(GCP, region="europe-west1"),
            "region=europe-west1 has no NVIDIA_L4 for training: use --region= with one of us-west1",
        ),
    ],
)
def test_a_tier_that_does_not_fit_the_place_is_refused(
    changes: dict[str, object], gcp: GcpConfig, line: str
) -> None:
    assert line in error_of(lambda: job(tier_with(**changes), gcp=gcp))


def test_too_little_money_or_no_price_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"pays for 77 s of l4x4 \(4.63 USD an hour\).*give 0.77 or more"
    ):
        job("l4x4", max_cost=0.1)
    waits = tier_with(scheduling={"strategy": "FLEX_START", "maxWaitDuration": "60s"})
    assert waits.price_per_hour is None
    # which bounds its price
    assert job(waits, max_cost=5.0).tier.timeout_s == int(5.0 / waits.price.list * 3600)


@pytest.mark.parametrize(
    ("steps", "minutes", "line"),
    [
        (0, 0, "a preemption may lose more than 15 minutes: use --checkpoint_every_minutes=15"),
        (
            5000,
            0,
            "SPOT with checkpoint_every_steps=5000 and checkpoint_every_minutes=0: a preemption",
        ),
        (0, 5, ""),
        (500, 0, ""),
        (0, 30, "SPOT with checkpoint_every_steps=0 and checkpoint_every_minutes=30: a preemption"),
    ],
)
def test_what_a_preemption_would_lose_is_said_of_spot_alone(
    steps: int, minutes: float, line: str
) -> None:
    flags = [*FLAGS, f"--checkpoint_every_steps={steps}", f"--checkpoint_every_minutes={minutes}"]
    warnings = job(
        tier_with(scheduling={"strategy": "SPOT"}), *flags, image="us-docker.pkg.dev/p/r/mine:1"
    ).warnings
    assert [line in warning for warning in warnings] == [True] * bool(line)
    assert job("l4x1", *flags, image="us-docker.pkg.dev/p/r/mine:1").warnings == ()


def test_workers_with_rdma_source_googles_settings_before_their_command(tmp_path: Path) -> None:
    h200 = "a3-ultragpu-8g, acceleratorType: NVIDIA_H200_141GB, acceleratorCount: 8"
    l4 = "g2-standard-48, acceleratorType: NVIDIA_L4, acceleratorCount: 4"
    settings = tmp_path / "set_nccl_env.sh"
    file = tmp_path / "two.yaml"
    settings.write_text("export NCCL_NET=gIB\n")
    for machine, wrapped in ((l4, False), (h200, True)):
        content = TWO.replace(
            "pythonPackageSpec: {pythonModule: trainer.task}",
            "containerSpec: {imageUri: p/x, command: [printenv, NCCL_NET]}",
        )
        file.write_text(content.replace(l4, machine).replace("pd-ssd", "hyperdisk-balanced"))
        made = job(load_tier(str(file)), "--model=mlp", "--data=mnist", "--global_batch_size=16")
        assert [task(made, pool)["command"][0] == "bash" for pool in (0, 1)] == [wrapped] * 2
    command = [word.replace(NCCL_SETTINGS, str(settings)) for word in task(made)["command"]]
    assert run(command).stdout.split("\n")[1] == "gIB"
    assert variables_of(task(made))["NCCL_DEBUG"] == "INFO"
    settings.unlink()
    told = f"NCCL: {settings} is not in this image: RDMA stays off\n"
    assert run(command).stdout == told
    assert NCCL_SETTINGS.startswith("/usr/local/gib/")


def test_a_package_of_ones_own_may_be_named() -> None:
    mine = wheel("my_models", "0", {"my_models/gan.py": b""})
    made = job("l4x1", "--model=my_models.gan:build", "--data=digits", code=(mine, PACKAGE))
    wheels = [uri.rsplit("/", 1)[-1] for uri, _ in start_of(task(made))["packages"]]
    assert wheels == ["my_models-0-py3-none-any.whl", "vertex_trainer-1.0-py3-none-any.whl"]
