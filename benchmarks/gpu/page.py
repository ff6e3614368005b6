"""Writes what was measured as a page for people, and what a plan takes for granted of a GPU as JSON."""

import json
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.execution import DONE, Outcome
from deploy.planning.gpu_constants import CONSTANTS

REHEARSED = (
    "**A rehearsal on a CPU with tiny sizes: no number on this page is of a GPU, and none may be used for anything.**"
)
_WAYS = ("ours, plain", "ours, XLA", "Keras fit", "Keras fit, XLA")


def constants(outcomes: Mapping[str, Outcome], source: str) -> dict[str, Any]:
    """Returns the content of gpu_constants.json: what was measured, and as before what was not."""
    measured = dict(outcomes["constants"].result) if "constants" in outcomes else {}
    networks = outcomes["memory"].result.get("networks", {}) if "memory" in outcomes else {}
    if workspaces := [line["workspace_gib"] for line in networks.values() if "workspace_gib" in line]:
        measured["workspace_gib"] = max(workspaces)
    names = [name for name in vars(CONSTANTS) if name != "source"]
    left = [name for name in names if name not in measured]
    about = source + (f"; {', '.join(left)} {CONSTANTS.source}" if left else "")
    return {"source": about, **{name: measured.get(name, getattr(CONSTANTS, name)) for name in names}}


def page(outcomes: Mapping[str, Outcome], about: Mapping[str, Any]) -> str:
    """Returns the page in Markdown. about: what results.json says of machine, versions, date and command."""
    lines = ["# What a GPU showed", ""]
    lines += [REHEARSED, ""] if about["rehearsed"] else []
    lines += [f"{about['date']}, {', '.join(about['gpus']) or about['processor']}; {_versions(about)}.", "",
              f"`{about['command']}`", "", "| part | how it ended | seconds | |", "|---|---|--:|---|"]  # fmt: skip
    lines += [
        f"| {name} | {outcome.state} | {outcome.seconds:.0f} | {outcome.reason.replace('|', '/')} |"
        for name, outcome in outcomes.items()
    ]
    for name, outcome in outcomes.items():
        if outcome.result and not name.startswith(("speeds_", "fault_")):
            lines += ["", f"## {name}: {outcome.question}", "", *_part(name, outcome.result)]
    speeds = {name.removeprefix("speeds_"): each.result for name, each in outcomes.items() if "speeds_" in name}
    lines += ["", "## Steps a second", "", *_speeds(speeds)]
    lines += ["", "## What the GPU does in a step", "", *_kernels(speeds)]
    return "\n".join(lines) + "\n"


def _versions(about: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in about["packages"].items())


def _speeds(speeds: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the table of networks by way, with the ratio of our better way to `fit`'s."""
    yield f"| network | {' | '.join(_WAYS)} | PyTorch | our better way to fit's | --jit_compile=auto |"
    yield "|---|" + (len(_WAYS) + 2) * "--:|" + "---|"
    for case, result in speeds.items():
        rates = result.get("steps_per_second", {})
        cells = [_number(rates[way]) if way in rates else result.get("failed", {}).get(way, "") for way in _WAYS]
        torch = [rate for rate in result.get("pytorch", {}).values() if isinstance(rate, float)]
        best = [max((rates[way] for way in _WAYS[at : at + 2] if way in rates), default=0.0) for at in (0, 2)]
        ratio = f"{best[0] / best[1]:.2f}" if all(best) else ""
        cells += [_number(max(torch)) if torch else "", ratio, result.get("auto", "")]
        yield f"| {case} | {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _kernels(speeds: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields, of each network and way, how much of the time the GPU computes, while it is traced, and in what."""
    yield "| network | way | computes | kernels a step | most of it in |"
    yield "|---|---|--:|--:|---|"
    for case, result in speeds.items():
        for way, trace in result.get("kernels", {}).items():
            if isinstance(trace, Mapping) and trace:
                first = list(trace["longest"].items())[:2]
                longest = ", ".join(f"{kernel[:40]} {share:.0%}" for kernel, share in first)
                cells = f"{trace['busy']:.0%} | {trace['kernels']:,.0f} | {longest.replace('|', '/')}"
                yield f"| {case} | {way} | {cells} |"


def _part(name: str, result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of one part: tables of what has columns, else its JSON."""
    if name == "acceptance":
        yield from _acceptance(result)
    elif name == "halves":
        yield from _acceptance({"wgan_gp_digits": result["check"]})
        yield from result["check"]["problems"]
        for recipe, problems in result.get("differing_bits", {}).items():
            yield from ("", f"`{recipe}`, virtual replicas: {problems[0] if problems else 'equal bits'}")
    elif name == "batch_norm":
        yield from _table([dict(line, shape="x".join(map(str, line["shape"]))) for line in result["microseconds"]])
    elif name == "memory":
        yield from _table([{"network": case, **line} for case, line in result["networks"].items()])
    elif name == "main_job":
        yield from (f"- {key}: {json.dumps(value)}" for key, value in result.items())
        yield "- picture: `main_job.png` beside the results"
    else:
        yield from ("```json", json.dumps(result, indent=1), "```")


def _acceptance(result: Mapping[str, Any]) -> Iterator[str]:
    for recipe, check in result.items():
        yield f"`{recipe}`: {'all agree' if check.get('agrees') else check.get('problem') or 'they do not agree'}"
        yield ""
        yield from _table([_variant(row) for row in check.get("rows", [])])
        yield ""


def _variant(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cells of a line of the check's table."""
    far = {kind: row["difference"][kind] for kind in ("weights", "loss", "gradient")} if row["difference"] else {}
    rate = (row["speed"] or {}).get("steps_per_second", "")
    return {"variant": row["name"], "devices": row["devices"], "problem": row["problem"] or "none", **far, "rate": rate}


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    yield "|---|" + (len(columns) - 1) * "--:|"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name, '')) for name in columns)} |"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key}: {outcome}" for key, outcome in value.items())
    return (_number(value) if isinstance(value, float) else str(value)).replace("|", "/")


def _number(value: float) -> str:
    return f"{value:,.4g}"


def summary(outcomes: Mapping[str, Outcome]) -> str:
    """Returns a line: how many parts are done, and the median ratio of our better way to `fit`'s."""
    done = sum(outcome.state == DONE for outcome in outcomes.values())
    ratios = []
    for outcome in outcomes.values():
        rates = outcome.result.get("steps_per_second", {})
        if isinstance(rates, dict) and all(way in rates for way in (_WAYS[0], _WAYS[2])):
            ours, fit = (max(rates.get(way, 0.0) for way in _WAYS[at : at + 2]) for at in (0, 2))
            ratios.append(ours / fit)
    speed = f"; ours to Keras fit, median over networks: {statistics.median(ratios):.2f}" if ratios else ""
    return f"{done} of {len(outcomes)} parts are done{speed}"
