"""Names the files and folders of a job directory: no other module contains these names."""

RUN_INFO = "run.json"
STATS = "stats.jsonl"
RESULT = "result.json"
GPU_CHECK = "gpu_check.json"  # of `trainer.check --on_gpus`
RUN_FILES = (RUN_INFO, STATS, RESULT)
BILLED = "billed.json"  # what the jobs of Vertex AI that wrote here cost, written by `deploy`
CLASSES = "classes.json"  # of a classifier that was evaluated
SKIPPED_IMAGES = "skipped_images.txt"
MANIFEST = "manifest.json"  # of a checkpoint; uploaded last and deleted first: a folder that has it is complete
CHECKPOINTS, LOGS, MODEL, SAMPLES = "checkpoints", "logs", "model", "samples"
STEP_PREFIX = "step-"
PROGRESS = "progress.gif"  # in SAMPLES
SAMPLE_FILES = f"{SAMPLES}/{STEP_PREFIX}*.png"  # a pattern, relative to the job directory


def step_name(step: int) -> str:
    """Returns the name of a step's checkpoint folder or, before the suffix, of its sample grid."""
    return f"{STEP_PREFIX}{step:08d}"


def step_of(name: str) -> int:
    """Returns the step in a name that `step_name` made, without suffix; -1 for any other name."""
    number = name.removeprefix(STEP_PREFIX)
    return int(number) if number != name and number.isdecimal() else -1
