"""What the user reads while states are extracted; a clock that the test turns."""

import shutil
import threading
from pathlib import Path

import pytest

from dflash_cache import progress
from dflash_cache.progress import (
    REDRAW,
    RETELL,
    WINDOW,
    Alone,
    Count,
    Display,
    Meter,
    Speed,
    hours,
    short,
    shown,
    skips_text,
    speeds_text,
    status_text,
    summary_text,
)


class Stream:
    def __init__(self, *, terminal: bool) -> None:
        self.text, self.terminal = "", terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return self.terminal


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, "0"), (999, "999"), (1000, "1.00k"), (45_678, "45.7k"), (123_456, "123k"),
     (1_214_000, "1.21M"), (800e6, "800M"), (2.5e12, "2.50T")],
)  # fmt: skip
def test_numbers_are_told_with_three_digits(number, told):
    assert short(number) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3723, "1:02:03"), (100 * 3600, "100:00:00")],
)
def test_times_are_told_in_hours(seconds, told):
    assert hours(seconds) == told


def test_speeds_are_those_of_the_last_seconds():
    meter = Meter(0.0)
    for second in range(1, 101):  # 100 tok/s for 50 s, then 10
        tokens = 100 * min(second, 50) + 10 * max(0, second - 50)
        speed = meter.note(float(second), {0: Count(tokens=tokens, bytes=7 * tokens)})
    assert speed.tokens == pytest.approx(10)
    assert speed.bytes == pytest.approx(70)
    assert len(meter.noted) <= WINDOW + 2


def test_a_worker_whose_work_is_lost_has_no_speed_below_nothing():
    meter = Meter(0.0)
    meter.note(1.0, {0: Count(tokens=100), 1: Count(tokens=100)})
    meter.note(40.0, {0: Count(tokens=100), 1: Count(tokens=100)})
    speed = meter.note(41.0, {0: Count(tokens=200), 1: Count(tokens=40)})
    assert speed.workers == {0: pytest.approx(100 / 40)}
    assert speed.tokens == pytest.approx(100 / 40)


def test_speeds_stand_by_worker_and_as_a_range_where_there_are_many():
    one = Speed(tokens=9050.4, bytes=0, workers={0: 9050.4})
    assert speeds_text(one) == "9,050 tok/s"
    two = Speed(tokens=9000, bytes=0, workers={1: 4400, 0: 4600})
    assert speeds_text(two) == "9,000 tok/s (w0 4,600 w1 4,400)"
    many = Speed(tokens=16000, bytes=0, workers={i: 900 + 10 * i for i in range(16)})
    assert speeds_text(many) == "16,000 tok/s (16 workers, 900 to 1,050 each)"


def test_the_status_tells_speed_disk_and_time_left():
    speed = Speed(tokens=9000, bytes=0.4608e9, workers={0: 9000})
    told = status_text(speed, left=9000 * 3723, free=812_000_000_000)
    assert told == "9,000 tok/s, 0.461 GB/s, 812 GB free, 1:02:03 left"
    nothing = Speed(tokens=0, bytes=0, workers={})
    assert status_text(nothing, left=5, free=10**9) == "0 tok/s, 1 GB free, no speed yet"


def test_the_summary_tells_all_that_was_done():
    told = summary_text(Count(tokens=2_800_000, bytes=143_400_000_000), 310.0)
    assert told == (
        "extracted 2,800,000 tokens in 310.0 s: 9,032 tok/s; 143.400 GB written, 0.463 GB/s"
    )


def test_skips_are_told_most_frequent_first():
    told = skips_text({"longer than 512 tokens": 2, "no messages": 1200, "empty": 2})
    assert told == "1,204 rows skipped: 1,200 no messages; 2 empty; 2 longer than 512 tokens"


def test_without_a_terminal_there_is_a_plain_line_now_and_then(tmp_path):
    stream, clock = Stream(terminal=False), Clock()
    display = Display(tmp_path / "not-there-yet", total=4000, done=1000, stream=stream, clock=clock)
    for second in range(100):
        clock.now = 50.0 + second
        display.show({0: Count(tokens=10 * second)})
    lines = stream.text.splitlines()
    assert len(lines) == 99 // RETELL
    # What was there before is no speed of this run.
    assert lines[0].startswith("extract 32%: 1.30k of 4.00k tokens, 10 tok/s, ")
    assert lines[0].endswith(" left")
    display.close()
    assert stream.text.splitlines()[-1].startswith("extracted 990 tokens in 99.0 s: 10 tok/s;")


def test_at_a_terminal_one_line_is_drawn_again(tmp_path):
    stream, clock = Stream(terminal=True), Clock()
    display = Display(tmp_path, total=1000, done=0, stream=stream, clock=clock)
    for step in range(1, 5):
        clock.now += REDRAW
        display.show({0: Count(tokens=100 * step), 3: Count(tokens=50 * step)})
    display.tell("worker 1 died (signal 9)")
    display.close()
    assert "extract  60%|" in stream.text
    assert "600 of 1.00k tokens, 300 tok/s (w0 200 w3 100), " in stream.text
    assert "worker 1 died (signal 9)\n" in stream.text
    assert stream.text.rstrip().endswith("GB/s")
    assert "extracted 600 tokens in 2.0 s: 300 tok/s" in stream.text


def test_work_that_was_done_twice_is_not_more_than_all(tmp_path):
    stream, clock = Stream(terminal=False), Clock()
    display = Display(tmp_path, total=100, done=50, stream=stream, clock=clock)
    clock.now += RETELL
    display.show({0: Count(tokens=70)})
    assert "extract 100%: 100 of 100 tokens" in stream.text


def test_loading_the_target_is_no_time_of_the_extraction(tmp_path):
    stream, clock = Stream(terminal=False), Clock()
    display = Display(tmp_path, total=100, done=0, stream=stream, clock=clock)
    clock.now += 600
    alone = Alone(display)
    clock.now += 2
    alone.update(100)
    display.close()
    assert "in 2.0 s: 50 tok/s" in stream.text


def test_threads_may_count_at_once(tmp_path):
    display = Display(tmp_path, total=10**6, done=0, stream=Stream(terminal=False))
    alone = Alone(display)

    def count() -> None:
        for _ in range(1000):
            alone.update(3)
            alone.wrote(5)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone.count == Count(tokens=12_000, bytes=20_000)


def test_skips_are_told_once_and_a_run_without_work_has_no_summary(tmp_path: Path, capsys):
    with shown(tmp_path, total=10, done=10, skipped={"no messages": 3}):
        pass
    assert capsys.readouterr().err == "3 rows skipped: 3 no messages\n"


# --- what stands still ----------------------------------------------------------------------------


def test_a_build_that_stands_still_says_so_and_keeps_the_speed_that_it_had(tmp_path):
    stream, clock = Stream(terminal=False), Clock()
    display = Display(tmp_path, total=4000, done=0, stream=stream, clock=clock)
    display.refresh()
    alone = Alone(display)
    for second in range(60):
        clock.now = 51.0 + second
        alone.update(10)
    for _ in range(10):
        clock.now += RETELL
        display.refresh()
    lines = stream.text.splitlines()
    assert "10 tok/s" in lines[0]
    assert not any("no token" in line for line in lines[:2])
    assert lines[-1].endswith(
        "10 tok/s, " + lines[0].split(", ")[2] + ", 0:05:40 left, no token for 0:05:00"
    )
    alone.update(3400)
    clock.now += RETELL
    display.refresh()
    assert stream.text.splitlines()[-1].startswith(
        "extract 100%: 4.00k of 4.00k tokens, 10 tok/s, "
    )


def test_a_first_batch_that_never_ends_shows_too_and_loading_before_it_does_not(tmp_path):
    stream, clock = Stream(terminal=False), Clock()
    display = Display(tmp_path, total=4000, done=0, stream=stream, clock=clock)
    for _ in range(5):
        clock.now += RETELL
        display.refresh()
    assert stream.text == ""
    Alone(display)
    clock.now += RETELL
    display.refresh()
    assert stream.text.rstrip().endswith("no speed yet")


def test_it_is_drawn_by_a_thread_while_nobody_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "REDRAW", 0.001)
    drawn = threading.Event()
    monkeypatch.setattr(Display, "refresh", lambda self: drawn.set())
    with shown(tmp_path, total=10, done=0):
        assert drawn.wait(60)


def test_a_terminal_that_is_gone_does_not_end_the_work(tmp_path, monkeypatch):
    """As behind `| head`: what is drawn, refreshed and summed up is lost, and nothing else."""
    stream, clock = Stream(terminal=False), Clock()
    display = Display(tmp_path, total=1000, done=0, stream=stream, clock=clock)
    alone, tried = Alone(display), []

    def gone(text: str) -> None:
        tried.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(stream, "write", gone)
    for step in (lambda: alone.update(100), display.refresh, display.close):
        clock.now += RETELL
        before = len(tried)
        step()
        assert len(tried) > before
    assert display.counts[0].tokens == 100


def test_a_disk_that_no_longer_answers_does_not_silence_the_display(tmp_path, monkeypatch):
    stream, clock, answers = Stream(terminal=False), Clock(), threading.Event()
    display = Display(tmp_path, total=1000, done=0, stream=stream, clock=clock)
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda disk: answers.wait(60) and usage(disk))
    for step in range(1, 4):
        clock.now += RETELL
        display.show({0: Count(tokens=100 * step)})
    assert [" GB free, " in line for line in stream.text.splitlines()] == [True] * 3
    answers.set()
    display.free.thread.join()
