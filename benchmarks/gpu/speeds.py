"""Measures steps a second of one network: ours, Keras `fit` and PyTorch: `python -m benchmarks.gpu.speeds --case=cnn`.

Those of TensorFlow run in this process, in turn, so that its start is paid once; PyTorch's in processes of their own.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from benchmarks.gpu.execution import Results, rehearsing, turn
from benchmarks.gpu.kernels import kernels_of
from benchmarks.gpu.parts import CASES
from benchmarks.keras_fit import Clock, batches_for, model_for
from benchmarks.processes import CONSTANT_RATE, Candidate, digits_file, images_per_step
from benchmarks.runner import make_parser, possible
from benchmarks.trainer_loop import STEPS_OF_A_RUN, TrainingLoop
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.run.training_setup import TrainingSetup, build_setup
from trainer.training.xla_choice import TimedSteps, choose

PARSER = make_parser(__doc__, repeats=5, seconds=1.0)
PARSER.add_argument("--case", choices=CASES, required=True)
TORCH = {"PyTorch eager": "pytorch:channels_last", "PyTorch torch.compile": "pytorch:compile"}
Run = Callable[[int], float]  # steps -> seconds


@contextmanager
def settings_of(case: str) -> Iterator[tuple[TrainConfig, list[str]]]:
    """Yields the settings and flags of a case; a recipe's data are digits in a file that every framework reads."""
    flags, small = CASES[case]
    every = [*flags, *(small if rehearsing() else ())]
    own = any(flag.startswith("--model=") for flag in flags)
    with nullcontext((resolve(every).config, every)) if own else digits_file([*every, *_constant(case)]) as pair:
        yield pair


def _constant(case: str) -> Sequence[str]:
    return CONSTANT_RATE if case in ("cnn", "mlp") else ()


def main() -> None:
    """Keeps the median steps a second of each way."""
    options, results = PARSER.parse_args(), Results()
    seconds, repeats = (0.05, 2) if rehearsing() else (options.seconds, options.repeats)
    with settings_of(options.case) as (config, flags):
        setup = build_setup(config, make_replicas(config))
        results.keep(batch=setup.replicas.sentence(), network=config.model)
        trial = setup.timed_steps(0)
        with turn(alone=False):
            ways = _built(results, _ways(setup, trial))
            peers = _torch_peers(config, flags, seconds)
        with turn(alone=True):
            _measure(results, ways, seconds, repeats)
            with tempfile.TemporaryDirectory() as cache:
                config_of_auto = dataclasses.replace(config, jit_compile="auto", cache_dir=cache)
                results.keep(auto=choose(config_of_auto, trial, STEPS_OF_A_RUN).sentence())
            _measure_torch(results, peers, images_per_step(config), repeats)
            _trace(results, ways)


def _measure(results: Results, ways: Mapping[str, Run], seconds: float, repeats: int) -> None:
    """Keeps the median steps a second of each way, measured in turn."""
    counts = {name: _steps_in(run, seconds) for name, run in ways.items()}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            speeds[name].append(counts[name] / run(counts[name]))
        results.keep(steps_per_second={name: statistics.median(values) for name, values in speeds.items()})


def _ways(setup: TrainingSetup, trial: TimedSteps) -> Mapping[str, Callable[[], Run]]:
    return {
        "ours, plain": lambda: TrainingLoop(setup, trial.runner(False)),
        "ours, XLA": lambda: TrainingLoop(setup, trial.runner(True)),
        "Keras fit": lambda: _fit(setup, compiled=False),
        "Keras fit, XLA": lambda: _fit(setup, compiled=True),
    }


def _fit(setup: TrainingSetup, *, compiled: bool) -> Run:
    """Returns `fit` with ten steps per execution."""
    model, rows, clock = model_for(setup, 10, jit_compile=compiled), batches_for(setup), Clock()

    def run(steps: int) -> float:
        model.fit(rows, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[clock])
        return clock.seconds

    return run


def _built(results: Results, makers: Mapping[str, Callable[[], Run]]) -> dict[str, Run]:
    """Returns the ways whose first ten steps run; keeps the seconds that they took, or why they failed."""
    ways, first, failed = dict[str, Run](), dict[str, float](), dict[str, str]()
    for name, make in makers.items():
        began = time.monotonic()
        try:
            run = make()
            run(10)
        except Exception as error:  # the other ways are measured all the same
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else repr(error)
        else:
            ways[name], first[name] = run, time.monotonic() - began
        results.keep(first_seconds=first, failed=failed)
    return ways


def _steps_in(run: Run, seconds: float) -> int:
    """Returns how many steps, a multiple of ten, take about `seconds`."""
    return 10 * max(1, round(seconds / max(run(10), 1e-6)))


def _trace(results: Results, ways: Mapping[str, Run]) -> None:
    """Keeps what the GPU does in ten steps of each way."""
    kernels: dict[str, Any] = {}
    for name, run in ways.items():
        try:
            kernels[name] = kernels_of(run)
        except Exception as error:  # CUDA's profiler needs permissions that a container may lack
            kernels[name] = str(error)[:200]
        results.keep(kernels=kernels)


def _torch_peers(config: TrainConfig, flags: list[str], seconds: float) -> dict[str, Candidate | str]:
    """Returns a process of PyTorch for each way of a network that it has, or why it failed."""
    peers: dict[str, Candidate | str] = {}
    if config.model in ("wgan_gp", "dcgan", "cnn", "mlp"):
        for name, kind in possible(TORCH).items():
            try:
                candidate = Candidate(kind, flags, images_per_step(config))
                candidate.calibrate(seconds)
                peers[name] = candidate
            except Exception as error:  # an own part of the machine: torch.compile needs a compiler
                peers[name] = str(error)[:200]
    return peers


def _measure_torch(results: Results, peers: Mapping[str, Candidate | str], rows: int, repeats: int) -> None:
    """Keeps PyTorch's steps a second."""
    speeds: dict[str, float | str] = {}
    for name, peer in peers.items():
        if isinstance(peer, Candidate):
            speeds[name] = statistics.median(peer() / rows for _ in range(repeats))
            peer.close()
        else:
            speeds[name] = peer
        results.keep(pytorch=speeds)


if __name__ == "__main__":
    main()
