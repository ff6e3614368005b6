"""Rehearses the measurement of a GPU on a CPU: parts that end well, fail or hang, and what they
leave."""

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.__main__ import DONE, constants
from deploy.planning.step_time import CONSTANTS, read_constants


def test_constants_are_the_measured_ones_and_as_before_those_that_were_not(tmp_path: Path) -> None:
    found = {"ended": DONE, "seconds": 3.0, "context_gib": 0.4}
    (tmp_path / "parts.json").write_text(json.dumps(constants({"constants": found}, ["X"])))
    read = read_constants(tmp_path / "parts.json")
    assert read == replace(CONSTANTS, context_gib=0.4, source=read.source)
    assert read.source.startswith("context_gib measured on X, ")
