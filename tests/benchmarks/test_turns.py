"""Contenders that start, and that do not."""

from functools import partial
from pathlib import Path

import pytest

from benchmarks.digits import write_digits
from benchmarks.talk import CONTENDERS
from benchmarks.turns import Contender, Failed, started
from trainer.config import resolve


def test_a_peer_that_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with started({"PyTorch": partial(Contender, "nothing", [], 1)}, 0.1) as contenders:
        assert contenders == {}
    assert capsys.readouterr().out == "PyTorch: left out: KeyError: 'nothing'\n"


def test_ours_must_not_fail() -> None:
    with pytest.raises(Failed, match="nothing"), started({"ours": partial(Contender, "nothing", [], 1)}, 0.1):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENDERS)
def test_two_workers_step_without_each_saving(name: str, tmp_path: Path) -> None:
    what, flag = CONTENDERS[name]
    flags = ["--model=wgan_gp", "--image_size=16", "--width=4", "--global_batch_size=8", f"--data={tmp_path}/d.npz"]
    write_digits(resolve(flags).config)
    maker = partial(Contender, f"talk:{what}", [*flags, flag], 8, 2, joined=True)
    with started({name: maker}, 0.1) as contenders:
        assert contenders[name]() > 0
