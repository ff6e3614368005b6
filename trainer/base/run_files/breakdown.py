"""Says in words what the time of a step goes to, and what to do about it. Imports no TensorFlow: `deploy` uses it."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

MATRIX, MEMORY, ALL_REDUCE, INPUT, DISPATCH = TIME_SHARES = ("matrix", "memory", "all_reduce", "input", "dispatch")
CALL = "call"  # the time of a call to the device, which is divided

WORDS = {
    MATRIX: "matrix work",
    MEMORY: "memory-bound work",
    ALL_REDUCE: "all-reduce",
    INPUT: "waiting for input",
    DISPATCH: "dispatch",
}
JIT_COMPILE, MIXED = "use --jit_compile", "use --precision=mixed_bfloat16"
REMEDIES = {
    MATRIX: (MIXED, "use faster or more devices"),
    MEMORY: (JIT_COMPILE, MIXED, "use devices with faster memory"),
    ALL_REDUCE: ("use fewer, larger machines", "use a larger batch per replica"),
    INPUT: ("prepare the data (python -m trainer.data.prepare)", "make your own data function faster"),
    DISPATCH: ("use a larger batch per replica", JIT_COMPILE),
}
MUCH = 0.2  # of a step: from here on, time in which a device computes nothing calls for advice

Span = tuple[int, int, str]  # start, end, and CALL or one of TIME_SHARES


def divide(spans: Iterable[Span]) -> dict[str, float]:
    """Divides the time within the spans of CALL among TIME_SHARES, as shares of 1; {} if there is no such time.

    Work comes first, in equal parts for all that runs at once; then an all-reduce; then waiting for input; an instant
    with none of these is dispatch.
    """
    changes = sorted((at, by, kind) for start, end, kind in spans if start < end for at, by in ((start, 1), (end, -1)))
    running: Counter[str] = Counter()
    parts = dict.fromkeys(TIME_SHARES, 0.0)
    total, before = 0, 0
    for at, change, kind in changes:
        if running[CALL] and at > before:
            total += at - before
            doing = _doing(running)
            for work, count in doing.items():
                parts[work] += count * (at - before) / sum(doing.values())
        running[kind] += change
        before = at
    return {kind: part / total for kind, part in parts.items()} if total else {}


def _doing(running: Mapping[str, int]) -> dict[str, int]:
    """Returns how much of each kind an instant belongs to."""
    if work := {kind: running[kind] for kind in (MATRIX, MEMORY) if running[kind]}:
        return work
    return {next((kind for kind in (ALL_REDUCE, INPUT) if running[kind]), DISPATCH): 1}


def in_words(shares: Mapping[str, float]) -> str:
    """Returns `62 % matrix work, 31 % memory-bound work, 7 % dispatch`: the largest first, without what rounds to 0."""
    parts = sorted(((share, WORDS[kind]) for kind, share in shares.items() if kind in WORDS), reverse=True)
    return ", ".join(f"{100 * share:.0f} % {words}" for share, words in parts if share >= 0.005)


def advice(shares: Mapping[str, float], tried: Collection[str] = ()) -> list[str]:
    """Returns advice, the most useful first: for each kind without computing above MUCH, else for the main work.

    `tried`: remedies that are left out.
    """
    idle = [kind for kind in (INPUT, DISPATCH, ALL_REDUCE) if shares.get(kind, 0.0) >= MUCH]
    main = max((kind for kind in TIME_SHARES if kind in shares), key=lambda kind: shares[kind], default=None)
    kinds = sorted(idle, key=lambda kind: -shares[kind]) or ([main] if main else [])
    left = {kind: ", or ".join(remedy for remedy in REMEDIES[kind] if remedy not in tried) for kind in kinds}
    return [f"{WORDS[kind]} {100 * shares[kind]:.0f} %: {remedies}" for kind, remedies in left.items()]


def tried_by(config: Mapping[str, Any], compilation: Mapping[str, Any]) -> list[str]:
    """Returns the remedies that a run uses, or has found to be slower, by these parts of its run.json."""
    compiles = config.get("jit_compile") == "true" or compilation.get("compiled")
    mixed = str(config.get("precision")).startswith("mixed")
    measured = compilation.get("compiled_step_seconds")
    return [*([JIT_COMPILE] if compiles or measured else []), *([MIXED] if mixed else [])]
