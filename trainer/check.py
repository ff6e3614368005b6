"""Tests whether steps depend on the number of replicas: `python -m trainer.check --recipe=NAME [--model=…] [any flag]`.

It runs a few steps on one and on two replicas of this machine's CPU, in float64, and compares weights and losses.
With `--on_gpus` it runs them on all GPUs of this machine instead, in every precision, and measures these GPUs
(docs/gpus.md); gpu_check.json, in --job_dir or else in this folder, keeps the result.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from trainer.command import quiet_start, run_command
from trainer.config.flags import Parser, whole
from trainer.config.overrides import Command, resolve
from trainer.config.own_settings import refuse_missing_modules
from trainer.config.train_config import TrainConfig
from trainer.distribution.gpu_environment import set_gpu_environment
from trainer.errors import DONE, USER_MUST_CHANGE
from trainer.log import log, on_vertex, set_verbose
from trainer.reporting.job_directory import open_job_dir
from trainer.reporting.run_files import write_json
from trainer.storage.run_layout import GPU_CHECK
from trainer.storage.staging import cache_home

STEPS = 5
# Operations that draw from TensorFlow's own state.
_DRAWS = {
    "RandomStandardNormal": "tf.random.normal", "RandomUniform": "tf.random.uniform",
    "RandomUniformInt": "tf.random.uniform", "TruncatedNormal": "tf.random.truncated_normal",
    "RandomGamma": "tf.random.gamma", "RandomPoissonV2": "tf.random.poisson", "RandomShuffle": "tf.random.shuffle",
    "Multinomial": "tf.random.categorical",
}  # fmt: skip
_USAGE = "%(prog)s --recipe=NAME [--on_gpus] [--setting=value …]"
_EPILOG = """\
All settings but the first group are those of python -m trainer.task.

Exit codes: 0 the steps agree; 2 they do not, or you must change something; 75 interrupted; 1 a fault of this package or
of the platform."""
TOLERANCE = 1e-10  # relative L2 norm of a weight tensor, far above float64 rounding


def main(arguments: Sequence[str] | None = None) -> int:
    """Reports whether the steps agree; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _check(given), "starts from scratch")


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Command]:
    """Returns the check's own flags, and the settings. Raises UserError for a mistake, SystemExit(0) for --help."""
    own = Parser(prog="python -m trainer.check", add_help=False)
    flags = own.add_argument_group("check")
    own.add_boolean("on_gpus", "check and measure all GPUs of this machine (default: false)", group=flags)
    flags.add_argument(
        "--seconds", type=whole(0, 600), default=3, metavar="INT",
        help="for which --on_gpus measures each speed; at most 600 (default: %(default)s)",
    )  # fmt: skip
    found, settings = own.parse_known_args(arguments)
    return found, resolve(settings, prog=own.prog, usage=_USAGE, description=__doc__, epilog=_EPILOG, parents=[own])


def _check(given: Sequence[str]) -> int:
    own, request = parse(given)
    set_verbose(request.verbose)
    config = request.config
    refuse_missing_modules(config)
    if own.on_gpus:
        return _check_gpus(config, own.seconds)
    config.rows_per_replica(2)
    with quiet_start():
        import tensorflow as tf
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    problems = compare(config)
    if not problems:
        log.info(f"{config.model}: {STEPS} steps on 1 and on 2 replicas give the same weights and losses")
        return DONE
    for problem in problems:
        log.error("%s", problem)
    return USER_MUST_CHANGE


def _check_gpus(config: TrainConfig, seconds: float) -> int:
    """Checks the devices of this machine; the result goes to the job directory, or to the current folder."""
    job_dir = open_job_dir(config) if config.job_dir or on_vertex() else None
    set_gpu_environment(cache_home(config.cache_dir) / "cuda")
    with quiet_start():
        from trainer.gpu_check.on_gpus import check_on_gpus

    def write(content: Mapping[str, Any]) -> str:
        if job_dir is None:
            write_json(Path(GPU_CHECK), content)
            return GPU_CHECK
        job_dir.write(GPU_CHECK, content)
        job_dir.mirror.finish()
        return job_dir.mirror.where(job_dir.root / GPU_CHECK)

    with closing(job_dir.mirror) if job_dir else nullcontext():
        if job_dir:
            job_dir.mirror.begin(job_dir.logs)
        return check_on_gpus(config, write, seconds)


def compare(config: TrainConfig) -> list[str]:
    """Returns what differs between one and two replicas and what to change; an empty list if nothing differs."""
    import numpy as np

    (alone, logs, _), (together, logs_of_two, draws) = (_steps(config, replicas) for replicas in (1, 2))
    # A weight without effect (a bias before batch norm) moves by rounding alone, of which Adam's epsilon of 1e-7 makes
    # up to 1e-8 of an update: compare it with a hundred of them.
    moved = 100 * STEPS * _learning_rate(alone, config)
    differences = [
        float(np.linalg.norm(one - other) / max(float(np.linalg.norm(one)), moved * np.sqrt(one.size), 1e-30))
        for one, other in zip(alone.get_weights(), together.get_weights(), strict=True)
    ]
    losses = {name: (logs.means()[name], logs_of_two.means()[name]) for name in logs.means()}
    uneven = {n: (a, b) for n, (a, b) in losses.items() if abs(a - b) > 1e-8 * max(abs(a), abs(b), 1e-30)}
    if max(differences) <= TOLERANCE and not uneven:
        return []
    worst = alone.weights[int(np.argmax(differences))].path
    problems = [
        f"{config.model}: on 2 replicas {worst} differs by {max(differences):.1e} (relative) after {STEPS} steps"
    ]
    problems += [f"{name} is {a:.6g} on 1 replica and {b:.6g} on 2" for name, (a, b) in uneven.items()]
    ratios = {name: b / a for name, (a, b) in uneven.items() if a}
    return problems + list(_advice(together, ratios, draws, config.micro_batches))


def _learning_rate(model: Any, config: TrainConfig) -> float:
    from trainer.interface import ModelInterface

    optimizer = ModelInterface.of(model).optimizer
    return float(optimizer.learning_rate) if optimizer else config.learning_rate


def _steps(config: TrainConfig, replicas: int) -> tuple[Any, Any, list[str]]:
    """Returns the model after a few steps, what they returned, and TensorFlow's random functions in them."""
    from trainer.build import build_setup
    from trainer.data.dataset import failures_of_reading
    from trainer.distribution.strategy import make_replicas

    config = dataclasses.replace(
        config, precision="float64", replicas=replicas, strategy="auto", expect_devices=0, jit_compile="false"
    )
    setup = build_setup(config, make_replicas(config))
    with closing(setup.dataset), failures_of_reading():
        runner, rows = setup.step_runner(), setup.rows_from(0)
        return setup.model, runner(rows, 0, STEPS), sorted(_DRAWS.keys() & runner.operations(rows))


def _advice(model: Any, ratios: dict[str, float], draws: Sequence[str], micro_batches: int) -> Iterator[str]:
    """Yields the likely reasons why the steps of this model depend on replicas."""
    from trainer.models.layers import depends_on_replicas

    doubled = [name for name, ratio in ratios.items() if abs(ratio - 2) < 0.2]
    if doubled:
        yield (
            f"{doubled[0]} is about twice as large: divide its sum by the GLOBAL batch (current_step().mean(values)), "
            "not by the rows of one replica (reduce_mean)"
        )
    reasons = depends_on_replicas(model, replicas=2, micro_batches=micro_batches)
    if draws:
        reasons.append(
            f"the step draws by {', '.join(_DRAWS[each] for each in draws)}, whose numbers are others on each replica: "
            "use the function of keras.random of that name, or current_step()"
        )
    yield from reasons
    if not doubled and not reasons:
        yield "means over rows, random numbers and batch statistics must span the global batch: see current_step()"


if __name__ == "__main__":
    sys.exit(main())
