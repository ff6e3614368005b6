"""Contenders that start, and that do not; what is told of both."""

import sys
from functools import partial
from pathlib import Path

import pytest

from benchmarks import input_side
from benchmarks.digits import on_digits, write_digits
from benchmarks.measure import quartiles, run_main, table
from benchmarks.startup import seconds_until
from benchmarks.talk import CONTENDERS
from benchmarks.turns import Contender, Failed, started
from trainer.config.recipe import resolve
from trainer.errors import UserError


def test_a_peer_that_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with started({"PyTorch": partial(Contender, "nothing", [], 1)}, 0.1) as contenders:
        assert contenders == {}
    assert capsys.readouterr().out == "PyTorch: left out: KeyError: 'nothing'\n"


def test_ours_must_not_fail() -> None:
    with pytest.raises(Failed, match="nothing"), started({"ours": partial(Contender, "nothing", [], 1)}, 0.1):
        pass


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; print('step 1', flush=True); sys.exit('the disk is full')", "the disk is full"),
        ("import sys; print('no such line'); print('why', file=sys.stderr)", "why"),
        ("pass", "no reason was given"),
    ],
)
def test_a_process_that_does_not_get_there_says_why(program: str, reason: str) -> None:
    with pytest.raises(Failed, match=f"^{reason}$"):
        seconds_until("step 1", [sys.executable, "-c", program])


def test_what_the_user_has_to_change_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise UserError("not like this")

    with pytest.raises(SystemExit) as caught:
        run_main(refuse)
    assert (caught.value.code, capsys.readouterr().err) == (2, "error: not like this\n")


def test_the_table_names_what_the_others_are_compared_with() -> None:
    lines = table({"plain": [2.0, 2.0, 4.0], "saved": [4.0, 1.0, 16.0]}, "plain", "seconds")
    assert lines[0] == "| | seconds (median) | lowest to highest | plain is |"
    assert lines[2:] == ["| plain | 2 | 2 - 4 |  |", "| saved | 4 | 1 - 16 | 0.50 x |"]


def test_quartiles_need_one_value_only() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_an_input_side_that_is_too_slow_says_so() -> None:
    found = {input_side.MODEL: [1000.0, 2000.0], "in memory": [10_000.0, 20_000.0], "row by row": [9_000.0, 18_800.0]}
    assert input_side.table(found, goal=10)[2:] == [
        "| the model | 1,500 |  |  |",
        "| in memory | 15,000 | 10.0 x | 10.0 to 10.0 |",
        "| row by row | 13,900 | 9.2 x, below 10 | 9.1 to 9.3 |",
    ]


@pytest.mark.parametrize("model", ["mlp", "wgan_gp"])
def test_an_input_side_takes_the_images_of_its_steps(model: str) -> None:
    flags = [f"--model={model}", "--image_size=16", "--global_batch_size=8", "--replicas=1", "--critic_steps=3"]
    with on_digits(flags) as (config, _):
        run, _ = input_side.contender(config)
        assert run(70) > 0  # it counts the images itself


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENDERS)
def test_two_workers_step_without_each_saving(name: str, tmp_path: Path) -> None:
    what, flag = CONTENDERS[name]
    flags = ["--model=wgan_gp", "--image_size=16", "--width=4", "--global_batch_size=8", f"--data={tmp_path}/d.npz"]
    write_digits(resolve(flags).config)
    maker = partial(Contender, f"talk:{what}", [*flags, flag], 8, 2, joined=True)
    with started({name: maker}, 0.1) as contenders:
        assert contenders[name]() > 0
