"""How a command ends: what it raises is one line, and an exit code."""

from collections.abc import Callable

from trainer.errors import FAULT, INTERRUPTED, PlatformFault, UserError
from trainer.log import log, start_logging


def run_command(work: Callable[[], int], again: str) -> int:
    """The exit code that `work` returns, or that of what it raises, which is told.

    `again`: what the same command does when it is given again, as "goes on from the last checkpoint".
    """
    start_logging()
    try:
        return work()
    except UserError as error:
        log.error("%s", error)
        return error.exit_code
    except PlatformFault as error:
        log.error("%s: the same command again %s", error, again)
        return error.exit_code
    except KeyboardInterrupt:
        log.warning(f"stopped at once: the same command again {again}")
        return INTERRUPTED
    except Exception:
        log.exception("a fault of ours or of the platform, not of your settings")
        return FAULT
