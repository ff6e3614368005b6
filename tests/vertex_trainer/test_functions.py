"""Tests the functions of vertex_trainer: what they send is what the verbs send, and they neither
print nor exit."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import pytest

import vertex_trainer
from deploy.api.plan import USAGE, PlanOptions
from deploy.api.request import call_verb
from deploy.platform.errors import STATE_UNKNOWN
from tests.deploy.conftest import (
    JOB,
    ROOT,
    Capture,
    FlyingClock,
    Job,
    error_of,
    output_of,
    put,
    run,
)
from tests.deploy.emulator import QUOTA, Emulator, Fault, ends
from tests.deploy.planted import plant, planted_plan
from tests.fixtures import Json
from tests.support import refused
from trainer.base.storage.local_files import Address
from vertex_trainer import PlatformFault, attach, compare, fit, jobs, plan, submit, train

TINY: Json = dict(word[2:].split("=") for word in JOB)
WHERE: Json = {
    "region": "us-central1",
    "bucket": "gs://my-bucket",
    "image": "us-docker.pkg.dev/p/r/x:1",
    "backend": "sdk",
}
USERS_FILE = """
from vertex_trainer import (
    Comparison, Fitted, Plan, PlatformFault, RunResult, UserError, VertexJob, attach, compare, fit,
    jobs, plan, submit, train,
)

def cheapest(hours: str) -> VertexJob:
    made: Plan = plan("l4x1", recipe="mine.yaml", settings={"learning_rate": 1e-3})
    best = made.best(within=hours, budget=20.0)
    return submit(
        best.tier, recipe="mine.yaml", bucket="gs://b", max_cost=20, settings={"steps": 5},
        **best.flags,
    )

def metrics(job: VertexJob) -> dict[str, float]:
    try:
        state: str = job.wait().state
        result: RunResult = job.result
        return {state: 0.0, **result.metrics}
    except (UserError, PlatformFault) as error:
        raise SystemExit(error.exit_code) from None

def last_loss() -> float | None:
    done: Fitted = fit("mine:model", "mine:data", epochs=5, on="l4x4", max_cost=5, bucket="gs://b")
    done.model.summary()
    return done.history["loss"][-1]

def rest() -> tuple[Comparison, RunResult, list[str]]:
    attach("projects/1/locations/us-central1/customJobs/2").cancel()
    here = train("mine.py:build", "mine.py:data", {"epochs": 1}, job_dir="runs/x")
    names = [status.name for status in jobs("us-central1")]
    return compare("l4x1", "l4x2", recipe="mine.yaml"), here, names
"""


@pytest.mark.slow
def test_a_users_file_with_all_names_is_typed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USERS_FILE)
    assert all(f" {name}" in USERS_FILE for name in vertex_trainer.__all__)
    assert len(vertex_trainer.__all__) <= 14
    done = run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)], cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_importing_it_loads_neither_tensorflow_nor_an_sdk() -> None:
    code = """import sys, vertex_trainer
early = set(sys.modules)
from vertex_trainer import *
heavy = {"tensorflow", "keras", "numpy", "google.api_core", "google.auth", "requests", "matplotlib"}
print(heavy & set(sys.modules), {"deploy", "trainer", "yaml"} & early)"""
    assert run([sys.executable, "-c", code], cwd=ROOT).stdout == "set() set()\n"


def test_submit_waits_reads_the_result_and_loads_the_model(
    cloud: Emulator, capsys: Capture
) -> None:
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]).save("model.keras")

    def trains(google: Emulator, job: Job) -> None:
        folder = f"{output_of(job).bucket}/{output_of(job).name}"
        final = {"losses": {"loss": 0.2}, "metrics": {"val_accuracy": 0.9}}
        result = json.dumps({"state": "done", "steps": 4, "final": final})
        google.objects[f"{folder}/result.json"] = result.encode()
        google.objects[f"{folder}/model/model.keras"] = Path("model.keras").read_bytes()
        ends("SUCCEEDED")(google, job)

    cloud.run = trains
    job = submit("cpu", settings=TINY, **WHERE)
    with refused("not found: check --project=my-proj and --region=us-central1"):
        _ = attach("projects/my-proj/locations/us-central1/customJobs/7").result
    stream = io.StringIO()
    assert job.wait(stream).state == "SUCCEEDED"
    assert "SUCCEEDED after" in stream.getvalue()
    assert job.exit_code == 0
    assert job.result.metrics == {"loss": 0.2, "val_accuracy": 0.9}
    assert job.result.steps == 4
    assert [list(weights.shape) for weights in job.model().get_weights()] == [[2, 1], [1]]
    assert [status.name for status in jobs(["us-central1"], state="SUCCEEDED")] == [job.name]
    cloud.faults = [Fault("GET .*customJobs", 503) for _ in range(3)]
    assert attach(job.name).status.state == "SUCCEEDED"
    assert job.exit_code == 0
    assert jobs("us-central1", state="RUNNING") == []
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ""


def test_a_job_of_a_dry_run_has_no_state_and_no_result(cloud: Emulator) -> None:
    job = submit("cpu", settings=TINY, dry_run=True, **WHERE)
    calls: list[Callable[[], object]] = [job.wait, job.logs, job.cancel, job.model]
    calls += [lambda: job.status, lambda: job.exit_code, lambda: job.result, lambda: job.output]
    line = "this job was not sent: call its send(), or submit it without dry_run=True"
    assert [error_of(call) for call in calls] == [line] * len(calls)
    assert cloud.jobs == {}


def test_no_machines_here_are_looked_for_there_and_errors_are_exceptions(cloud: Emulator) -> None:
    cloud.run = ends("SUCCEEDED")
    cloud.faults = [Fault("POST .*/us-central1/customJobs$", 429, times=1, message=QUOTA)]
    where = {**WHERE, "region": ["us-central1", "us-east4"]}
    dry = submit("l4x1", settings=TINY, dry_run=True, **where)
    assert repr(dry).splitlines() == ["<job that is not sent>", *dry.about]
    assert cloud.jobs == {}
    job = submit("l4x1", settings=TINY, dry_run=False, **where)
    status = job.wait()
    assert status.state == "SUCCEEDED"
    assert repr(job) == f"<job {job.name}>"
    assert repr(status) == f"<SUCCEEDED {status.display_name}: {job.name}>"
    assert "/us-east4/" in job.name
    wrong = error_of(submit, "l4x1", settings={**TINY, "spec": True}, **WHERE)
    assert "unknown setting 'spec'" in wrong
    unpriced = {"machine_type": "a4-highgpu-8g", "accelerator": "NVIDIA_B200:8"}
    error = error_of(submit, settings=TINY, **WHERE, **unpriced)
    assert "the standard price of a4-highgpu-8g-x8 is not known: not submitted: give it" in error
    cloud.faults = [Fault("customJobs", 503, times=1000)]
    with pytest.raises(PlatformFault) as caught:
        attach(job.name).wait()
    assert caught.value.exit_code == STATE_UNKNOWN
    cloud.faults = []


def test_two_threads_submit_at_once(cloud: Emulator, capsys: Capture) -> None:
    """What each prints is in its own stream."""
    cloud.run = ends("SUCCEEDED")

    def send(tier: str) -> tuple[str, str, str]:
        stream = io.StringIO()
        job = submit(tier, settings=TINY, stream=stream, **WHERE)
        return job.name, job.wait(stream).state, stream.getvalue()

    with ThreadPoolExecutor() as threads:
        sent = [*threads.map(send, ("cpu", "l4x1"))]
    assert len({name for name, _, _ in sent}) == len(cloud.jobs) == 2
    for (name, state, shown), other in zip(sent, ("-l4x1-", "-cpu-"), strict=True):
        assert state == "SUCCEEDED"
        assert f"submitted {name}" in shown
        assert other not in shown
    assert capsys.readouterr().out == ""


class Interrupted(io.StringIO):
    """Is interrupted in place of the line that names a job in us-east4."""

    def write(self, text: str) -> int:
        if text.startswith("submitted ") and "us-east4" in text:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_while_the_next_region_is_tried_keeps_its_job(cloud: Emulator) -> None:
    """So does the same call after one that followed nothing: it goes on with the regions that are
    left."""
    where = {**WHERE, "region": ["us-central1", "us-east4"]}
    first = submit("l4x1", settings=TINY, **where)
    cloud.end(cloud.job, "FAILED", "Resources are insufficient in region: us-central1.")
    job = submit("l4x1", settings=TINY, **where)
    assert job.name == first.name
    status = job.wait(Interrupted())
    assert "/us-east4/" in job.name
    assert status.name == job.name
    assert not status.over
    assert status.output == first.output
    assert submit("l4x1", settings=TINY, **where).name == job.name
    assert len(cloud.jobs) == 2


def test_a_job_that_does_not_end_is_not_called_cancelled(cloud: Emulator) -> None:
    job = submit("cpu", settings=TINY, **WHERE)
    cloud.faults = [Fault("POST .*:cancel", "empty")]
    with pytest.raises(
        PlatformFault, match="still PENDING: `python -m deploy watch` shows its end"
    ) as caught:
        job.cancel()
    assert caught.value.exit_code == STATE_UNKNOWN


def test_plan_returns_the_best_offer_and_writes_nothing(capsys: Capture) -> None:
    flags: Json = {
        "plan": str(planted_plan()),
        "settings": {"global_batch_size": 64, "epochs": 500},
    }
    planned = plan("l4x1", "l4x4", recipe="mlp_mnist", **flags)
    assert [forecast.tier for forecast in planned.forecasts] == ["l4x1", "l4x4"]
    best = planned.best(within="8h", budget=20)
    assert best.strategy == "SPOT"
    assert best.flags["spot"]
    assert best.usd.middle <= 20
    assert best.hours.middle <= 8
    assert "no tier ends within=1m" in error_of(planned.best, within="1m")
    assert "\n  cheapest " in str(planned)
    shutil.copy(ROOT / "job_configs" / "l4x1.yaml", "l4x1.yaml")
    of_file = plan("./l4x1.yaml", recipe="mlp_mnist", **flags)
    assert of_file.best().tier == "./l4x1.yaml", "as submit takes it"
    assert capsys.readouterr().out == ""
    assert not Path("runs/plan").exists()


def test_compare_returns_the_table(cloud: Emulator, command: Any, target: list[str]) -> None:
    command("l4x1", "l4x2")
    flags: Json = dict(word[2:].split("=", 1) for word in target)
    flags |= {"settings": TINY, "image": WHERE["image"], "backend": "sdk"}
    with ThreadPoolExecutor() as threads:  # as in a notebook's server
        again = threads.submit(compare, "l4x1", "l4x2", **flags).result()
    assert again.exit_code == 0
    assert [tier["tier"] for tier in again.tiers] == ["l4x1", "l4x2"]
    assert again.verdict
    dear = ["h100x4", "h100x8"]
    flags["out"] = "dear"
    assert " USD until the timeout; there is no plan: " in error_of(compare, *dear, **flags)
    assert "as --max_cost=20, or send fewer at once: together 500 USD at most" in error_of(
        compare, *dear, max_cost=300, **flags
    )
    assert len(cloud.jobs) == 2


def test_fit_on_a_tier_asks_follows_and_returns_the_history(
    cloud: Emulator, flying: FlyingClock, bucket: Address, tmp_path: Path, capsys: Capture
) -> None:
    """A call that Ctrl-C ended finds its job again; one that fails is an error."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    where = {**WHERE, "bucket": str(bucket).rstrip("/"), "image_size": 8, "epochs": 2}

    def trained(google: Emulator, job: Job) -> None:
        folder = plant(tmp_path / "run", [0.1, 0.1], losses=[2.0, 1.0], epochs=True)
        (folder / "model").mkdir()
        model.save(folder / "model" / "model.keras")
        google.begin(job)
        put(folder, output_of(job))
        google.end(job, "SUCCEEDED")

    flying.asleep = flying.interrupt
    with pytest.raises(KeyboardInterrupt, match="is still running: the same call follows it"):
        fit("mlp", "digits", on="l4x1", max_cost=5, **where)
    assert "l4x1: " in capsys.readouterr().out
    flying.asleep = lambda: [thread.join() for thread in list(cloud.threads)]
    trained(cloud, cloud.job)
    where["progress"] = False
    done = fit("mlp", "digits", on="l4x1", max_cost=5, **where)
    assert done.url.endswith("/locations/us-central1/training/1000?project=my-proj")
    assert done.result.state == "done"
    assert done.cost is not None
    assert capsys.readouterr().out == ""
    assert done.history["loss"] == [2.0, 1.0]
    assert [list(weights.shape) for weights in done.model.get_weights()] == [[2, 1], [1]]
    again = fit("mlp", "digits", on="l4x1", max_cost=5, **where)
    assert again.url == done.url
    assert len(cloud.jobs) == 1  # nothing is paid twice
    cloud.run = lambda google, job: google.end(job, "FAILED", "out of memory")
    with pytest.raises(PlatformFault, match="out of memory"):
        fit("mlp", "digits", on="l4x1", max_cost=5, again=True, **where)
    dear = error_of(fit, "mlp", "digits", on="h100x8", **where)
    assert "not submitted: set a limit" in dear


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_fit_here_resumes_by_the_same_call_and_has_history_and_model(capsys: Capture) -> None:
    settings: Json = {"image_size": 8, "epochs": 2, "global_batch_size": 256}
    done = fit("mlp", "digits", **settings)
    assert "done: " in capsys.readouterr().out
    again = fit("mlp", "digits", progress=False, **settings)
    assert len(done.history["loss"]) == 2
    assert done.history == again.history
    assert done.cost == 0.0
    assert done.result.state == "done"
    assert done.url == again.url
    assert done.model.count_params() > 0
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_train_runs_the_process_that_the_command_is(capsys: Capture) -> None:
    stream = io.StringIO()
    result = train(settings=TINY, job_dir="run", stream=stream, progress=True)
    assert result.state == "done"
    assert result.steps == 4
    assert {*result.metrics} == {"loss", "accuracy"}
    assert "done: 4 steps" in stream.getvalue()
    assert result.model().output_shape == (None, 10)
    assert len(repr(result)) < 200
    wrong = error_of(train, "mlp", "digits", {"stepz": 4}, job_dir="other")
    assert "unknown setting 'stepz'" in wrong
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: submit("l4x1", max_cost=20, settings={"max_cost": 400}),
            "max_cost is given twice, as 20 and 400",
        ),
        (lambda: vertex_trainer.plan("-h"), "-h: flags of a function are keywords"),
        (lambda: vertex_trainer.plan("l4x1", out="runs/plan"), "unknown setting 'out'"),
        (
            lambda: vertex_trainer.compare("cpu", settings={"dry_run": True}),
            "unknown setting 'dry_run'",
        ),
        (lambda: jobs(limit=-1), "limit=-1 must be at least 1"),
        (lambda: jobs(state="over"), "state=over must be one of"),
        (lambda: train("mlp", job_dir=""), "job_dir is empty"),
        (
            lambda: fit("mlp", "digits", max_cost=5),
            "max_cost is for a job: name its tier, as on='l4x4', or leave it out",
        ),
        (
            lambda: train("mlp", settings={"print_config": True}, job_dir="runs/x"),
            "unknown setting 'print_config'",
        ),
    ],
)
def test_what_a_function_cannot_do_is_one_line(call: Any, line: str) -> None:
    assert line in error_of(call)


def test_values_become_what_a_command_reads() -> None:
    settings = {"epochs": None, "recipe": Path("mlp_mnist")}
    prices = {"l4x1": 1}
    keywords: Json = {"steps": 5, "fit": True, "from_": ["a", "b"], "price_per_hour": prices}
    request = call_verb(PlanOptions, ("l4x1",), keywords, settings, USAGE)
    asked = request.options
    assert asked.tiers == ("l4x1",)
    assert asked.from_ == ("a", "b")
    assert asked.fit
    assert asked.price_per_hour == prices
    assert "epochs" not in request.program.values
    assert request.program.values["steps"] == 5
    flags = "--from=a --from=b --fit=true --price_per_hour=l4x1=1.0 --steps=5 --recipe=mlp_mnist"
    assert request.command == f"python -m deploy plan l4x1 {flags}"
    assert set(vertex_trainer.__all__) == set(dir(vertex_trainer))
