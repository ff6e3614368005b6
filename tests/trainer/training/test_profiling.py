"""Tests profiles of real runs: what their time goes to, their files, and when none is made."""

import json
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures import Log
from tests.support import prepared, refused, run_job
from trainer.config.overrides import resolve
from trainer.config.train_config import TrainConfig
from trainer.data.own import InSequence
from trainer.reporting.breakdown import DISPATCH, INPUT, KINDS, MATRIX, MUCH
from trainer.reporting.trace import PROFILES
