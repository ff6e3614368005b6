"""Says in words what the time of a step goes to, and what to do about it. Imports no TensorFlow: `deploy` uses it."""

from collections import Counter
from collections.abc import Iterable, Mapping

MATRIX, MEMORY, ALL_REDUCE, INPUT, DISPATCH = KINDS = ("matrix", "memory", "all_reduce", "input", "dispatch")
CALL = "call"  # the time of a call to the device, which is divided

WORDS = {
    MATRIX: "matrix work",
    MEMORY: "memory-bound work",
    ALL_REDUCE: "all-reduce",
    INPUT: "waiting for input",
    DISPATCH: "dispatch",
}
ADVICE = {
    MATRIX: "use --precision=mixed_bfloat16, or faster or more devices",
    MEMORY: "use --jit_compile, which joins operations, or --precision=mixed_bfloat16, which halves their bytes",
    ALL_REDUCE: "use fewer, larger machines, or a larger batch per replica",
    INPUT: "prepare the data (python -m trainer.data.prepare), or make your own data function faster",
    DISPATCH: "use a larger batch per replica, or --jit_compile",
}
MUCH = 0.2  # of a step: from here on, time in which a device computes nothing calls for advice

Span = tuple[int, int, str]  # start, end, and CALL or one of KINDS


def divide(spans: Iterable[Span]) -> dict[str, float]:
    """Divides the time within the spans of CALL among KINDS, as shares of 1; {} if there is no such time.

    Work comes first, in equal parts for all that runs at once; then an all-reduce; then waiting for input; an instant
    with none of these is dispatch.
    """
    changes = sorted(
        (at, change, kind) for start, end, kind in spans if start < end for at, change in ((start, 1), (end, -1))
    )
    running: Counter[str] = Counter()
    parts = dict.fromkeys(KINDS, 0.0)
    total, before = 0, 0
    for at, change, kind in changes:
        if running[CALL] and at > before:
            total += at - before
            doing = _doing(running)
            for each, count in doing.items():
                parts[each] += count * (at - before) / sum(doing.values())
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


def advice(shares: Mapping[str, float]) -> list[str]:
    """Returns what to do, the most useful first: for each kind without computing above MUCH, else for the main work."""
    idle = [kind for kind in (INPUT, DISPATCH, ALL_REDUCE) if shares.get(kind, 0.0) >= MUCH]
    main = max((kind for kind in KINDS if kind in shares), key=lambda kind: shares[kind], default=None)
    kinds = sorted(idle, key=lambda kind: -shares[kind]) or ([main] if main else [])
    return [f"{WORDS[kind]} {100 * shares[kind]:.0f} %: {ADVICE[kind]}" for kind in kinds]
