"""Tests several worker processes: they give the numbers of one, one of them writes, and none waits
for a lost one."""

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from keras import Input, Sequential, layers
from keras.utils import set_random_seed
from numpy.testing import assert_array_equal

from deploy.platform.local import free_addresses
from tests import workers
from tests.drill import last_state, losses, numbers, read, stats
from tests.fixtures import SLOW, Folders, Patch, parametrize
from tests.support import saved_model
from tests.workers import until
from trainer.base.errors import DONE, INTERRUPTED, USER_MUST_CHANGE
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.training.checkpoint import checkpoint_folders, read_checkpoint

COMMON = ["--steps=12", "--global_batch_size=48", "--learning_rate=1e-3", "--report_every_steps=6"]
SMALL = ["--image_size=16", "--width=4", "--latent_dim=16"]
MODELS = {
    "mlp": ["--model=mlp", *SMALL[:1], "--width=32", "--dropout=0.3", "--evaluation_fraction=0.2"],
    "dcgan": ["--model=dcgan", *SMALL],
    "wgan_gp": ["--model=wgan_gp", *SMALL, "--critic_steps=2"],
    "two_outputs": ["--model=tests.own_data:two_outputs", "--data=tests.own_data:named_inputs"],
    "masked_text": ["--model=tests.own_data:masked_text", "--data=tests.own_data:next_tokens"],
}


def trained(where: Path, count: int, flags: list[str]) -> Path:
    codes = workers.run(count, [*flags, f"--job_dir={where}"], where.with_suffix(".log"))
    assert codes == [DONE] * count, [log.read_text() for log in where.parent.glob("*.log.*")]
    return where


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Folders, features: list[str]) -> Callable[[str], Path]:
    """Returns the run of a model on one worker, trained once."""
    folder = tmp_path_factory.mktemp("alone")

    def run(model: str) -> Path:
        flags = [
            *COMMON,
            *MODELS[model],
            *(features if model == "dcgan" else []),
            "--precision=float64",
        ]
        return folder / model if (folder / model).exists() else trained(folder / model, 1, flags)

    return run


@SLOW
def test_workers_begin_from_the_weights_of_a_checkpoint(
    tmp_path: Path, alone: Callable[[str], Path]
) -> None:
    first = alone("mlp")
    flags = [*COMMON, *MODELS["mlp"], "--precision=float64", "--steps=1", "--learning_rate=1e-30"]
    second = trained(tmp_path / "second", 2, [*flags, f"--initial_checkpoint={first}"])
    models = [saved_model(run) for run in (first, second)]
    for value, start in zip(*(model.get_weights() for model in models), strict=True):
        assert_array_equal(start, value)


@pytest.fixture(scope="module")
def features(tmp_path_factory: Folders) -> list[str]:
    """Flags for FID and KID by a small classifier; the last of their batches is not full."""
    file = tmp_path_factory.mktemp("features") / "model.keras"
    set_random_seed(5)
    Sequential(
        [
            Input((16, 16, 1)),
            layers.Rescaling(1 / 255),
            layers.Flatten(),
            layers.Dense(8),
            layers.Dense(10),
        ]
    ).save(file)
    return [f"--fid_features={file}", "--fid_samples=130", "--fid_every_steps=6"]


@SLOW
@parametrize(
    "model, count, cluster",
    [
        ("mlp", 2, ["--micro_batches=2", "--jit_compile"]),
        ("dcgan", 2, ["--replicas=2", "--jit_compile"]),  # in programs of XLA
        ("wgan_gp", 3, []),
        ("two_outputs", 2, ["--replicas=2"]),
        ("masked_text", 2, ["--replicas=2"]),  # of a user's own
    ],
)
def test_any_cluster_gives_the_numbers_of_one_worker(
    model: str,
    count: int,
    cluster: list[str],
    features: list[str],
    alone: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    """Compares losses, evaluation, FID and, bit for bit, weights on every device."""
    (tmp_path / "variables").mkdir()
    monkeypatch.setenv("TRAINER_TEST_VARIABLES", str(tmp_path / "variables"))
    one = alone(model)
    common = [*COMMON, *MODELS[model], *(features if model == "dcgan" else [])]
    flags = [*common, *cluster, "--precision=float64", "--callbacks=tests.models:write_variables"]
    several = trained(tmp_path / "several", count, flags)
    expected = last_state(one)
    assert {*expected} == {*last_state(several)}
    for name, value in last_state(several).items():
        # else zero but for rounding, as the last bias of a critic, whose noise Adam magnifies
        if np.linalg.norm(value) > 1e-8:
            most = 1e-10 * max(float(np.linalg.norm(value)), 1e-3)
            assert np.linalg.norm(value - expected[name]) < most, name
    files = Counter(file.suffix for file in (tmp_path / "variables").iterdir())
    assert files == {".npz": count, ".csv": 1}  # of the chief
    for worker in range(count):
        held = np.load(tmp_path / "variables" / f"{worker}.npz")
        assert {*held} == last_state(several).keys()
        for name, value in last_state(several).items():
            assert all(np.array_equal(copy, value) for copy in held[name]), (
                f"{name} on worker {worker}"
            )
    assert numbers(several) == numbers(one)
    # the critic's last bias is rounding, see above
    assert losses(several) == pytest.approx(losses(one), rel=1e-7)
    accuracies = [
        read(of / "result.json")["final"]["metrics"].get("val_accuracy") for of in (one, several)
    ]
    assert accuracies[0] == accuracies[1]
    run = read(several / "run.json")
    assert (run["cluster"]["workers"], run["strategy"]) == (count, "MultiWorkerMirroredStrategy")
    assert run["collectives"] == "ring"
    if "--jit_compile" in flags:
        why = run["compilation"]["why"]
        # which has no train_step of its own, or passes
        compiled = model == "mlp" and "--replicas=2" in flags
        assert run["compilation"]["compiled"] is compiled
        way = "XLA compiles the steps" if compiled else "the steps run plain"
        assert (tmp_path / "several.log.0").read_text().count(f"jit_compile: {way}: {why}") == 1
    assert [path.name for path in sorted(several.iterdir())] == [
        path.name for path in sorted(one.iterdir())
    ]


LONG = ["--steps=100000", "--model=mlp", "--width=8", "--global_batch_size=16", "--image_size=16"]
LONG = [*LONG, "--steps_per_loop=5", "--report_every_steps=5", "--checkpoint_every_steps=20"]


def wait_for_step(job_dir: Path, step: int) -> None:
    until(lambda: any(line["step"] >= step for line in stats(job_dir)), workers.LIMIT_SECONDS)


@contextmanager
def two_workers(
    folder: Path, *flags: str
) -> Iterator[tuple[list["subprocess.Popen[bytes]"], list[Path]]]:
    """Yields the processes of a long run and their logs, and waits for their end."""
    addresses = free_addresses(2)
    logs = [folder / "0.log", folder / "1.log"]
    flags = (*LONG, f"--job_dir={folder / 'job'}", *flags)
    processes = [workers.start(addresses, index, flags, log) for index, log in enumerate(logs)]
    try:
        yield processes, logs
    finally:
        workers.end(processes)


@SLOW
@parametrize(
    "victim, number, line",
    [
        (0, signal.SIGKILL, "error: chief (127.0.0.1:"),
        (1, signal.SIGSTOP, "was lost: it sent nothing for 15 seconds"),
    ],
)
def test_a_lost_worker_is_named_and_the_other_leaves_to_be_restarted(
    victim: int, number: int, line: str, tmp_path: Path
) -> None:
    with two_workers(tmp_path, "--worker_timeout_seconds=15") as (processes, logs):
        wait_for_step(tmp_path / "job", 10)
        processes[victim].send_signal(number)
        processes[1 - victim].wait(workers.LIMIT_SECONDS)
        processes[victim].kill()  # one that is stopped does not end by itself
    assert [process.returncode for process in (processes[victim], processes[1 - victim])] == [
        -9,
        INTERRUPTED,
    ]
    assert line in logs[1 - victim].read_text()


@SLOW  # tests/trainer/training/test_loop.py stops two threads
def test_a_worker_that_was_paused_goes_on_and_sigterm_to_it_saves_the_same_step_on_all(
    tmp_path: Path,
) -> None:
    """Its pause is longer than TensorFlow itself would wait for its heartbeat, ten seconds."""
    job_dir = tmp_path / "job"
    with two_workers(tmp_path) as (processes, logs):
        wait_for_step(job_dir, 30)
        processes[1].send_signal(signal.SIGSTOP)
        time.sleep(12)
        processes[1].send_signal(signal.SIGCONT)
        wait_for_step(job_dir, stats(job_dir)[-1]["step"] + 10)
        processes[1].send_signal(signal.SIGTERM)
    outputs = [log.read_text() for log in logs]
    assert [process.returncode for process in processes] == [INTERRUPTED, INTERRUPTED], outputs
    step = read_checkpoint(checkpoint_folders(job_dir / "checkpoints")[-1])[0]["step"]
    assert f"a signal to another worker: state saved at step {step:,};" in outputs[0]
    assert f"SIGTERM: state saved at step {step:,};" in outputs[1]


def slow_data(config: TrainConfig) -> Dataset:
    """Takes until it is killed to load, as a download may."""
    print("reads rows", flush=True)
    time.sleep(600)
    raise AssertionError


@SLOW
def test_sigterm_before_the_first_step_ends_all_and_the_ports_are_warned_of(tmp_path: Path) -> None:
    """TensorFlow's servers have started, which listen on all addresses and replace the handler of
    SIGTERM."""
    with two_workers(tmp_path, f"--data={__name__}:slow_data") as (processes, logs):
        until(
            lambda: all(log.exists() and "reads rows" in log.read_text() for log in logs),
            workers.LIMIT_SECONDS,
        )
        processes[1].send_signal(signal.SIGTERM)
    assert [process.returncode for process in processes] == [INTERRUPTED] * 2
    assert "stopped at once: the same command resumes" in logs[1].read_text()
    assert "was lost: its process has ended" in logs[0].read_text()
    assert logs[0].read_text().count("TensorFlow's servers listen on all addresses") == 1


# by data; of settings and of what arithmetic depends on: tests/trainer/cluster/test_rendezvous.py
DIFFERENT = {
    "~/data.npz": "do not run the same job (sample of data: ",
    "tests.models:data_of_worker": "do not read the same data (training digest: ",
}


@SLOW
@parametrize("data", DIFFERENT)
def test_workers_that_do_not_run_the_same_job_on_the_same_data_fail(
    data: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Each worker has its own home folder, with data of its own."""
    addresses = free_addresses(2)
    processes = []
    for index in range(2):
        home = tmp_path / f"home{index}"
        home.mkdir()
        np.savez(home / "data.npz", images=np.full((64, 16, 16), index, np.uint8))
        monkeypatch.setenv("HOME", str(home))
        flags = [*LONG, f"--data={data}", f"--job_dir={tmp_path / 'job'}"]
        processes.append(workers.start(addresses, index, flags, tmp_path / f"{index}.log"))
    assert workers.end(processes) == [USER_MUST_CHANGE] * 2
    for index in range(2):
        output = (tmp_path / f"{index}.log").read_text()
        assert output.count(DIFFERENT[data]) == 1, output
        assert "Traceback" not in output
