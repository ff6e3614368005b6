"""The entry point of a training job: `python -m trainer.task --recipe=NAME --job_dir=FOLDER [--setting=value …]`."""

import time

_BEGAN = time.monotonic()  # before the slow imports: they are part of the job's time

import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402

from trainer.config import resolve, to_yaml  # noqa: E402
from trainer.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, UserError  # noqa: E402
from trainer.jobdir import open_job_dir  # noqa: E402
from trainer.log import log, start_logging  # noqa: E402
from trainer.quiet import quiet_start  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolves the settings, then prints them or runs the job. Returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    start_logging()
    try:
        request = resolve(given)
        if request.print_config:
            print(to_yaml(request.config), end="")
            return DONE
        open_job_dir(request.config)  # what can be refused is refused before TensorFlow is loaded
        with quiet_start():
            from trainer import job  # TensorFlow from here on
        return job.run(request.config, [sys.executable, "-m", "trainer.task", *given], _BEGAN)
    except UserError as error:
        log.error("%s", error)
        return USER_MUST_CHANGE
    except KeyboardInterrupt:
        log.warning("stopped before anything new was saved: the same command again begins where it began")
        return INTERRUPTED
    except Exception:
        log.exception("a fault of ours or of the platform, not of your settings")
        return FAULT


if __name__ == "__main__":
    sys.exit(main())
