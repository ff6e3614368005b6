"""Runs a training job: `python -m trainer.task --recipe=NAME --job_dir=FOLDER [--setting=value
…]`."""

import time

_BEGAN = time.monotonic()  # taken first, so that the job's time includes the slow imports

import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from trainer.base.errors import DONE  # noqa: E402
from trainer.base.log import set_verbose  # noqa: E402
from trainer.base.run_files.job_directory import JobDir, open_job_dir, outputs  # noqa: E402
from trainer.base.settings.own_settings import refuse_missing_modules  # noqa: E402
from trainer.base.settings.request import (  # noqa: E402
    TASK,
    TaskOptions,
    parse_request,
    to_recipe,
)
from trainer.base.settings.train_config import TrainConfig  # noqa: E402
from trainer.base.storage.staging import preflight  # noqa: E402
from trainer.cluster.cluster_spec import read_cluster, set_up_process  # noqa: E402
from trainer.user_code.command import command, quiet_start  # noqa: E402


@command("resumes from the last checkpoint")
def main(arguments: Sequence[str]) -> int:
    """Resolves the settings, then prints them (--print_config) or runs the job."""
    # SIGTERM acts like Ctrl-C until training begins
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options, overrides = parse_request(TaskOptions, arguments, TASK)
    config = overrides.config
    set_verbose(options.verbose)
    if options.print_config:
        print(to_recipe(config), end="")
        return DONE
    refuse_missing_modules(config)
    job_dir = opened(config, config.inputs)
    with quiet_start():
        from trainer.run import job  # imports TensorFlow
    command_line = [sys.executable, "-m", "trainer.task", *arguments]
    return job.run(config, command_line, _BEGAN, job_dir, overrides.named)


def opened(config: TrainConfig, inputs: dict[str, str]) -> JobDir:
    """Opens the job directory, and sets up this process for TensorFlow.

    Finds mistakes in paths before TensorFlow is imported. `inputs`: those to read from, by setting.
    """
    is_chief = read_cluster().is_chief  # only the chief writes
    preflight(inputs, outputs(config) if is_chief else {})
    job_dir = open_job_dir(config, make=is_chief)
    set_up_process(config.cache_dir)
    return job_dir


if __name__ == "__main__":
    sys.exit(main())
