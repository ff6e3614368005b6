"""Contenders that do not start."""

from functools import partial

import pytest

from benchmarks.turns import Contender, Failed, started


def test_a_peer_that_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with started({"PyTorch": partial(Contender, "nothing", [], 1)}, 0.1) as contenders:
        assert contenders == {}
    assert capsys.readouterr().out == "PyTorch: left out: KeyError: 'nothing'\n"


def test_ours_must_not_fail() -> None:
    with pytest.raises(Failed, match="nothing"), started({"ours": partial(Contender, "nothing", [], 1)}, 0.1):
        pass
