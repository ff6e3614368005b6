"""Runs a training job: `python -m trainer.task --recipe=NAME --job_dir=FOLDER [--setting=value
…]`."""

import time

_BEGAN = time.monotonic()  # taken first, so that the job's time includes the slow imports

import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from trainer.base.errors import DONE  # noqa: E402
from trainer.base.log import set_verbose  # noqa: E402
from trainer.base.run_files.job_directory import open_job_dir, outputs  # noqa: E402
from trainer.base.settings.own_settings import refuse_missing_modules  # noqa: E402
from trainer.base.settings.request import (  # noqa: E402
    TASK,
    TaskOptions,
    parse_request,
    to_recipe,
)
from trainer.base.storage.staging import cache_home, preflight  # noqa: E402
from trainer.cluster.cluster_spec import read_cluster, set_gpu_environment  # noqa: E402
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
    is_chief = read_cluster().is_chief  # only the chief writes
    preflight(config.inputs, outputs(config) if is_chief else {})
    # finds mistakes before TensorFlow is loaded
    job_dir = open_job_dir(config, make=is_chief)
    set_gpu_environment(cache_home(config.cache_dir) / "cuda")
    with quiet_start():
        from trainer.run import job  # imports TensorFlow
    command_line = [sys.executable, "-m", "trainer.task", *arguments]
    return job.run(config, command_line, _BEGAN, job_dir, overrides.named)


if __name__ == "__main__":
    sys.exit(main())
