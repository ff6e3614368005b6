"""Names the types of fixtures and the marks of tests, so that signatures fit on a line."""

from collections.abc import Callable
from typing import Any

import pytest

from trainer.base.settings.train_config import TrainConfig

Json = dict[str, Any]
Make = Callable[..., TrainConfig]  # of small_config
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]
Log = pytest.LogCaptureFixture
Folders = pytest.TempPathFactory
SLOW = pytest.mark.slow
parametrize = pytest.mark.parametrize
