"""Tests studies on this machine, whose trials are processes: what is found, resumed, pruned, told apart and refused."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.study.optuna_study import frozen_trial, open_journal
from deploy.study.space import StudyParameter
from tests.deploy.study.conftest import Tune, command

pytest.importorskip("optuna")


def results() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("study/table.json").read_text())
    return content


def starts() -> dict[str, int]:
    """Returns how many processes each job directory has seen."""
    files = Path("study").glob("trial-*/repeat-*/starts")
    return {str(file.parent.relative_to("study")): len(file.read_text().splitlines()) for file in files}


@pytest.mark.slow
def test_a_known_optimum_is_found_in_25_trials(tune: Tune) -> None:
    """The minimum is at 3; the recipe's own value is 9, and the range 0 to 10."""
    shown = tune("--tune=x=0..10", "--trials=25").stdout
    found = results()
    best = next(trial for trial in found["trials"] if trial["trial"] == found["best"])
    assert abs(best["setting.x"] - 3) < 0.3
    assert found["trials"][0] == best
    first = next(trial for trial in found["trials"] if trial["trial"] == 1)
    assert (first["setting.x"], first["value"]) == (9.0, 36.4)
    assert "better than the recipe's own settings (trial 1: 36.40)" in shown
    assert found["best_command"].endswith(f"--job_dir=runs/best --x={best['setting.x']}")
    rows = [*csv.DictReader(Path("study/table.csv").read_text().splitlines())]
    assert [int(row["trial"]) for row in rows] == [trial["trial"] for trial in found["trials"]]
    assert all(Path(f"study/by_{name}.svg").stat().st_size > 1000 for name in ("trial", "setting", "report"))
    assert tune("--tune=x=0..10", "--trials=25").stdout.count("complete loss") == 0
    assert set(starts().values()) == {1}


def test_pruned_failed_and_killed_trials_are_told_apart(tune: Tune) -> None:
    """The killed trial is resumed by the same command, the others are not repeated."""
    fates = "--tune=fate=done,failed,killed,mute"
    tune(fates, "--tune=x=1,2", "--trials=8", "--pause=0.02", code=75)
    before = {trial["trial"]: trial for trial in results()["trials"]}
    states = {(trial["setting.fate"], trial["state"]) for trial in before.values()}
    assert states >= {("failed", "failed"), ("killed", "killed"), ("mute", "failed"), ("done", "complete")}
    assert {trial["goodput"] for trial in before.values() if trial["state"] == "complete"} == {0.75}
    assert "| 60 | 75% |" in Path("study/table.md").read_text()
    reasons = {trial["setting.fate"]: trial["reason"] for trial in before.values()}
    assert reasons["failed"] == "the loss is NaN"
    assert "killed by SIGKILL" in reasons["killed"]
    assert reasons["mute"] == "it never reported loss"
    counts = starts()
    tune(fates, "--tune=x=1,2", "--trials=8", "--pause=0.02")
    after = {trial["trial"]: trial for trial in results()["trials"]}
    assert {trial["state"] for trial in after.values()} == {"complete", "failed"}
    again = {name for name, count in starts().items() if count > counts[name]}
    assert again == {f"trial-{number:03d}/repeat-1" for number, one in before.items() if one["state"] == "killed"}


def test_a_hopeless_trial_is_ended_early_with_its_state_saved(tune: Tune) -> None:
    """Five more trials end as the first; the seventh reports worse than their median and takes long."""
    arguments = ("--tune=x=0..20", "--pause=1")
    tune(*arguments, "--trials=1")
    study, space = open_journal(Path("study"), "minimize"), [StudyParameter("x", float, (), 0.0, 20.0)]
    for number in range(2, 8):
        state, values, reports = ("COMPLETE", [36.4], [38.4, 37.4, 36.4]) if number < 7 else ("RUNNING", [], [])
        settings = {"x": 9.0 + 11 * (number == 7)}
        study.add_trial(frozen_trial(number, state, space, settings, values, reports, seconds=60.0))
    shown = tune(*arguments, "--trials=7").stdout
    assert "trial 7: pruned loss 290.4" in shown
    assert "worse than the median of the other trials after as many reports" in shown
    assert Path("study/trial-007/repeat-1/checkpoints/step").read_text() == "2"
    assert tune(*arguments, "--trials=7").stdout.count("trial 7: ") == 0, "it is not run again"


@pytest.mark.slow
def test_a_killed_study_goes_on_and_repeats_no_trial_that_is_done(tune: Tune) -> None:
    """kill -9 at ten random points; its jobs outlive it or not."""
    chance = random.Random(26)
    arguments = ("--tune=x=0..10", "--tune=rows=4..12", "--trials=40", "--pause=0.05", "--no_pruning")
    done_before: set[str] = set()
    frozen: dict[str, int] = {}
    for _ in range(10):
        with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True) as process:
            next(line for line in process.stdout if line.startswith("trial "))
            time.sleep(chance.uniform(0.0, 2.5))
            process.kill()
        done = complete_trials()
        assert done_before <= done
        settled = {name: count for name, count in starts().items() if name[:9] in done}
        assert {name: settled[name] for name in frozen} == frozen
        frozen, done_before = settled, done
    assert 3 <= len(done_before) < 40, "some trials were done when it was killed, not all"
    fewer = [f"--trials={len(done_before) + 2}" if flag == "--trials=40" else flag for flag in arguments]
    tune(*fewer)
    assert {name: starts()[name] for name in frozen} == frozen
    for run in Path("study").glob("trial-*/repeat-1"):  # every step was reported once, in order, whatever was killed
        assert [json.loads(line)["step"] for line in (run / "stats.jsonl").read_text().splitlines()] == [1, 2, 3]
    killed = results()
    Path("study").rename("killed")
    tune(*fewer)
    assert results() == killed, "as if nothing had been killed"


def complete_trials() -> set[str]:
    """Returns the folders of the trials that are complete by the study's journal."""
    trials = open_journal(Path("study"), "minimize").trials
    return {f"trial-{trial.number + 1:03d}" for trial in trials if trial.state.name == "COMPLETE"}


def test_what_a_kill_leaves_of_the_journal_does_not_stop_the_study(tune: Tune) -> None:
    """The journal's lock and half a line are removed."""
    tune("--tune=x=0..10", "--trials=2")
    with open("study/journal.log", "a") as file:
        file.write('{"op_code": 4, "wor')
    Path("study/journal.log.lock").symlink_to("study/journal.log")
    assert "trial 3: complete" in tune("--tune=x=0..10", "--trials=3").stdout
    assert sorted(trial["trial"] for trial in results()["trials"]) == [1, 2, 3]
    Path("study/journal.log").write_text("{}\n")
    assert "journal.log is damaged" in tune("--tune=x=0..10", "--trials=3", code=2).stderr


def test_a_study_of_the_older_form_is_not_continued(tune: Tune) -> None:
    """It had trial.json in each trial's folder and no journal."""
    Path("study/trial-001").mkdir(parents=True)
    Path("study/trial-001/trial.json").write_text('{"settings": {"x": 5.0}, "ended": "", "reason": ""}')
    refused = tune("--tune=x=0..10", "--trials=9", code=2).stderr
    assert refused == "error: study holds a study of the older form, which is not continued: use another --out\n"


def test_ctrl_c_saves_the_trials_and_the_same_command_goes_on(tune: Tune) -> None:
    arguments = ("--tune=x=0..10", "--trials=2", "--pause=0.5")
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    )  # fmt: skip
    while not list(Path("study").glob("trial-001/repeat-1/stats.jsonl")):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (75, "stopped: run the same command again to go on\n")
    assert "trial 1: goes on: x=9.0" in tune(*arguments).stdout
    assert starts()["trial-001/repeat-1"] == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_parallel_trials_have_their_own_cores(tune: Tune) -> None:
    cores = sorted(os.sched_getaffinity(0))
    tune("--tune=x=0..10", "--trials=4", f"--parallel={min(2, len(cores))}", "--pause=0.2")
    used = {file.read_text().splitlines()[0] for file in Path("study").glob("trial-*/repeat-1/starts")}
    half = len(cores) // 2
    assert used == {str(cores[:half]), str(cores[half : 2 * half])}
    refused = tune("--tune=x=0..10", "--trials=4", f"--parallel={len(cores) + 1}", "--pause=0.2", code=2).stderr
    assert f"parallel={len(cores) + 1}: this machine has {len(cores)} cores" in refused


def test_repeats_have_other_seeds_and_a_spread(tune: Tune) -> None:
    """Seeds 0, 1 and 2 add 0, 0.01 and 0.02; x = 3 and 3.001 differ by less."""
    shown = tune("--tune=x=3,3.001,5", "--trials=9", "--repeats=3").stdout
    found = results()
    assert len(found["trials"]) == 3, "the space has no more"
    assert "(there are no more than 3 configurations)" in shown
    assert [round(trial["value"], 3) for trial in found["trials"]] == [0.41, 0.41, 4.41]
    assert [round(trial["spread"], 4) for trial in found["trials"]] == [0.01, 0.01, 0.01]
    assert "is within its spread" in shown
    assert len(starts()) == 9


def test_what_is_the_same_for_all_trials_ends_the_study_at_the_first(tune: Tune) -> None:
    """The folder then holds nothing, so that the command may be changed."""
    refused = tune("--tune=x=0..10", "--fate=refused", "--trials=5", code=2)
    assert refused.stderr == "error: trial 1: this data does not exist\n"
    assert not list(Path("study").glob("trial-*"))
    assert "trial 1: complete" in tune("--tune=rows=5..9", "--trials=1").stdout


def test_another_study_in_the_folder_is_refused_and_more_trials_are_not(tune: Tune) -> None:
    tune("--tune=x=0..10", "--trials=1")
    refused = tune("--tune=x=0..11", "--trials=1", code=2).stderr
    assert "holds another study (tune: ['x=0.0..10.0'] stored, ['x=0.0..11.0'] given): use another --out" in refused
    tune("--tune=x=0..10", "--trials=2")
    assert [trial["trial"] for trial in results()["trials"]].count(2) == 1


@pytest.mark.slow
def test_learning_rate_and_width_of_mlp_on_digits_against_the_recipe(tune: Tune) -> None:
    """The trainer itself runs. The recipe's own settings are the first trial, with the same steps as the others."""
    arguments = [sys.executable, "-m", "deploy", "tune", "cpu", "--recipe=mlp_mnist", "--data=digits", "--out=study"]
    arguments += [
        "--image_size=16",
        "--steps=40",
        "--evaluation_fraction=0.2",
        "--metric=val_accuracy",
        "--trials=3",
        "--parallel=2",
    ]
    tuned = ["--tune=learning_rate=1e-4..1e-1:log", "--tune=width=64..512:log"]
    done = subprocess.run([*arguments, *tuned], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    trials = {trial["trial"]: trial for trial in results()["trials"]}
    assert (trials[1]["setting.learning_rate"], trials[1]["setting.width"]) == (0.001, 512)
    best = trials[results()["best"]]
    own = "than the recipe's own settings (trial 1: "
    assert (f"It is better {own}" in done.stdout) == (best["value"] > trials[1]["value"])
    assert (f"No trial was better {own}" in done.stdout) == (best["value"] == trials[1]["value"])
    metric_file = Path("study/trial-001/repeat-1/tuning_metric.jsonl").read_text().splitlines()
    assert json.loads(metric_file[-1])["val_accuracy"] == str(trials[1]["value"]), "what Vertex AI would read"
