"""Starts and ends a command: loads TensorFlow quietly, turns an exception into one line and an exit
code.

Imports no TensorFlow.
"""

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import trainer
from trainer.base.errors import FAULT, INTERRUPTED, PlatformFault, UserError, reason
from trainer.base.log import log, start_logging
from trainer.base.run_files.plan_file import versions
from trainer.user_code.mistakes import as_user_mistake


def command(
    again: str, *, answers: bool = False
) -> Callable[[Callable[[Sequence[str]], int]], Callable[..., int]]:
    """Returns a decorator of a command's function, which returns an exit code in any case.

    It logs an exception and returns the exit code of its kind. Without arguments it takes those of
    this process. again: what a second run of the same command does, such as "resumes from the last
    checkpoint"; answers: whether stdout is for the lines with `ANSWER` alone. With --verbose, the
    traceback of an error that the line explains is logged too.
    """

    def decorate(work: Callable[[Sequence[str]], int]) -> Callable[..., int]:
        @functools.wraps(work)
        def main(arguments: Sequence[str] | None = None) -> int:
            start_logging(answers=answers)
            try:
                return work(sys.argv[1:] if arguments is None else list(arguments))
            except (Exception, KeyboardInterrupt) as raised:
                # While a module in C is imported, Ctrl-C becomes the cause of another error.
                if isinstance(raised, KeyboardInterrupt) or isinstance(
                    raised.__cause__ or raised.__context__, KeyboardInterrupt
                ):
                    log.warning(f"stopped at once: the same command {again}")
                    return INTERRUPTED
                error = as_user_mistake(raised) or _of_environment(raised) or raised
                if isinstance(error, UserError | PlatformFault):
                    log.error(
                        "%s%s",
                        error,
                        f": the same command {again}" if isinstance(error, PlatformFault) else "",
                    )
                    log.debug("the whole traceback:", exc_info=raised)
                    return error.exit_code
                log.exception("a fault of this program or of the platform, not of your settings")
                return FAULT

        return main

    return decorate


def _of_environment(error: BaseException) -> UserError | None:
    """Returns the error for a Python without the right TensorFlow, Keras or NumPy, or None."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if name not in ("tensorflow", "keras", "numpy"):
        return None
    found = ", ".join(f"{package} {version}" for package, version in versions().items())
    return UserError(
        f"{sys.executable}: {reason(error)}: this environment has {found or 'nothing of it'}:"
        f" {trainer.ACTIVATE}"
    )


@contextmanager
def quiet_start() -> Iterator[None]:
    """Says that TensorFlow is loaded, and hides C++ output unless the block raises.

    TensorFlow 2.21 prints device and oneDNN notices during its import, before it reads
    TF_CPP_MIN_LOG_LEVEL. If the user sets that variable, nothing is hidden.
    """
    if "tensorflow" not in sys.modules:
        log.info("loads TensorFlow …")
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(real, 2)
            hidden.seek(0)
            with open(os.dup(2), "wb") as stderr:
                shutil.copyfileobj(hidden, stderr)
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)
