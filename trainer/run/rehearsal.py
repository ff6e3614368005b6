"""Tries, before training, what a run of a user's own model does only after hours: evaluate, sample,
save and export."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keras

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.data.sample_grids import sample_grid
from trainer.measures.evaluation import Evaluation
from trainer.run.export import export
from trainer.run.saved_model_check import DIFFERS, compare_saved
from trainer.run.training_setup import TrainingSetup
from trainer.training.checkpoint import (
    check_fits,
    read_checkpoint,
    snapshot,
    variables_of,
    write_checkpoint,
)
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import as_user_mistake, message_of


def rehearse(setup: TrainingSetup, evaluate: Evaluation | None) -> None:
    """Tries what a run does at its end: checkpoint, evaluation, samples and export.

    It also loads what was saved. All files go to a temporary folder, and no weight changes, nor
    what Python draws next. A training step is not tried, as the first one follows at once. Raises
    UserError that names what failed.
    """
    model = setup.model
    config = setup.config
    random_state = random.getstate()  # by which a script may seed its next model

    # An error of a part is the user's, and names the part.
    @contextmanager
    def trying(part: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise as_user_mistake(error) or UserError(
                f"model={config.model}: its {part} fails, tried before training:"
                f" {message_of(error)} (--verbose prints the whole traceback)"
            ) from error

    with tempfile.TemporaryDirectory(prefix="trainer-rehearsal-") as name:
        checkpoint = Path(name) / "state"
        exported = Path(name) / "exported"
        with trying("checkpoint"):
            variables = variables_of(model)
            if not variables:
                raise UserError(
                    "the model has no variables: build its layers, or call it on some rows, before"
                    " it is returned"
                )
            write_checkpoint(checkpoint, snapshot(variables), {"step": 0, "state": {}})
            _, values = read_checkpoint(checkpoint)
            check_fits(variables, values, "checkpoint")
        if evaluate:
            with trying("evaluation"):
                evaluate.try_one_batch()
        interface = ModelInterface.of(model)
        if sampler := interface.sampler:
            with trying("sample"):
                sample_grid(sampler, config.seed, interface.generated_classes)
        try:
            with trying("export"):
                save = config.save_optimizer
                export(model, exported, setup.dataset.input_spec, save_optimizer=save)
                # Keras also saves classes that it cannot load without their code, of which the
                # comparison only warns.
                outcome = compare_saved(setup, exported)
                if outcome.startswith(DIFFERS):
                    raise UserError(
                        f"model={config.model}: {outcome}: Keras {keras.__version__} loses what it"
                        " was made with: give it a registered class of your own with a get_config"
                        " that has all arguments, or use another"
                    )
        except UserError as error:
            # A script trains by plain python too, and saves what it needs itself.
            if config.model != config.data:
                raise
            log.warning(f"{error}: it trains all the same: save in the script what you need of it")
    random.setstate(random_state)
