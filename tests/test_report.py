"""The page about runs: what it says, what it withstands, and how it looks in a real browser."""

import json
import math
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from browser import NAMES, Page, find_chromium, open_page
from report_runs import made_up_run, made_up_sweep, write_lines

from dflash_cache.errors import ConfigError
from dflash_fit import report, report_look
from dflash_fit.chart_rows import every_nth, thinned
from dflash_fit.charts import draw
from dflash_fit.errors import FitError, RunFolderError
from dflash_fit.option_charts import option_rows, path_rows, positions, tick_rows
from dflash_fit.report import ReportConfig, write_report
from dflash_fit.report_words import duration, short, size
from dflash_fit.runs import differing_options, find_standings, short_names

EMPTY = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


class Elements(HTMLParser):
    """What a browser would find: elements in order, words that people see, and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.words += f" {data}"

    @property
    def told(self) -> str:
        return " ".join(self.words.split())

    @property
    def payload(self) -> dict:
        return json.loads(self.scripts[0])


@pytest.fixture
def plain_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says needs no charting library, which takes seconds to come."""
    fake = SimpleNamespace(javascript_bundle=lambda: "window.vegaEmbed = null")
    monkeypatch.setattr(report, "charting", lambda: fake)


def page_of(*runs: Path) -> Elements:
    standings = find_standings(runs)
    return Elements(report.page(standings, draw(standings)))


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("plain_library")
def test_a_run_that_was_really_trained_gives_a_page_with_its_numbers(tiny_cache, tmp_path):
    from test_loop import tiny_fit

    from dflash_fit import loop

    summary = loop.fit(tiny_fit(tiny_cache, tmp_path / "run", max_steps=6, eval_every=3))
    told = page_of(tmp_path / "run")
    evals = [line for line in lines_of(tmp_path / "run") if line["kind"] == "eval"]
    rows = told.payload["rows"]
    assert [row["step"] for row in rows["eval"]] == [0, 3, 6]
    assert [row["length"] for row in rows["eval"]] == pytest.approx(
        [line["acceptance_length"] for line in evals], rel=1e-5
    )
    assert f"{summary['acceptance_length']:.2f}" in told.told
    assert f"Steps {6} of {6}" in told.told
    assert "2 layers, block of 4" in told.told
    # The cache is still there: its seal knows more than the run wrote down.
    manifest = json.loads((tiny_cache / "manifest.json").read_text())
    assert f"{manifest['supervised_tokens'] / manifest['tokens']:.0%} supervised" in told.told
    assert manifest["fingerprint"] in told.told
    assert "not to be read" not in told.told


def test_tokens_hours_and_bytes_add_up_what_the_log_lines_say(tmp_path):
    run = made_up_run(tmp_path / "run", steps=200, planned=200, eval_every=100, log_every=50)
    (standing,) = find_standings([run])
    train = [line for line in lines_of(run) if line["kind"] == "train"]
    evals = [line for line in lines_of(run) if line["kind"] == "eval"]
    seconds = [line["tokens"] / line["tokens_per_s"] for line in train]
    gigabytes = [
        line["gb_per_s_delivered"] * line["reader_busy"] * s
        for line, s in zip(train, seconds, strict=True)
    ]
    assert standing.tokens == sum(line["tokens"] for line in train)
    spent = sum(seconds) + sum(line["seconds"] for line in evals)
    assert standing.hours == pytest.approx(spent / 3600)
    assert standing.gb_read == pytest.approx(sum(gigabytes))


@pytest.mark.parametrize(("lines", "most"), [(1, 4), (7, 4), (8, 4), (1000, 60)])
def test_thinned_curves_keep_the_last_place_and_the_mean(lines, most):
    values = [math.sin(i) + 2 for i in range(lines)]
    told = [
        {"step": i, "tokens_seen": 10.0 * i, "hours": float(i), "loss": value}
        for i, value in enumerate(values)
    ]
    rows = thinned(told, most=most)
    size = math.ceil(lines / most)
    assert len(rows) <= most
    assert rows[-1]["step"] == lines - 1
    for place, row in enumerate(rows):
        own = values[place * size : (place + 1) * size]
        assert row["loss"] == pytest.approx(sum(own) / len(own), rel=1e-5)


def test_a_loss_that_is_no_number_leaves_a_gap_and_not_a_broken_page(tmp_path):
    run = made_up_run(tmp_path / "run", steps=100, planned=100)
    lines = lines_of(run)
    bad = [line for line in lines if line["kind"] == "train"][3]
    bad["loss"] = math.nan
    write_lines(run, lines)
    drawing = draw(find_standings([run]))
    (gap,) = [row for row in drawing.rows["train"] if "loss" not in row]
    assert gap["step"] == bad["step"]
    assert "NaN" not in report.json_in_html(drawing.rows)


def without_fields(run: Path, *names: str) -> None:
    write_lines(run, [{k: v for k, v in x.items() if k not in names} for x in lines_of(run)])


def cut(run: Path) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')


DAMAGES = {
    "nothing logged yet": lambda run: (run / "metrics.jsonl").unlink(),
    "one line": lambda run: write_lines(run, lines_of(run)[1:2]),
    "only the first measurement": lambda run: write_lines(run, lines_of(run)[:1]),
    "never measured": lambda run: write_lines(
        run, [line for line in lines_of(run) if line["kind"] == "train"]
    ),
    "cut in a line": cut,
    "no JSON at all": lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\x00\n[]\n7\nnull\n"),
    "older: no roofline, no plan, no error": lambda run: without_fields(
        run,
        *("gb_per_s_needed", "gb_per_s_delivered", "waiting", "reader_busy", "limit", "steps"),
        *("acceptance_error", "memory_gb", "slot_accuracy", "tokens_per_s", "per_position"),
    ),
    "other types": lambda run: write_lines(
        run, [{**line, "per_position": 3, "lr": "x", "limit": 4} for line in lines_of(run)]
    ),
    "no options": lambda run: (run / "config.json").unlink(),
    "no checkpoint": lambda run: shutil.rmtree(run / "checkpoints"),
}


@pytest.mark.usefixtures("plain_library")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("beside", [False, True])
def test_a_run_in_any_state_gives_a_page(tmp_path, damage, beside):
    run = made_up_run(tmp_path / "hurt", steps=300, planned=300, eval_every=100)
    DAMAGES[damage](run)
    others = [made_up_run(tmp_path / "whole", steps=300, planned=300, lr=1e-3)] if beside else []
    told = page_of(run, *others)
    assert "hurt" in told.told
    assert told.open == []  # every element is closed
    if damage == "cut in a line":
        assert "1 line could not be read" in told.told


@pytest.mark.usefixtures("plain_library")
def test_what_a_run_says_never_becomes_a_part_of_the_page(tmp_path):
    evil = "<img src=x onerror=alert(1)>\"'&{{ 7*7 }}"
    ends = "</script><script>alert(1)</script>"
    runs = [
        made_up_run(tmp_path / evil, steps=60, planned=60, eval_every=20, loss=ends, lr=1e-3),
        made_up_run(tmp_path / "good", steps=60, planned=60, eval_every=20, **{evil: ends}),
        made_up_run(tmp_path / "third", steps=60, planned=60, eval_every=20, **{evil: 3}),
    ]
    told = page_of(*runs)
    assert evil in told.words
    assert ends in told.words
    assert "img" not in told.names
    assert told.names.count("script") == 3
    assert told.payload["rows"]["options"]


@pytest.mark.parametrize("kind", ["absent", "empty", "drafter", "file"])
def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path, kind):
    place = tmp_path / kind
    if kind == "file":
        place.write_text("x")
    elif kind != "absent":
        place.mkdir()
    if kind == "drafter":
        (place / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    with pytest.raises(RunFolderError, match=f"{kind}: (no such folder|neither a run)"):
        find_standings([place])


@pytest.mark.parametrize(
    ("out", "png", "told"),
    [
        (".", False, "want a file"),
        ("absent/page.html", False, "want a file"),
        ("page.png", True, "the picture's name"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, out, png, told):
    with pytest.raises(ConfigError, match=told):
        ReportConfig(runs=(tmp_path,), out=tmp_path / out, png=png)


def test_without_the_charting_library_one_error_says_what_to_install(tmp_path, monkeypatch):
    run = made_up_run(tmp_path / "run", steps=20, planned=20)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(FitError, match=r"pip install 'dflash-toolkit\[report\]'"):
        write_report(ReportConfig(runs=(run,), out=tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


@pytest.mark.usefixtures("plain_library")
def test_a_sweep_counts_with_what_its_table_says_and_its_failures(tmp_path):
    sweep = made_up_sweep(tmp_path / "sweep", 5)
    standings = find_standings([sweep])
    lengths = [one.acceptance for one in standings]
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert [one.status for one in standings] == [*["finished"] * 4, "failed"]
    assert standings[0].hours == 1.2
    assert standings[0].gb_read == 61.5 / 5
    told = page_of(sweep).told
    assert "too-large: out of memory: 141.2 GB wanted" in told
    # A sweep that was moved, or a run named twice, still counts once.
    moved = sweep.rename(tmp_path / "moved")
    assert len(find_standings([moved, moved / "trial-00"])) == 5


def test_trials_of_two_sweeps_that_share_their_names_are_told_apart(tmp_path):
    sweeps = [made_up_sweep(tmp_path / name, 3) for name in ("old", "new")]
    names = [one.name for one in find_standings(sweeps)]
    assert sorted(names) == [
        *("new/too-large", "new/trial-00", "new/trial-01"),
        *("old/too-large", "old/trial-00", "old/trial-01"),
    ]


def test_a_trial_of_a_killed_sweep_does_not_run_for_ever(tmp_path):
    sweep = made_up_sweep(tmp_path / "sweep", 2)
    shutil.rmtree(sweep / "trial-00")
    run = made_up_run(sweep / "trial-00", steps=20, planned=30)
    told = json.loads((sweep / "sweep.json").read_text())
    told["trials"][0]["status"] = "running"
    (sweep / "sweep.json").write_text(json.dumps(told))
    written = (run / "metrics.jsonl").stat().st_mtime
    for age, status in ((5, "running"), (1e6, "stopped")):
        assert find_standings([sweep], now=written + age)[0].status == status


def test_only_what_two_runs_have_unlike_counts_as_a_difference(tmp_path):
    runs = [
        made_up_run(tmp_path / "a", steps=20, planned=20, lr=1e-3, log_every=10),
        made_up_run(tmp_path / "b", steps=20, planned=20, lr=1e-4, log_every=5),
    ]
    older = json.loads((runs[1] / "config.json").read_text())
    del older["slot_weights"]  # was no option then
    (runs[1] / "config.json").write_text(json.dumps({**older, "cache": "/elsewhere"}))
    standings = find_standings(runs)
    assert differing_options(standings) == ["lr", "log_every"]
    # Only what may change what is learnt is drawn.
    assert {row["option"] for row in option_rows(standings)} == {"lr"}


def test_places_on_an_axis_follow_the_size_of_numbers_and_the_order_of_words():
    assert positions([2, 4, 3]) == pytest.approx([0, 1, 0.5])
    assert positions([1e-4, 1e-2, 1e-3]) == pytest.approx([0, 1, 0.5])  # logarithmic
    assert positions(["dpace", "decay", None]) == pytest.approx([1, 0, 0.5])  # default
    assert positions([7]) == [0]


def test_parallel_coordinates_need_two_options_and_three_runs(tmp_path):
    changes = [{"lr": 1e-4}, {"lr": 1e-3, "num_layers": 3}, {"lr": 3e-3, "num_layers": 7}]
    runs = [
        made_up_run(tmp_path / f"r{i}", steps=60, planned=60, eval_every=20, **some)
        for i, some in enumerate(changes)
    ]
    assert path_rows(find_standings(runs[:2])) == []
    paths = path_rows(find_standings(runs))
    assert len(paths) == 3 * 3  # runs, two options and the acceptance length
    ticks = [row["label"] for row in tick_rows(paths) if row["option"] == "num_layers"]
    assert ticks == ["3", "5", "7"]


@pytest.mark.parametrize(
    ("steps", "planned", "age", "status"),
    [(30, 30, 1e6, "finished"), (20, 30, 5, "running"), (20, 30, 1e6, "stopped"),
     (20, None, 5, "running"), (20, None, 1e6, "ended")],
)  # fmt: skip
def test_the_state_of_a_run_follows_from_its_plan_and_its_newest_line(
    tmp_path, steps, planned, age, status
):
    run = made_up_run(tmp_path / "run", steps=steps, planned=planned or 30)
    if planned is None:
        without_fields(run, "steps")
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "max_steps": None}))
    now = time.time()
    os.utime(run / "metrics.jsonl", (now - age, now - age))
    (standing,) = find_standings([run], now=now)
    assert standing.status == status


def test_runs_of_one_name_are_told_apart_by_their_folders():
    a, b, c = Path("/x/one/run"), Path("/x/two/run"), Path("/x/two/other")
    assert short_names([a, c]) == {a: "run", c: "other"}
    assert short_names([a, b, c]) == {a: "one/run", b: "two/run", c: "two/other"}


def test_numbers_are_spoken_with_three_digits_and_their_unit():
    assert [short(n) for n in (0, 12, 999.6, 147_456_000, 1.73e9)] == [
        *("0", "12", "1 k", "147 M", "1.73 B")
    ]
    assert [size(n) for n in (0.0125, 88.24, 3760)] == ["12.5 MB", "88.2 GB", "3.76 TB"]
    assert [duration(h) for h in (0.002, 0.5, 1.25, 300)] == ["7 s", "30 min", "1.2 h", "300 h"]


def test_a_measurement_on_a_part_of_the_held_out_samples_is_never_the_best(tmp_path):
    run = made_up_run(tmp_path / "run", steps=200, planned=200, eval_every=100)
    lines = lines_of(run)
    lines[0] |= {"acceptance_length": 9.0, "complete": False}
    write_lines(
        run, [line | {"complete": True} if line is not lines[0] else line for line in lines]
    )
    (standing,) = find_standings([run])
    assert standing.acceptance == max(
        line["acceptance_length"] for line in lines[1:] if line["kind"] == "eval"
    )


def test_thinned_measurements_keep_the_first_and_the_last():
    assert every_nth(list(range(5)), most=5) == [0, 1, 2, 3, 4]
    assert every_nth(list(range(100)), most=4) == [0, 33, 66, 99]


def test_the_picture_holds_every_chart(tmp_path):
    runs = [
        made_up_run(tmp_path / f"r{i}", steps=60, planned=60, eval_every=20, lr=lr, num_layers=i)
        for i, lr in enumerate((1e-4, 1e-3, 3e-3), start=3)
    ]
    told = write_report(ReportConfig(runs=tuple(runs), out=tmp_path / "page.html", png=True))
    payload = (tmp_path / "page.png").read_bytes()
    assert told["picture"] == str(tmp_path / "page.png")
    assert payload.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", payload[16:24])
    rows = math.ceil(len(draw(find_standings(runs)).charts) / 3)
    assert width > 2 * 3 * 430
    assert height > 2 * rows * 150


# -- in a browser ----------------------------------------------------------------------------------

needs_chromium = pytest.mark.skipif(
    find_chromium() is None,
    reason=f"needs a browser ({', '.join(NAMES)}): apt-get install chromium",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a single run and of four, with names that try to get out."""
    folder = tmp_path_factory.mktemp("pages")
    names = ["base", "a-very-long-name-" * 4, "<b>bold", "last"]
    runs = [
        made_up_run(
            folder / "runs" / name,
            seed=i,
            steps=400,
            planned=400,
            eval_every=100,
            lr=[1e-4, 6e-4, 1e-3, 3e-3][i],
            num_layers=3 + i,
            block_size=[8, 16][i % 2],
        )
        for i, name in enumerate(names)
    ]
    for name, some in {"one": runs[:1], "four": runs}.items():
        write_report(ReportConfig(runs=tuple(some), out=folder / f"{name}.html"))
    return {"one": folder / "one.html", "four": folder / "four.html"}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


def shown(tab: Page, page: Path, *, width: int, dark: bool = False) -> None:
    tab.requests.clear()
    tab.complaints.clear()
    tab.show(page.as_uri(), width=width, dark=dark)
    tab.wait_for("document.documentElement.dataset.drawn")


@needs_chromium
@pytest.mark.parametrize(
    ("which", "width", "dark"),
    [("one", 1400, False), ("one", 390, True), ("four", 1400, True), ("four", 390, False)],
)
def test_the_page_stands_in_a_browser(written, tab, which, width, dark):
    page = written[which]
    shown(tab, page, width=width, dark=dark)
    charts = Elements(page.read_text()).payload["charts"]
    drawn = tab.value(
        "[...document.querySelectorAll('.draw')].map(place => ({key: place.id.slice(6), "
        "marks: place.querySelectorAll(':is(.mark-line, .mark-symbol, .mark-rect) path').length, "
        "width: place.querySelector('svg')?.getBoundingClientRect().width}))"
    )
    assert [one["key"] for one in drawn] == [chart["key"] for chart in charts]
    assert len(drawn) >= 10
    for one in drawn:
        assert one["marks"] > 0, one
        assert 200 < one["width"] <= width, one
    assert tab.value("document.documentElement.scrollWidth") <= width
    hangs_out = (
        "[...document.body.querySelectorAll('*')].filter(x => "
        "x.getBoundingClientRect().right > innerWidth + 1).map(x => x.outerHTML.slice(0, 80))"
    )
    assert tab.value(hangs_out) == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [page.as_uri()]
    assert tab.complaints == []
    ground = tab.value("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, ground[4:-1].split(","))) / 3
    assert (brightness < 128) == dark


@needs_chromium
def test_curves_turn_to_tokens_and_hours_and_to_the_run_that_is_chosen(written, tab):
    shown(tab, written["four"], width=1400)
    labels = (
        "[...document.querySelectorAll('#chart-loss .role-axis-label text')]"
        ".map(label => label.textContent)"
    )
    before = tab.value(labels)
    assert "400" in before
    tab.value("document.querySelector('input[value=tokens]').click()")
    tab.wait_for(f"{labels}.some(word => word.endsWith('M'))")
    tab.value("document.querySelector('input[value=step]').click()")
    tab.wait_for(
        f"JSON.stringify({labels}) === {json.dumps(json.dumps(before, separators=(',', ':')))}"
    )
    line = "document.querySelector('#chart-norm .mark-line path').getAttribute('d')"
    first = tab.value(line)
    tab.value(
        "(() => { const chosen = document.getElementById('chosen'); chosen.value = '2'; "
        "chosen.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    tab.wait_for(f"{line} !== {json.dumps(first)}")
    assert tab.complaints == []


@needs_chromium
def test_a_point_says_which_run_it_is_in_words_alone(written, tab):
    shown(tab, written["four"], width=1400)
    standings = find_standings([written["four"].parent / "runs"])
    place = next(i for i, one in enumerate(standings) if one.name == "<b>bold")
    per_run = len(standings[place].run.evals)
    tab.value("document.querySelector('#chart-length').scrollIntoView()")
    # The last measurement of that run: the curves are apart there.
    x, y = tab.value(
        "(() => { const marks = [...document.querySelectorAll('#chart-length .mark-symbol')];"
        f"const point = marks.at(-1).querySelectorAll('path')[{(place + 1) * per_run - 1}];"
        "const box = point.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    tab.move_to(x - 1, y)
    tab.move_to(x, y)
    tip = "document.querySelector('#vg-tooltip-element.visible')"
    tab.wait_for(f"{tip} !== null")
    told = tab.value(f"{tip}.textContent")
    assert "<b>bold" in told
    assert f"{standings[place].run.evals[-1]['acceptance_length']:.3f}" in told
    assert tab.value(f"{tip}.querySelector('b')") is None


@needs_chromium
def test_the_page_forbids_scripts_and_requests_of_others(written, tab):
    shown(tab, written["one"], width=1400)
    tab.value(
        "(() => { const script = document.createElement('script'); "
        "script.textContent = 'window.intruder = 1'; document.body.append(script); "
        "const image = new Image(); image.src = 'https://example.invalid/x.png'; })()"
    )
    assert tab.value("window.intruder === undefined")
    assert tab.value("fetch('https://example.invalid/').then(() => false, () => true)")
    assert len(tab.complaints) >= 3


def test_colours_of_night_are_those_of_day_by_name():
    style = report_look.page_file("report.css")
    day, night = (
        set(part.split("{", 1)[1].split("}", 1)[0].replace(";", "\n").split("\n"))
        for part in (style.split("@media")[0].split(":root")[1], style.split(":root")[2])
    )
    names = [
        {x.split(":")[0].strip() for x in some if x.strip().startswith("--")}
        for some in (day, night)
    ]
    assert names[0] == names[1]
