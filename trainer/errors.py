"""The exit codes of a job, and the one exception that a user can mend."""

DONE = 0
FAULT = 1  # a fault of ours or of the platform
USER_MUST_CHANGE = 2  # config, data or machine
INTERRUPTED = 75  # state saved: the same command again goes on


class UserError(Exception):
    """Something the user must change. Its text is one line: what was given, the rule, what to do next."""
