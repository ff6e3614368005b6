"""Defines the exit codes of a job and the exceptions that are reported in one line."""

import re

DONE = 0
FAULT = 1  # a fault of this program or of the platform
USER_MUST_CHANGE = 2  # config, data or machine
INTERRUPTED = 75  # state saved: the same command resumes

FRAME = re.compile(r'File "([^"\n]+)", line (\d+)(?:, in ([\w<>.]+))?')
# the beginning of the text of an error in code that AutoGraph rewrote
IN_USER_CODE = "in user code:"
_LONGEST = 4000  # characters of an error line: names and values in it may come from files of others


def without_colours(text: str) -> str:
    """Returns the text without the escape codes by which Keras prints bold or coloured text."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def shortened(text: str, most: int = 300) -> str:
    """Returns the text on one line; cut after `most` characters it ends with "…"."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most].rstrip()} …"


def without_frames(text: str) -> str:
    """Returns an error's cause, after a traceback's last frame; the whole text without one."""
    frames = [*FRAME.finditer(text)]
    cause = text[frames[-1].end() :].partition("\n\n")[2] if frames else ""
    return cause or text


def reason(error: BaseException) -> str:
    """Returns the error's text on one line, shortened, or its type if it has no text.

    For an error in code that AutoGraph rewrote, that is the cause, without the frames that
    TensorFlow quotes.
    """
    text = without_colours(str(error))
    return (
        shortened(without_frames(text) if text.startswith(IN_USER_CODE) else text)
        or type(error).__name__
    )


def printable(text: str) -> str:
    """Returns the text on one short line, with control characters spelled out."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:_LONGEST])
    return line + " …" * (len(text) > _LONGEST)


class _OneLine(Exception):
    """Prints an error's text on one line, without control characters and AutoGraph's frames."""

    def __str__(self) -> str:
        text = super().__str__()
        if text.startswith(IN_USER_CODE):
            text = without_frames(text).strip().removeprefix(f"{type(self).__name__}: ")
        return printable(text)


class UserError(_OneLine):
    """Reports in one line what the user must change: what was given, the rule, what to do."""

    exit_code = USER_MUST_CHANGE


class PlatformFault(_OneLine):
    """Reports in one line a platform's fault, after which the same command may succeed."""

    exit_code = FAULT
    advice = ": run the same command again later"  # a command adds it to the line


class NotFinite(UserError):
    """Reports that a loss or a weight is NaN or infinite."""

    @classmethod
    def at(cls, step: int, names: str) -> "NotFinite":
        """Returns the error for the losses or weights in `names`, found after `step` steps."""
        return cls(
            f"step {step}: {names} is NaN or infinite: lower learning_rate, look for NaN in the"
            " data, or use --precision=float32 instead of 16 bits, with another --job_dir; earlier"
            " files are kept"
        )
