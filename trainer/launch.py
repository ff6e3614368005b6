"""Runs a script that calls `model.fit` on any number of devices: `python -m trainer.launch
[--flags] SCRIPT.py`.

The script stays as it is: its `fit` trains by this package, with the same rows in the same order on
any number of devices, and with checkpoints, so that the same command goes on after an interruption.
"""

import time

_BEGAN = time.monotonic()  # taken first, so that the job's time includes the slow imports

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

from trainer.base.errors import UserError  # noqa: E402
from trainer.base.log import log, set_verbose  # noqa: E402
from trainer.base.settings.fields import (  # noqa: E402
    ALL_FLAGS,
    VERBOSE,
    Usage,
    fields_of,
    flag_name,
    options_class,
    parse_command,
    setting,
)
from trainer.base.settings.request import LAUNCH_SETTINGS, OF_SCRIPT  # noqa: E402
from trainer.base.settings.train_config import TrainConfig  # noqa: E402
from trainer.task import opened  # noqa: E402
from trainer.user_code.command import command, quiet_start  # noqa: E402

USAGE = Usage(
    "python -m trainer.launch",
    "[--flag=value …] SCRIPT.py [the script's own arguments]",
    "Runs a script that calls `model.fit` on one device, several GPUs or several machines, with the"
    " same numbers.",
    "The script needs no change. Run the same command again to continue after an interruption.",
    ("job_dir", "replicas", "precision", "checkpoint_every_steps", "max_minutes", "seed"),
)


@options_class
class LaunchOptions:
    """Holds the flags of `trainer.launch` that are not settings of a run."""

    launch: bool = setting(
        False, "train by this package even if no call of Keras's fit is seen in the script"
    )
    verbose: bool = VERBOSE


def read_launch(arguments: Sequence[str]) -> tuple[LaunchOptions, dict[str, Any], list[str]]:
    """Returns our options and settings, and the script with its own arguments; answers --help.

    Raises UserError for a mistake in our flags, and if there is no script.
    """
    scripts = [place for place, word in enumerate(arguments) if word.endswith(".py")]
    place = min(scripts, default=len(arguments))
    options, settings = parse_command(
        LaunchOptions,
        arguments[:place],
        USAGE,
        fields_of(TrainConfig, *LAUNCH_SETTINGS),
        lambda name: f"{ALL_FLAGS}; {OF_SCRIPT}",
    )
    if place == len(arguments):
        raise UserError(f"the script is missing: {USAGE.program} {USAGE.arguments}")
    return options, settings, [*arguments[place:]]


@command("resumes from the last checkpoint")
def main(arguments: Sequence[str]) -> int:
    """Runs the script; its calls of `fit` train by this package. Returns the exit code."""
    # SIGTERM acts like Ctrl-C until training begins
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options, settings, (script, *own) = read_launch(arguments)
    set_verbose(options.verbose)
    if not os.path.isfile(script):
        raise UserError(f"{script}: no such file")
    for name in (flag_name(word) for word in own):
        if name in LAUNCH_SETTINGS:
            log.info(f"--{name} goes to {script}: a flag of this program stands before the script")
    config = TrainConfig(model=script, data=script, **settings)
    job_dir = opened(config, {})
    with quiet_start():
        from trainer.run import launched  # imports TensorFlow
    command_line = [sys.executable, "-m", "trainer.launch", *arguments]
    return launched.launch(config, command_line, _BEGAN, job_dir, own, forced=options.launch)


if __name__ == "__main__":
    sys.exit(main())
