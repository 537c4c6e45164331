"""The trials of a sweep at work: who starts, who has ended, and what is told of them."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from dflash_fit.halving import Standing, rungs_of, standing, steps_in_all
from dflash_fit.places import Needs, Place, Start, starts
from dflash_fit.prospects import Prospect, host_room
from dflash_fit.shared import SharedReads
from dflash_fit.sweep_plan import Plan, Trial
from dflash_fit.sweep_record import (
    Bytes,
    LiveStories,
    Row,
    Story,
    bytes_before,
    dropped,
    ranked,
    read_rows,
    read_story,
    row_of,
    totals,
    write,
)
from dflash_fit.trial import Ended, Task

LOOK = 0.5  # seconds between looks at trials at work
LOGS = "logs"
LAST_SHARE = 0.05  # of its steps: a trial in them is about to be over


class Process(Protocol):
    """A trial at work, as `trial.Started` is one."""

    @property
    def sentinel(self) -> Any: ...
    def ask(self) -> None: ...
    def kill(self) -> None: ...
    def ended(self) -> Ended | None: ...


Begin = Callable[[Task], Process]


class Crew:
    """The trials of a sweep, as long as it runs."""

    def __init__(
        self,
        plan: Plan,
        prospects: dict[str, Prospect],
        failed: dict[str, str],
        places: Sequence[Place],
        shared: SharedReads,
        begin: Begin,
    ) -> None:
        self.plan, self.prospects, self.places = plan, prospects, places
        self.shared, self.begin = shared, begin
        self.trials = {trial.name: trial for trial in plan.trials}
        self.failed = failed
        self.running: dict[str, tuple[Start, Process]] = {}
        self.stories = {name: read_story(trial.config.out) for name, trial in self.trials.items()}
        self.live = LiveStories()
        self.before = read_rows(plan.out)
        self.rungs = self._rungs()
        self.asked = False
        self.begun: set[str] = set()  # trials that were started by this command
        packs = shared.most_bytes((one.group, one.planes, one.rows) for one in prospects.values())
        self.host_room, self.moment = host_room() - packs, time.monotonic()
        self.told = 0  # messages of the shared reads
        self.written: object = None
        steps = [one.steps for one in prospects.values()]
        total = steps_in_all(self.rungs, len(steps)) if self.rungs else sum(steps)
        self.bar = tqdm(total=total, desc="sweep", unit="step", initial=self.steps(), disable=None)

    def _rungs(self) -> list[int]:
        steps = [one.steps for one in self.prospects.values()]
        if self.plan.halving is None or not steps:
            return []
        return rungs_of(steps[0], self.plan.halving)

    # --- what it does -----------------------------------------------------------------------------

    def work(self) -> None:
        """Until nothing runs and nothing may start."""
        for name, reason in self.failed.items():
            say(f"{name} failed: {reason}")
        self.refuse_unmeasured()
        self.tell()
        while True:
            if not self.asked:
                self.start(self.next())
            self.tell()
            if not self.running:
                return
            wait([process.sentinel for _, process in self.running.values()], timeout=LOOK)
            self.take_ended()

    def next(self) -> list[Start]:
        goals = self.standing().goals
        waiting = [
            self.needs(name, goal)
            for name, goal in goals.items()
            if name not in self.running and self.stories[name].saved < goal
        ]
        running = [
            replace(start, ending=self.is_ending(start)) for start, _ in self.running.values()
        ]
        return starts(waiting, running, self.places, host_room=self.host_room)

    def is_ending(self, start: Start) -> bool:
        trial, goal = self.trials[start.needs.name], start.needs.goal
        return self.story(trial).step + trial.config.log_every >= (1 - LAST_SHARE) * goal

    def standing(self) -> Standing:
        """Where trials may go."""
        if self.rungs:
            measured = {name: self.stories[name].measured for name in self.prospects}
            return standing(self.rungs, list(self.prospects), measured, failed=list(self.failed))
        goals = {n: one.steps for n, one in self.prospects.items() if n not in self.failed}
        return Standing(goals=goals, waiting=(), halved={})

    def needs(self, name: str, goal: int) -> Needs:
        found = self.prospects[name]
        return Needs(
            name=name,
            group=found.group,
            step=self.stories[name].saved,
            goal=goal,
            leap=found.leap,
            device_bytes=found.device_bytes,
            host_bytes=found.estimate.host_bytes,
        )

    def start(self, chosen: Sequence[Start]) -> None:
        """All join before one starts: what is read for the first is then kept for the others."""
        for start in chosen:
            found = self.prospects[start.needs.name]
            self.shared.join(start.needs.name, found.group, found.planes, found.rows)
        for start in chosen:
            if self.asked:
                self.shared.leave(start.needs.name)
                continue
            trial = self.trials[start.needs.name]
            task = Task(
                name=trial.name,
                config=trial.config,
                device=start.device,
                address=self.shared.address,
                halt=start.needs.goal,
                stop_at=start.stop_at,
                log=self.log_of(trial.name),
            )
            self.begun.add(trial.name)
            self.running[trial.name] = (start, self.begin(task))
            if self.asked:  # while it was being started
                self.running[trial.name][1].ask()

    def take_ended(self) -> None:
        for name, (start, process) in list(self.running.items()):
            ended = process.ended()
            if ended is None:
                continue
            del self.running[name]
            self.shared.leave(name)
            out = self.trials[name].config.out
            self.live.forget(out)
            self.stories[name] = story = read_story(out)
            aim = start.needs.goal if start.stop_at is None else start.stop_at
            if ended.failed is not None and not (ended.stopped and self.asked):
                self.fail(name, ended.failed)
            elif story.saved < aim and not self.asked:
                self.fail(name, f"its process ended at step {story.saved} of {aim}")
            elif story.saved >= start.needs.goal:
                self.announce(name, story)

    def fail(self, name: str, reason: str) -> None:
        self.failed[name] = reason
        log = self.log_of(name)
        say(f"{name} failed: {reason}" + (f" (more in {log})" if log.exists() else ""))

    def log_of(self, name: str) -> Path:
        return self.plan.out / LOGS / f"{name}.txt"

    def announce(self, name: str, story: Story) -> None:
        length = story.measured.get(story.saved)
        found = "" if length is None else f": held-out acceptance length {length:.3f}"
        say(f"{name} at step {story.saved} of {self.prospects[name].steps}{found}")

    def refuse_unmeasured(self) -> None:
        """A trial that passed a rung when there was none cannot be compared there."""
        for name in self.prospects:
            story = self.stories[name]
            passed = [r for r in self.rungs if r <= story.saved and r not in story.measured]
            if passed and name not in self.failed:
                self.fail(
                    name,
                    f"its run was not measured at step {passed[0]}, since it was begun without "
                    f"--halving {self.plan.halving}; give another --out, or what it was begun with",
                )

    def stop(self) -> None:
        """Ask all to save and end; no other starts."""
        self.asked = True
        for _, process in self.running.values():
            process.ask()

    def kill(self) -> None:
        for _, process in self.running.values():
            process.kill()

    # --- what it says -----------------------------------------------------------------------------

    def tell(self) -> None:
        """To people, and into sweep.json where something has changed."""
        for message in self.shared.told[self.told :]:
            say(message)
        self.told = len(self.shared.told)
        report = self.report()
        self.show(report)
        unchanged = [
            (row["name"], row["status"], row["acceptance_step"]) for row in report["trials"]
        ]
        if unchanged != self.written:
            write(self.plan.out, report)
            self.written = unchanged

    def report(self) -> dict[str, Any]:
        counts = self.shared.counts()["by_trial"]
        halved = self.standing().halved
        rows = [self.row(trial, counts.get(trial.name, {}), halved) for trial in self.plan.trials]
        return {
            "file": str(self.plan.file),
            "out": str(self.plan.out),
            "cache": self.plan.cache,
            "halving": self.plan.halving,
            "trials": ranked([*rows, *dropped(self.before, self.trials)]),
            **totals(rows),
            "failed": sum(row["status"].startswith("failed") for row in rows),
            "seconds": time.monotonic() - self.moment,
        }

    def row(self, trial: Trial, counted: dict[str, int], halved: dict[str, int]) -> Row:
        read, own = counted.get("read", 0), counted.get("own", 0)
        now = Bytes(read=read + own, taken=counted.get("served", 0) + own)
        found = self.prospects.get(trial.name)
        return row_of(
            trial.name,
            trial.options,
            run=trial.name,
            group=found.group if found else None,
            status=self.status(trial.name, halved),
            story=self.story(trial),
            size=bytes_before(self.before.get(trial.name)) + now,
        )

    def story(self, trial: Trial) -> Story:
        if trial.name in self.running:
            return self.live.read(trial.config.out)
        return self.stories[trial.name]

    def status(self, name: str, halved: dict[str, int]) -> str:
        if name in self.failed:
            return f"failed: {self.failed[name]}"
        if name in self.running:
            return "running"
        saved = self.stories[name].saved
        if saved >= self.prospects[name].steps:
            return "done"
        if name in halved:
            return f"halved at step {halved[name]}"
        return "interrupted" if self.asked and (saved or name in self.begun) else "queued"

    def steps(self) -> int:
        return sum(self.story(trial).step for trial in self.plan.trials)

    def show(self, report: dict[str, Any]) -> None:
        rows = [row for row in report["trials"] if not row.get("dropped")]
        counted = [
            f"{sum(row['status'] == word for row in rows)} {word}"
            for word in ("done", "running", "queued")
        ]
        failed = [f"{report['failed']} failed"] if report["failed"] else []
        read = report["bytes_read"]
        seconds = max(report["seconds"], 1e-9)
        session = self.shared.counts()["bytes_read"]
        words = [", ".join([*counted, *failed])]
        best = rows[0]
        if best["acceptance_length"] is not None:
            words.append(f"best {best['acceptance_length']:.3f} ({best['name']})")
        words.append(f"{session / seconds / 1e9:.2f} GB/s read")
        if read:
            words.append(f"shared {report['bytes_alone'] / read:.1f} times")
        self.bar.set_postfix_str("; ".join(words), refresh=False)
        self.bar.n = self.steps()
        self.bar.refresh()


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
