"""The charts of a report: which there are, and what each of them shows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_fit.chart_parts import (
    ALONG,
    AXIS,
    BEST,
    CHOSEN,
    FROM_ZERO,
    HUE,
    NAME,
    WHERE,
    Chart,
    Spec,
    X,
    hint,
    near_points,
    only,
    run_lines,
    y,
)
from dflash_fit.chart_rows import LIMITS, Row, having, rows_of
from dflash_fit.option_charts import option_charts, option_rows, path_rows, tick_rows
from dflash_fit.runs import Standing

Rows = Mapping[str, Sequence[Row]]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """All charts of a report, and their rows by name."""

    charts: list[Chart]
    rows: dict[str, list[Row]]

    @property
    def shown(self) -> list[int]:
        """Places of the runs that can be looked at closely."""
        close = {chart.data for chart in self.charts if chart.group == "close"}
        return sorted({row["run"] for name in close for row in self.rows[name] if row["close"]})

    @property
    def first(self) -> int:
        return next(iter(self.shown), 0)


def draw(standings: Sequence[Standing]) -> Drawing:
    """The charts that these runs have something to show in; the best runs come first."""
    options = option_rows(standings)
    paths = path_rows(standings)
    rows = {**rows_of(standings), "options": options, "paths": paths, "ticks": tick_rows(paths)}
    charts = [*curves(rows, several=len(standings) > 1), *option_charts(rows), *close_charts(rows)]
    return Drawing(charts=charts, rows={name: some for name, some in rows.items() if some})


def curves(rows: Rows, *, several: bool) -> list[Chart]:
    """How all runs went: what was measured, what was trained, how fast."""
    found = [
        acceptance_curve(rows["eval"]),
        by_slot(
            rows["slots"],
            "accepted",
            "Accepted as far as slot k",
            "share of target passes that accept the draft that far; newest measurement",
        ),
        curve(rows, "loss", "Training loss", "mean of a slot, weighted; nats with --loss ce", "~r"),
        by_slot(
            rows["slots"],
            "right",
            "Right at slot k",
            "share of held-out positions whose k-th draft token is right by itself",
        ),
        curve(rows, "lr", "Learning rate", "of the last update of a log line", "~e"),
        curve(rows, "tokens_per_s", "Tokens per second", "trained, padding not counted", "~s"),
        curve(rows, "anchors_per_s", "Anchors per second", "trained blocks", "~s"),
        curve(rows, "memory", "Memory", "GB of the device, at most", "~r", scale=FROM_ZERO),
    ]
    if several:  # of a single run there is a closer look
        note = "share of the time in which the device stood still for the next batch"
        found.append(curve(rows, "waiting", "Waiting", note, "~%", scale=FROM_ZERO))
    return [chart for chart in found if chart]


def curve(
    rows: Rows, field: str, title: str, note: str, format: str, *, scale: Spec | None = None
) -> Chart | None:
    """A line per run along training; None where no run has the field."""
    data = having(rows["train"], field)
    if not data:
        return None
    spec = {
        "params": [AXIS],
        "transform": [{"filter": f"isValid(datum.{field})"}, ALONG],
        "encoding": {
            "x": X,
            "y": y(field, format=format, scale=scale),
            "detail": {"field": "run"},
            "color": HUE,
        },
        "layer": [
            *run_lines(data, {}),
            only(BEST, near_points([NAME, *WHERE, hint(field, title.lower(), ".4~g")])),
        ],
    }
    return Chart(key=field, group="curves", title=title, note=note, data="train", spec=spec)


def acceptance_curve(data: Sequence[Row]) -> Chart | None:
    """The curve that matters, with its error and the best measurement of every run."""
    if not data:
        return None
    band = {
        "mark": {"type": "area", "opacity": 0.14},
        "encoding": {"y": y("low", format=".2f"), "y2": {"field": "high"}},
    }
    ring = {"mark": {"type": "point", "size": 130, "strokeWidth": 1.8, "filled": False}}
    tooltip = [NAME, *WHERE, hint("length", "acceptance length", ".3f")]
    with_error = having(data, "error")
    if with_error:
        tooltip.append(hint("error", "standard error", ".3f"))
    if having(data, "texts"):
        tooltip.append(hint("texts", "held-out samples", ",d"))
    layers = [
        *([only(f"isValid(datum.low) && {BEST}", band)] if with_error else []),
        *run_lines(data, {"point": {"size": 22}}),
        only(f"datum.best && {BEST}", ring),
        only(BEST, near_points(tooltip)),
    ]
    error = "; band: one standard error" if with_error else ""
    return Chart(
        key="length",
        group="curves",
        title="Held-out acceptance length",
        note=f"tokens that a target pass commits, on texts that never train; ring: the best{error}",
        data="eval",
        spec={
            "params": [AXIS],
            "transform": [ALONG],
            "encoding": {
                "x": X,
                "y": y("length", format=".2f"),
                "detail": {"field": "run"},
                "color": HUE,
            },
            "layer": layers,
        },
        height=280,
        wide=True,
    )


def by_slot(data: Sequence[Row], field: str, title: str, note: str) -> Chart | None:
    """Every run's newest measurement: bars of a single one, a line for each of several."""
    data = having(data, field)
    if not data:
        return None
    tooltip = [
        NAME,
        {"field": "slot", "type": "quantitative"},
        hint(field, "share", ".1%"),
        hint("step", "measured at step", ",d"),
    ]
    x = {
        "field": "slot",
        "type": "ordinal",
        "title": None,
        "axis": {"labelAngle": 0, "labelOverlap": "greedy", "grid": False},
    }
    encoding: Spec = {"x": x, "y": y(field, format="~%", scale=FROM_ZERO), "color": HUE}
    valid: Spec = {"transform": [{"filter": f"isValid(datum.{field})"}]}
    if len({row["run"] for row in data}) == 1:
        bars: Spec = {"mark": {"type": "bar", "cornerRadiusEnd": 2, "width": {"band": 0.7}}}
        spec = {**valid, **bars, "encoding": {**encoding, "tooltip": tooltip}}
    else:
        encoding |= {"detail": {"field": "run"}, "order": {"field": "slot"}}
        layers = [*run_lines(data, {"point": {"size": 22}}), only(BEST, near_points(tooltip))]
        spec = {**valid, "encoding": encoding, "layer": layers}
    return Chart(
        key=f"slots-{field}",
        group="curves",
        title=title,
        note=note,
        data="slots",
        spec=spec,
        height=280 if field == "accepted" else 200,
    )


def close_charts(rows: Rows) -> list[Chart]:
    """One run at a time: its slots over time, and who limits whom."""
    found = [
        slots_over_time(
            rows["history"],
            "accepted",
            "Accepted as far as slot k, over time",
            "share of target passes; the strongest line is slot 1",
        ),
        slots_over_time(
            rows["history"],
            "right",
            "Right at slot k, over time",
            "share of held-out positions; the strongest line is slot 1",
        ),
        roofline(rows["train"]),
        limits(rows["train"]),
        norm(rows["train"]),
    ]
    return [chart for chart in found if chart]


def close_chart(
    key: str,
    title: str,
    note: str,
    data: str,
    encoding: Spec,
    layers: Sequence[Spec],
    *transform: Spec,
) -> Chart:
    """A chart of the chosen run, which knows best from `transform` which of its rows count."""
    spec = {
        "params": [AXIS, CHOSEN],
        "transform": [{"filter": "datum.run === chosen"}, *transform, ALONG],
        "encoding": {"x": X, **encoding},
        "layer": list(layers),
    }
    return Chart(key=key, group="close", title=title, note=note, data=data, spec=spec)


def slots_over_time(data: Sequence[Row], field: str, title: str, note: str) -> Chart | None:
    data = having(data, field)
    if len({row["step"] for row in data}) < 2:
        return None
    last = max(row["slot"] for row in data)
    named = sorted({1, (last + 1) // 2, last})
    color = {
        "field": "slot",
        "type": "quantitative",
        "scale": {"range": "ramp", "reverse": True},
        "legend": {"title": "slot", "gradientLength": 90, "values": named, "format": "d"},
    }
    encoding = {
        "y": y(field, format="~%", scale=FROM_ZERO),
        "color": color,
        "detail": {"field": "slot"},
    }
    tooltip = [{"field": "slot", "type": "quantitative"}, *WHERE, hint(field, "share", ".1%")]
    layers = [{"mark": {"type": "line", "strokeWidth": 1.5}}, near_points(tooltip)]
    valid = {"filter": f"isValid(datum.{field})"}
    return close_chart(f"history-{field}", title, note, "history", encoding, layers, valid)


def roofline(data: Sequence[Row]) -> Chart | None:
    """What the steps need of the cache against what the reader can give."""
    if not having(data, "needed"):
        return None
    step, reader = "the step could take", "the reader gives"
    color = {
        "field": "who",
        "type": "nominal",
        "legend": {"title": None, "orient": "top"},
        "scale": {"domain": [step, reader], "range": "pair"},
    }
    who = {"field": "who", "type": "nominal", "title": "GB/s that"}
    return close_chart(
        "roofline",
        "Roofline of reading",
        "GB/s of the cache; reading is hidden where the reader gives more than the step could take",
        "train",
        {"y": y("rate", format="~r", scale=FROM_ZERO), "color": color},
        [
            {"mark": {"type": "line", "strokeWidth": 1.8}},
            near_points([*WHERE, who, hint("rate", "GB/s", ".3~g")]),
        ],
        {"fold": ["needed", "delivered"], "as": ["kind", "rate"]},
        {"filter": "isValid(datum.rate)"},
        {"calculate": f"datum.kind === 'needed' ? '{step}' : '{reader}'", "as": "who"},
    )


def limits(data: Sequence[Row]) -> Chart | None:
    """Waiting for the reader, and who was to blame."""
    if not having(data, "waiting"):
        return None
    color = {
        "field": "limit",
        "type": "nominal",
        "scale": {"domain": list(LIMITS.values()), "range": "limits"},
        "legend": {"title": None, "orient": "top"},
    }
    tooltip = [
        *WHERE,
        hint("waiting", "waiting", ".1%"),
        {"field": "limit", "type": "nominal", "title": "limited by"},
    ]
    dots = {
        "mark": {"type": "point", "filled": True, "size": 22, "opacity": 0.9},
        "encoding": {"color": color, "tooltip": tooltip},
    }
    return close_chart(
        "limits",
        "Who limits whom",
        "share of the time in which the device stood still for the next batch",
        "train",
        {"y": y("waiting", format="~%", scale=FROM_ZERO)},
        [{"mark": {"type": "area", "opacity": 0.12}}, dots],
        {"filter": "isValid(datum.waiting)"},
    )


def norm(data: Sequence[Row]) -> Chart | None:
    if not having(data, "norm"):
        return None
    return close_chart(
        "norm",
        "Norm of the gradient",
        "before clipping",
        "train",
        {"y": y("norm", format="~r", scale=FROM_ZERO)},
        [
            {"mark": {"type": "line", "strokeWidth": 1.6}},
            near_points([*WHERE, hint("norm", "norm", ".3~g")]),
        ],
        {"filter": "isValid(datum.norm)"},
    )
