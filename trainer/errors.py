"""The exit codes of a job, and the exceptions that are told in one line."""

DONE = 0
FAULT = 1  # a fault of ours or of the platform
USER_MUST_CHANGE = 2  # config, data or machine
INTERRUPTED = 75  # state saved: the same command again goes on

_LONGEST = 4000  # characters of a line: names and values in it may come from anywhere


def reason(error: BaseException) -> str:
    """What a library says in `error`, to stand in a line of ours: at most 300 characters; its type where it is mute."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class _OneLine(Exception):
    """An error whose text is one line, whatever names and values stand in it."""

    def __str__(self) -> str:
        text = super().__str__()
        shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text[:_LONGEST])
        return shown + " …" * (len(text) > _LONGEST)


class UserError(_OneLine):
    """Something the user must change. Its text is one line: what was given, the rule, what to do next."""

    exit_code = USER_MUST_CHANGE


class UnknownData(UserError):
    """`data` is no source's name, and no path that is here."""

    def __init__(self, text: str, data: str) -> None:
        super().__init__(text)
        self.data = data


class PlatformFault(_OneLine):
    """A fault of the platform that the same command may outlive. Its text is one line."""

    exit_code = FAULT


class NotFinite(UserError):
    """A loss or a weight is NaN or infinite."""
