"""Says what came out of a study: the best trial, how sure that is, a table, and Optuna's figures."""

import json
import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.report.text_tables import csv_text, figures, markdown_table, terminal_table
from deploy.study.optuna_study import in_memory
from deploy.study.space import of_recipe, shown
from deploy.study.study_request import StudyRequest
from deploy.tiers.output import say
from trainer.base.errors import UserError
from trainer.base.settings.fields import as_text
from trainer.base.storage import make_writable, write_whole

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "RUNNING": "killed", "FAIL": "failed"}  # of Optuna, in order
_KILLED = "it has not ended: the same command resumes it"
_FORMATS = {"seconds": ",.0f", "goodput": ".0%", "usd": ".2f"}


def state_of(trial: "FrozenTrial") -> str:
    """Returns the state of a trial that no process runs, as users know it."""
    return _STATES[trial.state.name]


@dataclass(frozen=True)
class StudyOutcome:
    """Holds a study's trials with what is needed to judge them.

    `command`: the start of the command that trains with settings, which follow it as flags; `usd_per_hour`: of each
    trial, None if it is not known.
    """

    trials: "Sequence[FrozenTrial]"
    plan: StudyRequest
    command: str = ""
    usd_per_hour: float | None = None

    @cached_property
    def ranked(self) -> "list[FrozenTrial]":
        """Returns all trials: the complete ones, the best first, then the others by state; equal ones by number."""
        sign, states = -1.0 if self.plan.goal == "maximize" else 1.0, list(_STATES)

        def order(trial: "FrozenTrial") -> tuple[int, float, int]:
            state = states.index(trial.state.name)
            return state, 0.0 if state else sign * trial.value, trial.number

        return sorted(self.trials, key=order)

    @property
    def complete(self) -> "list[FrozenTrial]":
        """Returns the complete trials, the best first."""
        return [trial for trial in self.ranked if state_of(trial) == "complete"]

    @property
    def best_command(self) -> str:
        """Returns the command that trains with the best settings; empty without a complete trial."""
        flags = [f"--{key}={as_text(value)}" for trial in self.complete[:1] for key, value in trial.params.items()]
        return " ".join([self.command, *flags]) if flags else ""

    def verdict(self) -> list[str]:
        """Returns sentences: the best trial, how it compares with the recipe's own settings, and which are as good."""
        counts = Counter(map(state_of, self.ranked))
        counted = f"{len(self.trials)} trials: {', '.join(f'{count} {state}' for state, count in counts.items())}."
        if not self.complete:
            return [counted, "No trial is complete: there is no best one."]
        best, *others = self.complete
        lines = [f"Best: trial {best.number + 1}, {self.plan.metric} {_value(best)}: {shown(best.params)}.", counted]
        default = of_recipe(self.plan.space, self.plan.overrides)
        lines += [_against(best, trial) for trial in self.complete if trial.params == default]
        same = [str(trial.number + 1) for trial in others if _equal(best, trial)]
        if same:
            equals = f"Trial {same[0]} is" if len(same) == 1 else f"Trials {', '.join(same)} are"
            lines.append(f"{equals} {'within its spread' if self.plan.repeats > 1 else 'equal to it'}.")
        return lines

    def notes(self) -> list[str]:
        """Returns what to keep in mind when reading the table."""
        way, repeats = "lower" if self.plan.goal == "minimize" else "higher", self.plan.repeats
        several = f"Each trial ran {repeats} times with other seeds: mean ± standard deviation."
        pruned = any(state_of(trial) == "pruned" for trial in self.trials)
        return [
            f"{self.plan.metric} is the value at the end of a run; {way} is better.",
            several if repeats > 1 else "Each trial ran once: --repeats=3 shows how much of a difference is noise.",
            "The best of many trials is in part the luckiest: expect a little less of it on new data.",
            *(["A pruned trial was ended early: its value is that of the report which decided."] if pruned else []),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Returns a trial a record with full precision, the best first; settings are named with `setting.` before."""
        return [
            {
                "trial": trial.number + 1,
                "state": state_of(trial),
                "value": trial.value,
                "spread": _spread(trial),
                **{f"setting.{parameter.name}": trial.params.get(parameter.name) for parameter in self.plan.space},
                "seconds": trial.user_attrs.get("seconds", 0.0),
                "goodput": trial.user_attrs.get("goodput"),
                "usd": None if self.usd_per_hour is None else trial.user_attrs["seconds"] / 3600 * self.usd_per_hour,
                "reason": trial.user_attrs.get("reason") or (_KILLED if state_of(trial) == "killed" else ""),
                "values": trial.user_attrs.get("values", []),
                "reports": list(trial.intermediate_values.values()),
            }
            for trial in self.ranked
        ]

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Returns titles and cells of a table with a line for each trial, the best first."""
        titles = {"trial": "trial", "state": "state", "value": self.plan.metric}
        titles |= {f"setting.{parameter.name}": parameter.name for parameter in self.plan.space}
        titles |= {"seconds": "seconds", "goodput": "goodput", "usd": "paid USD", "reason": "reason"}
        if self.usd_per_hour is None:
            del titles["usd"]
        lines = [{**record, "value": _value(trial)} for record, trial in zip(self.records(), self.ranked, strict=True)]
        return list(titles.values()), [[_cell(key, line[key]) for key in titles] for line in lines]

    def content(self) -> dict[str, Any]:
        """Returns the content of table.json."""
        best = self.complete[0].number + 1 if self.complete else None
        numbers = {"metric": self.plan.metric, "goal": self.plan.goal, "trials": self.records(), "best": best}
        return {**numbers, "best_command": self.best_command, "verdict": self.verdict(), "notes": self.notes()}

    def write(self, out: Path) -> None:
        """Writes table.md, table.csv, table.json and Optuna's figures into `out`, and prints the table and the verdict.

        Figures come last: if matplotlib is missing, UserError is raised after the tables.
        """
        make_writable(out, "out")
        records, verdict, notes, command = self.records(), self.verdict(), self.notes(), self.best_command
        titles, cells = self.rows()
        below = [*verdict, *([f"`{command}`"] if command else []), *notes]
        write_whole(out / "table.md", markdown_table(titles, cells, below))
        flat = [{key: value for key, value in record.items() if not isinstance(value, list)} for record in records]
        write_whole(out / "table.csv", csv_text(flat))
        write_whole(out / "table.json", json.dumps(self.content(), indent=2, allow_nan=False) + "\n")
        try:
            pictures = self._draw(out) if self.complete else []
        finally:
            table = terminal_table(titles, cells, left=len(titles))
            say(table, *verdict, "", *notes, *(["", command] if command else []))
        say("", *map(str, pictures))

    def _draw(self, out: Path) -> list[Path]:
        """Writes Optuna's figures. Raises UserError if matplotlib is not installed."""
        try:
            import matplotlib.pyplot as plt
            from optuna.visualization import matplotlib as plots
        except ImportError:
            raise UserError("the figures of a study need matplotlib: pip install matplotlib") from None
        study, metric = in_memory(self.plan.goal, self.trials), self.plan.metric
        drawings = {
            out / "by_trial.svg": partial(plots.plot_optimization_history, target_name=metric),
            out / "by_setting.svg": partial(plots.plot_slice, target_name=metric),
            out / "by_report.svg": plots.plot_intermediate_values,
        }
        plt.switch_backend("svg")
        for file, draw in drawings.items():
            with plt.rc_context(), warnings.catch_warnings():  # Optuna sets pyplot's style, and calls this experimental
                warnings.simplefilter("ignore")
                draw(study)
                plt.savefig(file, bbox_inches="tight", metadata={"Date": None})
                plt.close("all")
        return [*drawings]


def _cell(key: str, value: Any) -> str:
    if isinstance(value, float):
        return format(value, _FORMATS.get(key, ".4g"))
    return "" if value is None else as_text(value)


def _value(trial: "FrozenTrial") -> str:
    spread = _spread(trial)
    more = "" if spread is None else f" ± {figures(spread, 2)}"
    return "" if trial.value is None else figures(trial.value, 4) + more


def _spread(trial: "FrozenTrial") -> float | None:
    """Returns the standard deviation between repeats; None of fewer than two."""
    values = trial.user_attrs.get("values", ())
    return statistics.stdev(values) if len(values) > 1 else None


def _equal(first: "FrozenTrial", second: "FrozenTrial") -> bool:
    """Returns whether two trials differ by no more than the wider of their spreads."""
    return bool(abs(first.value - second.value) <= max(_spread(first) or 0.0, _spread(second) or 0.0))


def _against(best: "FrozenTrial", default: "FrozenTrial") -> str:
    compared = f"the recipe's own settings (trial {default.number + 1}: {_value(default)})"
    if best.value == default.value:
        return f"No trial was better than {compared}."
    if _equal(best, default):
        return f"It is not clearly better than {compared}: the difference is within the spread of the repeats."
    return f"It is better than {compared} by {figures(abs(best.value - default.value))}."
