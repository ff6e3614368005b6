"""Tests whether steps depend on the number of replicas: `python -m trainer.check --recipe=NAME
[--model=…] [any flag]`.

It proves by the graph of a step that every update is what one device with all rows would make. What
that does not show is compared: a few steps on one and on two replicas of this machine's CPU, in
float64, weights and losses. With `--bits` it compares all bits of all variables on one replica and
on four, in the run's precision, which `--virtual_replicas` makes equal. With `--on_gpus` it runs
them on all GPUs of this machine instead, in every precision, and measures these GPUs
(docs/gpus.md); gpu_check.json, in --job_dir or else in this folder, keeps the result. With `--xla`
it runs one step that XLA compiles, on the devices of the run, and says why if that fails.
"""

import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from trainer.base.errors import DONE, USER_MUST_CHANGE, UserError, reason
from trainer.base.log import log, on_vertex, set_verbose
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.run_files.job_files import GPU_CHECK, write_json
from trainer.base.settings.fields import VERBOSE, Usage, options_class, setting
from trainer.base.settings.own_settings import refuse_missing_modules
from trainer.base.settings.request import parse_request
from trainer.base.settings.train_config import USUAL, TrainConfig
from trainer.cluster.cluster_spec import set_up_process
from trainer.user_code.command import command, quiet_start

_EPILOG = """\
All settings but the first group are those of python -m trainer.task.

Exit codes: 0 the steps agree; 2 they do not, or you must change something; 75 interrupted; 1 a
fault of this package or of the platform."""

_FLAGS = ("on_gpus", "bits", "xla", "seconds")
USAGE = Usage(
    "python -m trainer.check",
    "--recipe=NAME [--bits] [--xla] [--on_gpus] [--setting=value …]",
    __doc__,
    _EPILOG,
    (*_FLAGS, *USUAL),
)


@options_class
class CheckOptions:
    """Holds the flags of `trainer.check` that are not settings of a run."""

    on_gpus: bool = setting(False, "check and measure all GPUs of this machine", group="check")
    bits: bool = setting(False, "compare all bits, with --virtual_replicas", group="check")
    xla: bool = setting(False, "run one step that XLA compiles, on all devices", group="check")
    seconds: int = setting(
        3,
        "for which --on_gpus measures each speed",
        group="check",
        minimum=0,
        maximum=600,
        unit="seconds",
    )
    verbose: bool = VERBOSE
    # For trainer.run.replica_check, and for deploy, which pays for several GPUs:
    verdict: str = setting("")
    paid: bool = setting(False)


@command("starts from scratch")
def main(arguments: Sequence[str]) -> int:
    """Runs the check that the flags name, logs its result, and returns the exit code."""
    options, overrides = parse_request(CheckOptions, arguments, USAGE)
    set_verbose(options.verbose)
    config = overrides.config
    refuse_missing_modules(config)
    modes = [f"--{name}" for name in ("bits", "xla", "on_gpus") if getattr(options, name)]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} contradict each other: keep one")
    if options.xla:
        return _check_compiled_step(config)
    if options.on_gpus:
        return _check_gpus(config, options.seconds)
    return _check_replicas(config, options)


def _check_compiled_step(config: TrainConfig) -> int:
    """Runs one step compiled by XLA, or logs why that fails; returns the exit code."""
    set_up_process(config.cache_dir)
    with quiet_start():
        from trainer.cluster.strategy import make_replicas
        from trainer.run.training_setup import build_setup
        from trainer.training.xla_choice import failure_of
    log.info(f"{config.model}: compiles and runs one step …")
    setup = build_setup(config, make_replicas(config))
    with setup.dataset.reading():
        try:
            setup.step_runner(compiled=True)(setup.rows_from(0), 0, 1)
        except Exception as error:
            log.error("%s", failure_of(error))
            return USER_MUST_CHANGE
    log.info(f"{config.model}: XLA compiles its step")
    return DONE


def _check_replicas(config: TrainConfig, options: CheckOptions) -> int:
    """Compares a few steps on one and on several logical CPU devices; returns the exit code.

    The steps are in float64, or with --bits have to agree bit by bit. With --verdict, as a child of
    `trainer.run.replica_check`, it writes what it found to that file instead; with --paid it
    refuses what a job on several GPUs would refuse before it trains.
    """
    if options.bits and not config.virtual_replicas:
        raise UserError(
            "--bits: a plain run has equal bits on one number of replicas alone: add"
            " --virtual_replicas=4, say, or drop --bits, to compare in float64 up to 1e-10"
        )
    replicas = min(4, config.virtual_replicas) if options.bits else 2
    if not options.verdict:
        config.rows_per_replica(replicas)  # refuses a batch that does not divide
    with quiet_start():
        import tensorflow as tf

        from trainer.data.sources import load_dataset
        from trainer.run.proof import Proof
        from trainer.run.replica_check import (
            COMPARED_STEPS,
            ReplicaVerdict,
            act_on_verdict,
            compare_bits,
            compare_replicas,
            judge,
            proof_of,
        )

        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * replicas
        )
    log.info(f"{config.model}: traces its step …")
    if options.verdict:
        write_json(Path(options.verdict), judge(config))
        return DONE
    if options.paid:
        try:
            load_dataset(config)
        except Exception as error:
            log.info(
                "the data are not at hand: the job proves first that replicas change nothing"
                f" ({reason(error)})"
            )
            return DONE
        act_on_verdict(
            ReplicaVerdict(**judge(config)), allowed=config.allow_replica_dependence, paid=True
        )
        return DONE
    steps = f"{COMPARED_STEPS} steps on 1 and on {replicas} replicas"
    if options.bits:
        problems = compare_bits(config, replicas)
        agreement = f"equal bits: {steps}"
    else:
        if config.virtual_replicas:
            proof = Proof(unknown=["--virtual_replicas"])
        else:
            proof = proof_of(config)
        for line in proof.metrics:
            log.warning(f"a metric depends on the number of replicas: {line}")
        if proof.holds:
            log.info(
                f"{config.model}: proved: every update is what one device with all rows would make"
            )
            return DONE
        log.info(f"not proved: compares {steps} …")
        problems, _, precision = compare_replicas(config)
        log.warning(f"{proof.verdict(differ=bool(problems))}: {'; '.join(proof.lines)}")
        agreement = f"{steps} give the same weights and losses {precision}"
    for problem in problems:
        log.error("%s", problem)
    if problems:
        return USER_MUST_CHANGE
    log.info(f"{config.model}: {agreement}")
    return DONE


def _check_gpus(config: TrainConfig, seconds: float) -> int:
    """Checks this machine's GPUs, writes gpu_check.json, and returns the exit code."""
    job_dir = open_job_dir(config) if config.job_dir or on_vertex() else None
    set_up_process(config.cache_dir)
    with quiet_start():
        from trainer.checks.on_gpus import check_on_gpus

    with closing(job_dir.mirror) if job_dir else nullcontext():
        if job_dir:
            job_dir.mirror.begin(job_dir.logs)
        content = check_on_gpus(config, seconds)
        where = GPU_CHECK
        if job_dir:
            job_dir.write(GPU_CHECK, content)
            job_dir.mirror.finish()
            where = job_dir.mirror.where(job_dir.root / GPU_CHECK)
        else:
            write_json(Path(GPU_CHECK), content)
    if not content["agrees"]:
        return USER_MUST_CHANGE
    log.info(f"all agree; the numbers are in {where}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
