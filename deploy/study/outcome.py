"""Says what came out of a study: the best trial, how sure that is, and a table for people and programs."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from deploy.report.table import csv_text, figures, markdown_table
from deploy.study.space import Settings, shown
from deploy.study.trials import STATES, Trial, best_first
from trainer.config.fields import as_text


@dataclass(frozen=True)
class Outcome:
    """Holds a study's trials with what is needed to judge them.

    `default`: the settings of a run without a study, if they are in the space; `command`: the start of the command
    that trains with settings, which follow it as flags; `usd_per_hour`: of each trial, None if it is not known.
    """

    trials: tuple[Trial, ...]
    names: tuple[str, ...]  # of the settings
    metric: str
    goal: str
    repeats: int = 1
    default: Settings | None = None
    command: str = ""
    usd_per_hour: float | None = None

    @property
    def ranked(self) -> list[Trial]:
        """Returns the trials, the best first."""
        return best_first(self.trials, self.goal)

    @property
    def best(self) -> Trial | None:
        """Returns the best complete trial; the earliest of equal ones."""
        return next((trial for trial in self.ranked if trial.state == "complete"), None)

    @property
    def best_command(self) -> str:
        """Returns the command that trains with the best settings; empty without a complete trial."""
        flags = (f"--{name}={as_text(value)}" for name, value in self.best.settings.items()) if self.best else ()
        return " ".join([self.command, *flags]) if self.best else ""

    def verdict(self) -> list[str]:
        """Returns sentences: the best trial, how it compares with the recipe's own settings, and which are as good."""
        counts = Counter(trial.state for trial in self.trials)
        told = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        lines = [f"{len(self.trials)} trials: {told}."]
        if not self.best:
            return [*lines, "No trial is complete: there is no best one."]
        lines.insert(
            0, f"Best: trial {self.best.number}, {self.metric} {_value(self.best)}: {shown(self.best.settings)}."
        )
        return [*lines, *filter(None, [self._against_default(self.best), self._ties(self.best)])]

    def notes(self) -> list[str]:
        """Returns what to keep in mind when reading the table."""
        way = "lower" if self.goal == "minimize" else "higher"
        lines = [f"{self.metric} is the value at the end of a run; {way} is better."]
        if self.repeats > 1:
            lines.append(f"Each trial ran {self.repeats} times with other seeds: mean ± standard deviation.")
        else:
            lines.append("Each trial ran once: --repeats=3 shows how much of a difference is noise.")
        lines.append("The best of many trials is in part the luckiest: expect a little less of it on new data.")
        if any(trial.state == "pruned" for trial in self.trials):
            lines.append("A pruned trial was ended early: its value is that of its last report.")
        if any(trial.state == "killed" for trial in self.trials):
            lines.append("A killed trial has not ended: the same command resumes it.")
        return lines

    def _against_default(self, best: Trial) -> str:
        found = [trial for trial in self.trials if trial.settings == self.default and trial.state == "complete"]
        if not found or best.value is None or found[0].value is None:
            return ""
        own = f"the recipe's own settings (trial {found[0].number}: {_value(found[0])})"
        if found[0] is best or best.value == found[0].value:
            return f"No trial was better than {own}."
        if self._equal(best, found[0]):
            return f"It is not clearly better than {own}: the difference is within the spread of the repeats."
        return f"It is better than {own} by {figures(abs(best.value - found[0].value))}."

    def _ties(self, best: Trial) -> str:
        complete = [trial for trial in self.trials if trial.state == "complete" and trial is not best]
        same = [str(trial.number) for trial in complete if self._equal(best, trial)]
        if not same:
            return ""
        how = "within its spread" if self.repeats > 1 else "equal to it"
        return f"{'Trial' if len(same) == 1 else 'Trials'} {', '.join(same)} {'is' if len(same) == 1 else 'are'} {how}."

    def _equal(self, one: Trial, other: Trial) -> bool:
        """Returns whether two trials differ by no more than the wider of their spreads."""
        assert one.value is not None
        assert other.value is not None
        return abs(one.value - other.value) <= max(one.spread or 0.0, other.spread or 0.0)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Returns titles and cells of a table with a line for each trial, the best first."""
        priced = self.usd_per_hour is not None
        titles = ["trial", "state", self.metric, *self.names, "seconds", *(["USD"] if priced else []), "reason"]
        return titles, [
            [
                str(trial.number),
                trial.state,
                _value(trial),
                *(_setting(trial.settings.get(name)) for name in self.names),
                f"{trial.seconds:,.0f}",
                *([f"{self._usd(trial):.2f}"] if priced else []),
                trial.reason,
            ]
            for trial in self.ranked
        ]

    def _usd(self, trial: Trial) -> float | None:
        return None if self.usd_per_hour is None else trial.seconds / 3600 * self.usd_per_hour

    def records(self) -> list[dict[str, Any]]:
        """Returns a trial a record with full precision; settings are named with `setting.` before."""
        return [
            {
                "trial": trial.number,
                "state": trial.state,
                "value": trial.value,
                "spread": trial.spread,
                **{f"setting.{name}": trial.settings.get(name) for name in self.names},
                "seconds": trial.seconds,
                "usd": self._usd(trial),
                "reason": trial.reason,
            }
            for trial in self.ranked
        ]


def _value(trial: Trial) -> str:
    if trial.value is None:
        return ""
    return figures(trial.value, 4) + (f" ± {figures(trial.spread, 2)}" if trial.spread is not None else "")


def _setting(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else as_text(value)


def to_markdown(outcome: Outcome) -> str:
    """Returns the table in Markdown, with the verdict, the notes and the best trial's command below it."""
    command = [f"`{outcome.best_command}`"] if outcome.best else []
    return markdown_table(*outcome.rows(), [*outcome.verdict(), *command, *outcome.notes()])


def to_csv(outcome: Outcome) -> str:
    """Returns a line for each trial, with full precision."""
    return csv_text(outcome.records())


def to_json(outcome: Outcome) -> str:
    """Returns the trials with every report of the metric, the verdict and the best trial's command."""
    by_number = {trial.number: trial for trial in outcome.trials}
    more = [{"values": by_number[one["trial"]].values, "reports": by_number[one["trial"]].reports}
            for one in outcome.records()]  # fmt: skip
    content = {
        "metric": outcome.metric,
        "goal": outcome.goal,
        "trials": [{**record, **added} for record, added in zip(outcome.records(), more, strict=True)],
        "best": outcome.best.number if outcome.best else None,
        "best_command": outcome.best_command,
        "verdict": outcome.verdict(),
        "notes": outcome.notes(),
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def to_terminal(outcome: Outcome, width: int | None = None) -> str:
    """Returns the table as plain text with a line for each trial."""
    from rich.console import Console
    from rich.table import Table

    titles, cells = outcome.rows()
    table = Table(show_header=True, header_style="bold", box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title in ("state", "reason") else "right", no_wrap=title != "reason")
    for line in cells:
        table.add_row(*line)
    # Reasons come from files: what looks like markup in them is text.
    console = Console(width=width or max(100, 60 + 14 * len(titles)), markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
