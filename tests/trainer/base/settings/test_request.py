"""Recipe and flags -> TrainConfig: who wins, and one teaching line for every mistake."""

from pathlib import Path

from tests.fixtures import Patch, parametrize
from tests.support import refused, resolved
from tests.workers import python
from trainer.base.settings.fields import nearest
from trainer.base.settings.model_settings import FROM_SCRATCH
from trainer.base.settings.request import recipe_names, to_recipe
from trainer.base.settings.yaml_file import read_yaml


@parametrize(
    "flags, expected",
    [
        (
            ["--recipe=wgan_gp_digits", "--global-batch-size=32"],
            {"global_batch_size": 32, "steps": 4000, "seed": 0},
        ),
        ([], {"epochs": 1, "jit_compile": "auto"}),
        # replaces the recipe's length
        (["--recipe=wgan_gp_digits", "--epochs=2"], {"epochs": 2, "steps": None}),
        (
            ["--steps=1e3", "--learning_rate=1e-3", "--tensorboard=no"],
            {"steps": 1000, "learning_rate": 1e-3, "tensorboard": False},
        ),
        *(
            (flags.split("|"), {"job_dir": "a-b"})
            for flags in ("--job_dir=a-b", "--job-dir=a-b", "--job-dir|a-b", "--job_dir|a-b")
        ),
        # A switch with a third value may stand alone.
        (["--jit_compile", "--steps=4"], {"jit_compile": "true"}),
        (["--jit_compile", "auto"], {"jit_compile": "auto"}),
        (["--jit_compile=on"], {"jit_compile": "true"}),
        (["--no-jit-compile"], {"jit_compile": "false"}),
        (["--jit-compile", "false"], {"jit_compile": "false"}),
    ],
)
def test_a_flag_in_any_form_wins_over_the_recipe_and_the_recipe_over_the_default(
    flags: list[str], expected: dict[str, object]
) -> None:
    config = vars(resolved(*flags))
    assert {name: config[name] for name in expected} == expected


@parametrize(
    "flags, line",
    [
        (["steps=4"], "'steps=4' is not a flag"),
        (["--steps=many"], "steps='many' must be a whole number"),
        (["--steps=-5"], "steps=-5 must be at least 1"),
        (["--steps=4", "--epochs=2"], "steps=4 and epochs=2 both set the length"),
        (["--channels=2"], "channels=2 must be one of 1, 3."),
        (["--model=wgan"], "no such model; did you mean 'wgan_gp'?"),
        (["--data=digit"], "no such data; did you mean 'digits'?"),
        (
            ["--model=mine:build"],
            (
                "data is missing: model=mine:build is a function of your own: use"
                " --data=package.module"
            ),
        ),
        (
            ["--replicas=3", "--global_batch_size=100"],
            "does not divide over 3 replicas: take 99 or 102",
        ),
        (["--micro_batches=5"], "=64 does not divide over micro_batches=5: take 60 or 65"),
        (
            ["--replicas=4", "--micro_batches=32"],
            "=64 does not divide over 4 replicas x micro_batches=32: take 128",
        ),
        (
            ["--virtual_replicas=6"],
            "virtual_replicas=6: use a power of 2 from 2 on, as sums are added in pairs",
        ),
        (
            ["--virtual_replicas=4", "--replicas=8"],
            "virtual_replicas=4 does not divide over 8 replicas: use 1, 2, 4 … 4",
        ),
        (
            ["--virtual_replicas=8", "--global_batch_size=20"],
            "=20 does not divide over virtual_replicas=8: take 16",
        ),
        (
            ["--virtual_replicas=4", "--micro_batches=2"],
            "virtual_replicas=4 and micro_batches=2 contradict each other",
        ),
        (
            ["--model=cnn", "--diff_augment=color"],
            "diff_augment is a setting of dcgan, wgan_gp, r3gan, not of model=cnn",
        ),
        (["--model=efficientnet", "--channels=3", "--fine_tune_after_steps=5"], FROM_SCRATCH),
        (
            ["--model=efficientnet", "--channels=3", "--weights=none", "--fine_tune_from=block6a"],
            FROM_SCRATCH,
        ),
        (
            ["--model=cnn", "--early_stopping=val_los"],
            (
                "early_stopping=val_los: cnn can stop by accuracy, loss, val_accuracy, val_loss;"
                " did you mean 'val_loss'?"
            ),
        ),
        (
            ["--early_stopping=val_loss"],
            "wgan_gp can stop by critic_loss, generator_loss, gradient_penalty",
        ),
        (
            ["--model=mlp", "--best_metric=acuracy"],
            "this run measures val_accuracy, val_loss; did you mean 'val_acc",
        ),
        (["--best_metric=fid"], "best_metric=fid: this run measures nothing"),
        (
            ["--cache_dir=gs://bucket/cache"],
            "cache_dir=gs://bucket/cache: only local paths are supported here",
        ),
        (
            ["--tuning_metric=critic"],
            "tuning_metric=critic: this run reports critic_loss, generator_loss, gradient_",
        ),
        (
            ["--model=cnn", "--fid_every_steps=5"],
            "fid_every_steps=5: cnn generates no images: drop the flag",
        ),
        (
            ["--model=cnn", "--fine_tune_after_steps=5"],
            "fine_tune_after_steps is a setting of efficientnet, not of",
        ),
        (["--model=cnn", "--image_size=16"], "cnn needs at least 20 pixels"),
        (
            ["--strategy=one_device", "--replicas=2"],
            "strategy=one_device and replicas=2 contradict each other",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    flags: list[str], line: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)  # a user's own modules may lie in the folder of the tests
    with refused(line):
        resolved(*flags)


@parametrize(
    "text, line",
    [
        ("stepz: 4", "unknown setting 'stepz'; did you mean 'steps'?"),
        ("steps: 4\nsteps: 5", "steps is listed twice"),
        ("- steps", "'setting: value' lines are needed, this is list"),
        (
            "model: mlp\nsteps: 4\n  epochs: 2",
            "mine.yaml, line 3: not valid YAML: mapping values are not",
        ),
        ("steps: true", "steps=True must be a whole number"),
        ("steps: 2024-01-01", "steps=datetime.date(2024, 1, 1) must be a whole number"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_a_recipe_with_a_mistake_is_named(tmp_path: Path, text: str, line: str) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text)
    with refused(line):
        resolved(f"--recipe={recipe}")


def test_keys_that_a_mapping_merges_are_those_of_its_anchor(tmp_path: Path) -> None:
    file = tmp_path / "pools.yaml"
    file.write_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n")
    assert read_yaml(file, "pools.yaml")["b"] == {"x": 1, "y": 3}


def test_models_and_measures_that_are_not_known_before_they_run_are_let_through() -> None:
    own = ["--model=tests.models:classifier", "--data=digits"]
    assert resolved(*own, "--early_stopping=f1", "--best_metric=fid", "--fid_every_steps=5")
    assert resolved(*own, "--tuning_metric=f1")
    assert resolved("--tuning_metric=wasserstein_distance")
    assert resolved("--best_metric=kid", "--fid_every_steps=5", "--early_stopping=critic_loss")


@parametrize("name", recipe_names())
def test_every_recipe_resolves_and_print_config_shows_one_for_the_same_run(
    name: str, tmp_path: Path
) -> None:
    data = ["--data=digits"] if name.endswith("_photos") else []
    config = resolved(f"--recipe={name}", "--seed=3", *data)
    (tmp_path / "again.yaml").write_text(to_recipe(config))
    again = resolved(f"--recipe={tmp_path / 'again.yaml'}")
    assert {**vars(again), "recipe": name} == vars(config)


def test_settings_and_local_paths_import_neither_tensorflow_nor_cloud_storage() -> None:
    program = (
        "import sys, trainer.task\ntry: trainer.task.main(['--help'])\nexcept SystemExit as end:"
        " code = end.code\ntrainer.task.main(['--recipe=wgan_gp_digits',"
        " '--print_config'])\ntrainer.task.preflight({'data': 'digits', 'fid_features':"
        " 'inception'}, {'job_dir': 'runs'})\nheavy = ('tensorflow', 'keras',"
        " 'google.cloud.storage', 'google.auth', 'requests')\nprint('LOADED', [name for name in"
        " heavy if name in sys.modules], code)"
    )
    assert "LOADED [] 0" in python("-c", program).stdout


@parametrize(
    "name, known, hint",
    [
        ("l4xl", ("l4x1", "l4x2", "l4x8"), "; did you mean 'l4x1'?"),  # as close to each: the first
        ("us-nowhere9", ("us-west4", "us-south1"), "."),
        ("unitz", ("run", "checkpoint"), "."),
        ("labels", ("channels", "data"), "."),
    ],
)
def test_only_a_name_that_is_close_is_suggested(
    name: str, known: tuple[str, ...], hint: str
) -> None:
    assert nearest(name, known) == hint
