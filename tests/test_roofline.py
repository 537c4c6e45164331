"""Who limits whom, from numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_fit.roofline import Counts, Gauge, Reading, anchors_that_hide_reading, read_gauge

GB = 10**9


def reading(**changes) -> Reading:
    values = {
        "seconds": 10.0,
        "gb_per_s_needed": 0.48,
        "gb_per_s_delivered": 1.7,
        "waiting": 0.0,
        "reader_busy": 0.3,
    }
    return Reading(**{**values, **changes})


def test_needed_counts_only_the_time_in_which_no_step_waited():
    counts = Counts(idle=6.0, delivered=8 * GB, read=9 * GB, read_seconds=9.0)
    found = read_gauge(counts, seconds=10.0)
    assert found.gb_per_s_needed == pytest.approx(2.0)
    assert found.gb_per_s_delivered == pytest.approx(1.0)
    assert found.waiting == pytest.approx(0.6)
    assert found.reader_busy == pytest.approx(0.9)


def test_a_reader_that_read_nothing_has_no_rate():
    found = read_gauge(Counts(delivered=GB), seconds=1.0)
    assert found.gb_per_s_delivered is None
    assert found.words == "the step takes 1.00 GB/s, already read: the step limits"


def test_shares_stay_shares_when_a_pack_was_begun_before_the_interval():
    found = read_gauge(Counts(idle=2.0, read=GB, read_seconds=5.0), seconds=1.0)
    assert (found.waiting, found.reader_busy) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("waiting", "reader_busy", "limit"),
    [
        (0.0, 1.0, "step"),
        (0.05, 1.0, "step"),
        (0.06, 0.9, "reader"),
        (0.06, 0.2, "handover"),
    ],
)
def test_a_step_that_waits_is_limited_by_a_reader_that_is_busy(waiting, reader_busy, limit):
    assert reading(waiting=waiting, reader_busy=reader_busy).limit == limit


def test_words_say_who_limits_and_what_to_do():
    assert reading().words == "reader 0.48 of 1.70 GB/s: the step limits"
    slow = reading(
        gb_per_s_needed=0.96, gb_per_s_delivered=0.31, waiting=0.68, reader_busy=1.0
    ).words
    assert slow == (
        "disk delivers 0.31 GB/s, the step could take 0.96: the reader limits (waiting 68%); try "
        "--passes-per-pack, more --anchors, or an 8-bit encoding"
    )
    neither = reading(waiting=0.3, reader_busy=0.2).words
    assert neither == (
        "waiting 30% though the reader is busy only 20%: the host or the copy to the device limits"
    )


def test_a_step_that_lives_on_what_was_read_ahead_is_not_said_to_have_a_quicker_reader():
    assert reading(gb_per_s_needed=1.5, gb_per_s_delivered=1.0, reader_busy=1.0).words == (
        "the step takes 1.50 GB/s of packs read ahead, the reader gives 1.00: the step limits "
        "until they are used up"
    )


@given(
    seconds=st.floats(1e-3, 100),
    idle=st.floats(0, 100),
    delivered=st.integers(0, 10**12),
    read=st.integers(0, 10**12),
    read_seconds=st.floats(0, 100),
)
def test_words_agree_with_their_numbers(seconds, idle, delivered, read, read_seconds):
    counts = Counts(idle=idle, delivered=delivered, read=read, read_seconds=read_seconds)
    found = read_gauge(counts, seconds=seconds)
    assert f"the {found.limit} limits" in found.words or found.limit == "handover"
    assert found.words.startswith("waiting") == (found.limit == "handover")
    if found.words.startswith("reader"):
        assert found.gb_per_s_needed <= found.gb_per_s_delivered
    if "disk delivers" in found.words:
        assert found.reader_busy >= 0.5
        assert found.gb_per_s_delivered is not None


def test_small_rates_keep_two_digits():
    assert (
        "reader 0.00012 of 0.0034 GB/s"
        in reading(gb_per_s_needed=0.000123, gb_per_s_delivered=0.0034).words
    )


def test_a_line_of_metrics_has_the_reading_and_its_verdict():
    assert reading().to_dict() == {
        "gb_per_s_needed": 0.48,
        "gb_per_s_delivered": 1.7,
        "waiting": 0.0,
        "reader_busy": 0.3,
        "limit": "step",
    }


class CountedFeed:
    def __init__(self) -> None:
        self.now = Counts()

    def counts(self) -> Counts:
        return self.now


def test_a_gauge_reads_what_came_since_its_last_reading():
    feed, times = CountedFeed(), iter([0.0, 2.0, 6.0, 10.0])
    gauge = Gauge(feed, clock=lambda: next(times))
    feed.now = Counts(delivered=2 * GB, read=4 * GB, read_seconds=1.0)
    first = gauge.read()
    assert (first.seconds, first.gb_per_s_needed, first.gb_per_s_delivered) == (2.0, 1.0, 4.0)
    feed.now = Counts(delivered=4 * GB, read=5 * GB, read_seconds=2.0)
    gauge.restart()
    feed.now = Counts(delivered=8 * GB, read=7 * GB, read_seconds=4.0, idle=2.0, waited=1.0)
    second = gauge.read()
    assert (second.seconds, second.gb_per_s_needed, second.gb_per_s_delivered) == (4.0, 2.0, 1.0)


def test_the_fewest_anchors_that_hide_a_read_are_chosen():
    def found(**changes) -> int:
        options = {"multiple": 256, "most": 8192, "margin": 1.0, **changes}
        return anchors_that_hide_reading(1.5, 0.1, 0.0004, **options)

    assert found() == 3584  # 0.1 + 3500 * 0.0004 = 1.5; the next multiple
    assert found(multiple=500) == 3500  # exactly long enough
    assert found(margin=1.1) == 4096
    assert found(passes=2) == 1792
    assert found(most=2000) == 1792  # not enough, but no more are allowed
    assert found(passes=100) == 256


@given(
    read=st.floats(0, 100),
    fixed=st.floats(0, 10),
    each=st.floats(1e-6, 0.1),
    multiple=st.integers(1, 512),
    groups=st.integers(1, 64),
    passes=st.integers(1, 8),
)
def test_the_chosen_anchors_hide_the_read_and_one_group_fewer_would_not(
    read, fixed, each, multiple, groups, passes
):
    most = multiple * groups
    anchors = anchors_that_hide_reading(
        read, fixed, each, multiple=multiple, most=most, passes=passes
    )
    wanted = 1.05 * read / passes
    assert anchors % multiple == 0
    assert multiple <= anchors <= most
    if anchors < most:
        assert fixed + each * anchors >= wanted - 1e-6 * (1 + each * multiple)
    if anchors > multiple:
        assert fixed + each * (anchors - multiple) < wanted
