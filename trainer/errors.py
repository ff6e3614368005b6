"""The exit codes of a job, and the one exception that a user can mend."""

DONE = 0
FAULT = 1  # a fault of ours or of the platform
USER_MUST_CHANGE = 2  # config, data or machine
INTERRUPTED = 75  # state saved: the same command again goes on


class UserError(Exception):
    """Something the user must change. Its text is one line: what was given, the rule, what to do next."""


class PlatformFault(Exception):
    """A fault of the platform that the same command may outlive. Its text is one line; exit code 1."""


class NotFinite(UserError):
    """A loss or a weight is NaN or infinite."""
