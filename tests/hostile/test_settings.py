"""Tests flags, recipes, machine specs and price files that nobody writes by accident: one line
each, exit code 2."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.__main__ import main as deploy
from deploy.tiers.spec_rules import MESSAGES
from deploy.tiers.tier import JOB_CONFIGS, load_tier
from tests.fixtures import Capture, Json
from tests.fuzz import MANY, at_most, examples, like, one_line, scalars, texts, values
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.task import main as task

NAMES = [field.name for field in dataclasses.fields(TrainConfig)]
_name = st.sampled_from(NAMES) | texts
_flag = (
    st.builds(lambda name, value: f"--{name}={value}", _name, scalars.map(str))
    | _name.map("--{}".format)
    | texts
)

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
TEXTS = [
    "steps: *a\n",
    "steps: &a [*a]\n",
    "data: &a\n  b: *a\n",
    BOMB + "data: *a39\n",
    "data:\n- &a0 [x, x]\n" + "".join(f"- &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
    "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)),
    "!!python/object/apply:os.system ['true']",
    "model: !!python/name:os.system",
    "steps: !!int ''",
    "seed: !!float ''",
    "tf32: !!bool perhaps",
    "data: !!timestamp soon",
    "data: !!binary '*'",
    "data: 2026-13-45",
    "seed: 1:99:99",
    "seed: 0x" + "f" * 5000,
    "seed: " + "9" * 5000,
    "steps: 1\nsteps: 2",
    "? [a, b]\n: 1",
    "{" * 800,
    "- " * 5000,
    "a:\n" + "".join(" " * n + "a:\n" for n in range(1, 200)),
    "learning_rate: .nan",
    "learning_rate: .inf",
    "%YAML 9.9\n---\n",
    "a: 1\n---\nb: 2",
    "\ufeffsteps: 3",
    "steps: 3\0",
    "x" * 100_001,
    "recipe: wgan_gp_digits",
    "~: 1",
    'job_dir: "a\\0b"',
]
_recipe = st.dictionaries(_name, values, max_size=4).map(
    lambda content: yaml.dump(content, allow_unicode=True)
)


def written(path: Path, text: str) -> str:
    path.write_bytes(text.encode(errors="surrogatepass"))
    return str(path)


@examples(60)
@given(st.lists(_flag.filter(lambda flag: flag not in ("-h", "--help")), max_size=4))
def test_flags(arguments: list[str]) -> None:
    one_line(lambda: Overrides.parse(arguments).config)


@examples(40)
@given(text=st.one_of(_recipe, _recipe, st.text(max_size=60), st.sampled_from(TEXTS)))
def test_a_recipe(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.getbasetemp() / "recipe.yaml", text)
    one_line(lambda: Overrides.parse([f"--recipe={path}"]).config)


@pytest.mark.hypothesis  # make test-hostile runs it too
@pytest.mark.parametrize(("number", "text"), [*enumerate(TEXTS)])
def test_files_that_blow_up_are_refused_in_every_place(
    number: int, text: str, tmp_path: Path, capsys: Capture
) -> None:
    """Each text in one of three places; in all of them where many inputs are asked for."""
    path = written(tmp_path / "nasty.yaml", text)
    valid = "steps: 3" in text and "\0" not in text
    places = [
        (task, [f"--recipe={path}", "--print_config"], 0 if valid else 2),
        (deploy, ["submit", path, "--recipe=wgan_gp_digits"], 2),
        (deploy, ["machines", f"--prices={path}"], 2),
    ]
    with at_most(64):
        for command, arguments, code in places if MANY else [places[number % 3]]:
            assert command(arguments) == code
    assert "Traceback" not in capsys.readouterr().err


_SPEC: Json = yaml.safe_load((JOB_CONFIGS / "l4x1-2workers.yaml").read_text())
_SPEC["scheduling"] = {"strategy": "FLEX_START", "timeout": "3600s", "maxWaitDuration": "60s"}


@examples(50)
@given(
    spec=like(_SPEC)
    | st.fixed_dictionaries({}, optional=dict.fromkeys(MESSAGES["CustomJobSpec"], values))
)
def test_a_machine_spec(spec: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = written(tmp_path_factory.getbasetemp() / "tier.yaml", yaml.dump(spec))
    tier = one_line(lambda: load_tier(path))
    if tier:
        assert tier.workers >= 1
        assert tier.timeout_s > 0
        assert tier.price_per_hour is None or tier.price_per_hour >= 0
