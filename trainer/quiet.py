"""Keeps TensorFlow's start-up chatter off the terminal, and nothing else."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_start() -> Iterator[None]:
    """Hides what C++ code prints to stderr within the block; shows it after all when the block raises.

    TensorFlow 2.21 prints device and oneDNN notices while it is imported, before it looks at TF_CPP_MIN_LOG_LEVEL.
    A user who sets that variable sees everything.
    """
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
