"""Trackers against metrics.jsonl: the same numbers, each once, and never in the way of training."""

import errno
import inspect
import json
import sqlite3
import struct
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from dflash_cache.errors import ConfigError
from dflash_fit import trackers
from dflash_fit.trackers import open_trackers, require_trackers, scalars

OPTIONS = {"lr": 6e-4, "target_layers": [1, 9], "cache_identity": {"hidden_size": 64}}


def train_line(step: int, *, loss: float) -> dict:
    return {
        "kind": "train",
        "step": step,
        "epoch": 1,
        "lr": 3e-4,
        "loss": loss,
        "slot_accuracy": [0.5, 0.25 / step],
        "gb_per_s_delivered": None,
        "limit": "step",
    }


def eval_line(step: int, *, length: float) -> dict:
    per_position = [0.75, 0.5]
    return {"kind": "eval", "step": step, "acceptance_length": length, "per_position": per_position}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def lines_of(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def append(run: Path, line: dict) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def cut_back(run: Path, step: int | None) -> None:
    """What resuming does to metrics.jsonl."""
    kept = [line for line in lines_of(run) if step is not None and line["step"] <= step]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


def train(run: Path, names: list[str], steps: range, *, after: int | None, salt: float) -> None:
    """As the loop does it: a line of training each step, one of measuring every 20."""
    cut_back(run, after)
    with open_trackers(names, run=run, options=OPTIONS, step=after) as live:
        for step in steps:
            lines = [train_line(step, loss=salt + 1 / step)]
            lines += [eval_line(step, length=salt + 2)] if step % 20 == 0 else []
            for line in lines:
                append(run, line)
                live.log(line)


def numbers_of(line: dict) -> dict[str, float]:
    """Spelt out for the two kinds of lines above."""
    if line["kind"] == "eval":
        return {
            "eval/acceptance_length": line["acceptance_length"],
            "eval/per_position/01": line["per_position"][0],
            "eval/per_position/02": line["per_position"][1],
        }
    return {
        "train/epoch": line["epoch"],
        "train/lr": line["lr"],
        "train/loss": line["loss"],
        "train/slot_accuracy/01": line["slot_accuracy"][0],
        "train/slot_accuracy/02": line["slot_accuracy"][1],
    }


def curves_of(lines: list[dict]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in numbers_of(line).items():
            single = struct.unpack("f", struct.pack("f", value))[0]  # as event files keep it
            curves.setdefault(name, []).append((line["step"], single))
    return curves


def read_frames(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Event files by their definition: frames of protobuf, and a start hides what is behind it."""
    from tensorboardX.proto.event_pb2 import Event

    curves: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((run / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.HasField("session_log"):
                for name, points in curves.items():
                    curves[name] = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def read_with_tensorboard(run: Path) -> dict[str, list[tuple[int, float]]]:
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(run / "tensorboard")).Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
    }


READERS = pytest.mark.parametrize("read", [read_frames, read_with_tensorboard])


@READERS
def test_event_files_hold_the_numbers_of_metrics_jsonl(run, read):
    train(run, ["tensorboard"], range(1, 41), after=None, salt=0.0)
    assert read(run) == curves_of(lines_of(run))


@READERS
def test_points_behind_the_checkpoint_are_gone_once_the_run_is_resumed(run, read):
    train(run, ["tensorboard"], range(1, 41), after=None, salt=0.0)
    train(run, ["tensorboard"], range(21, 31), after=20, salt=5.0)
    found = read(run)
    assert found == curves_of(lines_of(run))
    assert [step for step, _ in found["train/loss"]] == list(range(1, 31))


@READERS
def test_a_run_that_died_before_its_first_checkpoint_begins_anew(run, read):
    train(run, ["tensorboard"], range(1, 21), after=None, salt=0.0)
    train(run, ["tensorboard"], range(1, 22), after=None, salt=5.0)
    assert read(run) == curves_of(lines_of(run))


def test_a_tracker_that_joins_late_is_told_what_went_before(run):
    train(run, [], range(1, 21), after=None, salt=0.0)
    train(run, ["tensorboard"], range(21, 31), after=20, salt=5.0)
    assert read_frames(run) == curves_of(lines_of(run))


def test_lines_that_a_crash_kept_from_a_tracker_follow_when_the_run_goes_on(run):
    train(run, ["tensorboard"], range(1, 31), after=None, salt=0.0)
    append(run, train_line(31, loss=7.0))  # on disk, but killed before anybody was told
    append(run, eval_line(31, length=3.0))
    train(run, ["tensorboard"], range(32, 36), after=31, salt=5.0)
    assert read_frames(run) == curves_of(lines_of(run))


def test_two_starts_within_a_second_write_two_event_files(run):
    train(run, ["tensorboard"], range(1, 3), after=None, salt=0.0)
    train(run, ["tensorboard"], range(3, 5), after=2, salt=0.0)
    assert len(list((run / "tensorboard").iterdir())) == 2
    assert read_frames(run) == curves_of(lines_of(run))


def test_words_and_missing_values_are_no_scalars_and_lists_begin_with_slot_one():
    line = {"kind": "x", "step": 3, "a": True, "b": None, "c": "word", "d": {"e": [7, [8.5]]}}
    assert scalars(line) == {"x/a": 1.0, "x/d/e/01": 7.0, "x/d/e/02/01": 8.5}


# Fakes with the signatures of wandb 0.31 and trackio 0.43; tests at the end compare them with the
# real packages where these are installed.


class FakeWandb(ModuleType):
    """Records runs by id, and their rows as a server would."""

    def __init__(self, *, fail_at: int | None = None, disabled: bool = False) -> None:
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None, origin="fake")
        self.fail_at, self.disabled = fail_at, disabled
        self.logins: list[float | None] = []
        self.inits: list[dict] = []
        self.rows: dict[str, list[dict]] = {}
        self.ends: list[int | None] = []
        self.metrics: list[tuple[str, str | None]] = []

    def login(
        self,
        key=None,
        relogin=None,
        host=None,
        force=None,
        timeout=None,
        verify=False,
        referrer=None,
        prompt=True,
    ) -> bool:
        self.logins.append(timeout)
        return True

    def init(
        self,
        entity=None,
        project=None,
        dir=None,
        id=None,
        name=None,
        config=None,
        allow_val_change=None,
        reinit=None,
        resume=None,
        settings=None,
    ) -> "FakeRun":
        self.inits.append({name: value for name, value in locals().items() if name != "self"})
        return FakeRun(self, self.rows.setdefault(id, []))


class FakeRun:
    def __init__(self, service: FakeWandb, rows: list[dict]) -> None:
        self.service, self.rows, self.disabled = service, rows, service.disabled

    def define_metric(self, name, step_metric=None) -> None:
        self.service.metrics.append((name, step_metric))

    def log(self, data, step=None, commit=None) -> None:
        assert step is None, "a step of wandb's own drops rows that come late"
        if len(self.rows) == self.service.fail_at:
            raise ConnectionError("no route\nto host")
        self.rows.append(data)

    def finish(self, exit_code=None) -> None:
        self.service.ends.append(exit_code)


class FakeTrackio(ModuleType):
    """Prints as the real one does."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.__spec__ = ModuleSpec("trackio", None, origin="fake")
        self.inits: list[dict] = []
        self.rows: dict[str, list[tuple[int | None, dict]]] = {}

    def init(self, project, name=None, config=None, resume="never", embed=True) -> "FakeTrackioRun":
        sys.stdout.write("* Trackio project initialized\n")
        self.inits.append({key: value for key, value in locals().items() if key != "self"})
        return FakeTrackioRun(self.rows.setdefault(name, []))


class FakeTrackioRun:
    def __init__(self, rows: list[tuple[int | None, dict]]) -> None:
        self.rows = rows

    def log(self, metrics, step=None) -> None:
        self.rows.append((step, metrics))

    def finish(self) -> None:
        sys.stdout.write("* Run finished\n")


@pytest.fixture
def wandb(monkeypatch) -> FakeWandb:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def trackio(monkeypatch) -> FakeTrackio:
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def test_wandb_gets_the_numbers_of_metrics_jsonl_and_the_step_as_their_axis(run, wandb):
    train(run, ["wandb"], range(1, 21), after=None, salt=0.0)
    wanted = [{"step": line["step"], **numbers_of(line)} for line in lines_of(run)]
    assert list(wandb.rows.values()) == [wanted]
    assert ("*", "step") in wandb.metrics
    (asked,) = wandb.inits
    assert (asked["project"], asked["name"], asked["config"]) == ("dflash", "run", OPTIONS)


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_without_doubled_points(run, wandb):
    train(run, ["wandb"], range(1, 41), after=None, salt=0.0)
    train(run, ["wandb"], range(21, 51), after=20, salt=0.0)
    (rows,) = wandb.rows.values()
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 51))
    assert [row["step"] for row in rows if "eval/acceptance_length" in row] == [20, 40]
    assert [asked["resume"] for asked in wandb.inits] == ["allow", "allow"]


def test_a_run_that_no_tracker_could_be_opened_for_keeps_its_id(run, wandb, monkeypatch, capsys):
    def refuse(**asked):
        seen.append(asked["id"])
        raise PermissionError("not logged in")

    seen: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", refuse)
        train(run, ["wandb"], range(1, 11), after=None, salt=0.0)
    train(run, ["wandb"], range(11, 21), after=10, salt=0.0)
    assert list(wandb.rows) == seen
    assert [row["step"] for row in wandb.rows[seen[0]] if "train/loss" in row] == [*range(1, 21)]
    assert "PermissionError: not logged in" in capsys.readouterr().err


def test_a_tracker_that_fails_is_told_once_and_the_others_go_on(run, monkeypatch, capsys):
    fake = FakeWandb(fail_at=3)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(run, ["wandb", "tensorboard"], range(1, 31), after=None, salt=0.0)
    told = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    assert len(told) == 1
    assert "--trackers wandb: ConnectionError: no route to host; left out" in told[0]
    assert len(next(iter(fake.rows.values()))) == 3
    assert fake.ends == [1]
    assert read_frames(run) == curves_of(lines_of(run))


def test_a_tracker_that_failed_gets_what_it_lacks_when_the_run_goes_on(run, monkeypatch):
    fake = FakeWandb(fail_at=3)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(run, ["wandb"], range(1, 11), after=None, salt=0.0)
    fake.fail_at = None
    train(run, ["wandb"], range(11, 13), after=10, salt=0.0)
    assert [row["step"] for row in next(iter(fake.rows.values()))] == list(range(1, 13))


def test_a_disk_that_takes_no_event_file_does_not_stop_training(run, capsys):
    (run / "tensorboard").write_text("in the way")
    train(run, ["tensorboard"], range(1, 6), after=None, salt=0.0)
    assert "--trackers tensorboard: FileExistsError" in capsys.readouterr().err


def test_a_tracker_is_closed_where_the_disk_is_too_full_to_remember_it(
    run, wandb, monkeypatch, capsys
):
    real, written = trackers.disk.write_file, []

    def write(path, payload):
        written.append(path)
        if len(written) > 1:  # its id
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, payload)

    monkeypatch.setattr(trackers.disk, "write_file", write)
    train(run, ["wandb"], range(1, 6), after=None, salt=0.0)
    assert (
        "--trackers wandb: OSError: [Errno 28] No space left on device" in capsys.readouterr().err
    )
    assert wandb.ends == [1]


def test_wandb_that_nobody_logged_in_to_is_told(run, monkeypatch, capsys):
    fake = FakeWandb(disabled=True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(run, ["wandb"], range(1, 6), after=None, salt=0.0)
    assert "run `wandb login`" in capsys.readouterr().err
    assert fake.rows.popitem()[1] == []
    assert fake.logins[0] is not None, "a question that nobody answers would wait for ever"


def test_a_tracker_that_hangs_holds_up_neither_a_line_nor_the_end(run, wandb, monkeypatch, capsys):
    free = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **_: free.wait(60) and None)
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    began = time.perf_counter()
    train(run, ["wandb", "tensorboard"], range(1, 201), after=None, salt=0.0)
    seconds = time.perf_counter() - began
    free.set()
    for thread in threading.enumerate():
        if isinstance(thread, trackers.Courier):
            thread.join()  # that of TensorBoard may not have been given the time either
    assert seconds < 10
    assert "--trackers wandb: it is still busy" in capsys.readouterr().err
    assert read_frames(run) == curves_of(lines_of(run))


def test_an_error_of_training_passes_through_and_marks_the_run_as_failed(run, wandb):
    with (
        pytest.raises(ZeroDivisionError),
        open_trackers(["wandb"], run=run, options=OPTIONS, step=None),
    ):
        raise ZeroDivisionError
    train(run, ["wandb"], range(1, 3), after=None, salt=0.0)
    assert wandb.ends == [1, 0]


def test_trackio_resumes_by_a_name_that_no_other_run_has(tmp_path, trackio):
    for place in ("a", "b"):
        (tmp_path / place / "run").mkdir(parents=True)
        train(tmp_path / place / "run", ["trackio"], range(1, 21), after=None, salt=0.0)
    train(tmp_path / "a" / "run", ["trackio"], range(11, 31), after=10, salt=0.0)
    found = [[step for step, row in rows if "train/loss" in row] for rows in trackio.rows.values()]
    assert found == [list(range(1, 31)), list(range(1, 21))]
    assert [asked["resume"] for asked in trackio.inits] == ["allow"] * 3
    first = lines_of(tmp_path / "b" / "run")[0]
    assert list(trackio.rows.values())[1][0] == (1, numbers_of(first))


def test_what_trackio_prints_does_not_mix_with_what_the_command_prints(run, trackio, capsys):
    train(run, ["trackio"], range(1, 3), after=None, salt=0.0)
    sys.stdout.write("{}\n")
    found = capsys.readouterr()
    assert found.out == "{}\n"
    assert "* Trackio project initialized\n* Run finished\n" in found.err


def test_names_that_are_no_tracker_are_refused(run):
    with pytest.raises(ConfigError, match="--trackers mlflow: want some of tensorboard, wandb"):
        open_trackers(["tensorboard", "mlflow"], run=run, options={}, step=None)
    with pytest.raises(ConfigError, match=r"--trackers none: want .* or none alone"):
        require_trackers(["tensorboard", "none"])
    assert list(run.iterdir()) == []


def test_none_is_no_tracker_and_a_name_said_twice_is_one():
    assert require_trackers(["none"]) == ()
    assert require_trackers(["tensorboard", "tensorboard"]) == ("tensorboard",)


def test_a_missing_package_is_told_at_the_start_even_where_a_folder_has_its_name(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(
        trackers.KINDS,
        "wandb",
        trackers.Kind(package="surely_missing", open=trackers.Wandb, forgets=False),
    )
    with pytest.raises(ConfigError, match="`pip install surely_missing`, or leave wandb out"):
        require_trackers(["wandb"])
    (tmp_path / "surely_missing").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="`pip install surely_missing`"):
        require_trackers(["wandb"])


def names_of(function) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


def test_the_real_wandb_takes_what_the_fake_takes():
    real = pytest.importorskip("wandb", reason="wandb is an optional extra")
    assert names_of(FakeWandb.login) <= names_of(real.login)
    assert names_of(FakeWandb.init) <= names_of(real.init)
    run = real.sdk.wandb_run.Run
    for name in ("log", "finish", "define_metric"):
        assert names_of(getattr(FakeRun, name)) <= names_of(getattr(run, name))


def test_the_real_trackio_keeps_every_point_once(run, tmp_path, monkeypatch):
    if "trackio" not in sys.modules:
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    module = pytest.importorskip("trackio", reason="trackio is an optional extra")
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    train(run, ["trackio"], range(1, 41), after=None, salt=0.0)
    train(run, ["trackio"], range(21, 51), after=20, salt=0.0)
    with sqlite3.connect(Path(module.utils.TRACKIO_DIR) / "dflash.db") as database:
        rows = database.execute("select step, metrics from metrics order by step, id").fetchall()
    database.close()
    found = [(step, json.loads(metrics)) for step, metrics in rows]
    assert found == [(line["step"], pytest.approx(numbers_of(line))) for line in lines_of(run)]
