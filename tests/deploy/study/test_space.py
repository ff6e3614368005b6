"""Tests that the space of a study is read from flags, and that what a run would refuse is refused before any trial."""

import math
from pathlib import Path

import pytest

from deploy.study.space import StudyParameter, check_space, configurations, of_recipe, read_space
from tests.deploy.conftest import Command
from trainer.base.errors import UserError
from trainer.base.settings.resolution import Overrides

MLP = Overrides.parse(["--recipe=mlp_mnist", "--data=digits", "--steps=9"])
OWN = Overrides.parse([f"--model={__package__}.quadratic:build", f"--data={__package__}.quadratic:data"])


def test_ranges_and_lists_of_every_type_are_read() -> None:
    found = read_space(["learning-rate=1e-5..1e-3:log", "width=16,32,64", "warmup_steps=0..1e2"], MLP)
    assert found == [
        StudyParameter("learning_rate", float, (), 1e-5, 1e-3, log=True),
        StudyParameter("width", int, (16, 32, 64)),
        StudyParameter("warmup_steps", int, (), 0, 100),
    ]
    assert [one.text for one in found] == ["learning_rate=1e-05..0.001:log", "width=16,32,64", "warmup_steps=0..100"]
    assert [one.count for one in found] == [math.inf, 3, 101]
    own = read_space(["x=-1..9.5", "kind=plain,offset", "rows=4..12"], OWN)
    assert [(one.kind, one.values) for one in own] == [(float, ()), (str, ("plain", "offset")), (int, ())]
    assert of_recipe(own, OWN) == {"x": 9.0, "kind": "plain", "rows": 5}
    assert of_recipe(found, MLP) is None, "the recipe's width is 512"
    assert configurations(own[1:]) == 18
    (flag,) = read_space(["tensorboard=true,false"], MLP)
    assert flag.values == (True, False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("learning_rat=1..2", "unknown setting 'learning_rat'; did you mean 'learning_rate'?"),
        ("learning_rate=0..1", "learning_rate=0.0 must be greater than 0"),
        ("learning_rate=1e-3..1e-5", "0.001 is not below 1e-05"),
        ("dropout=0..0.5:log", "a logarithmic range begins above 0, not at 0.0"),
        ("dropout=0..0.99", "dropout=0.99 must be at most 0.95"),
        ("width=16,wide", "width='wide' must be a whole number"),
        ("width=16..32.5", "width='32.5' must be a whole number"),
        ("width=16", "give two values or more, each once, or leave width out"),
        ("width=16,32,16", "give two values or more, each once"),
        ("precision=float32,float46", "precision=float46 must be one of"),
        ("tensorboard=false..true", "tensorboard='false..true' must be true or false"),
        ("width", "write --tune=NAME=LOW..HIGH"),
        ("seed=1,2", "a study does not vary seed: use --repeats=COUNT"),
        ("steps=10,20", "--steps=9 and --tune=steps=10,20 contradict each other"),
    ],
)
def test_what_no_run_would_take_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        read_space([text], MLP)
    assert reason in str(caught.value)


def test_the_limits_of_own_settings_count() -> None:
    with pytest.raises(UserError, match=r"kind=round must be one of plain, offset"):
        read_space(["kind=plain,round"], OWN)
    with pytest.raises(UserError, match="rows is varied twice"):
        read_space(["rows=1,2", "rows=3,4"], OWN)


@pytest.mark.parametrize(
    ("flags", "tune", "reason"),
    [
        (
            ["--recipe=wgan_gp_digits"],
            "image_size=16..40",
            "a trial with image_size=17 would be refused: image_size=17",
        ),
        (["--recipe=mlp_mnist", "--data=digits", "--replicas=2"], "global_batch_size=8,9", "does not divide over 2"),
        (["--data=digits"], "model=mlp,cnn image_size=32,16", "model=cnn, image_size=16 would be refused"),
    ],
)
def test_rules_between_settings_are_checked_at_the_desk(flags: list[str], tune: str, reason: str) -> None:
    overrides = Overrides.parse(flags)
    space = read_space(tune.split(), overrides)
    with pytest.raises(UserError, match=reason):
        check_space(space, lambda settings: overrides.replace(**settings).resolve())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--metric=val_accuracy"], "tune is missing"),
        (["--tune=width=8,16"], "metric is missing: name what the trials are judged by"),
        (["--tune=width=8,16", "--metric=val_acuracy"], "tuning_metric=val_acuracy: this run reports"),
        (["--tune=width=8,16", "--metric=loss", "--job_dir=x"], "--job_dir is not for a study: --out names the folder"),
        (
            ["--tune=width=8,16", "--metric=loss", "--max_cost=5"],
            "--max_cost is for jobs of Vertex AI: add --on=vertex",
        ),
        (
            ["--tune=width=8,16", "--metric=loss", "--image=install"],
            "--image is for jobs of Vertex AI: add --on=vertex",
        ),
        (["--tune=width=8,16", "--metric=loss", "--widht=8"], "unknown flag --widht; did you mean 'width'?"),
    ],
)
def test_a_command_that_could_only_fail_is_refused(arguments: list[str], reason: str, refused: Command) -> None:
    assert reason in refused("tune", "cpu", "--recipe=mlp_mnist", "--data=digits", *arguments)
    assert not Path("runs").exists()
