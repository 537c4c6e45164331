"""The charts of a report as one picture: side by side, in light colours, for where no page goes."""

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from dflash_fit.chart_parts import AXIS, CHOSEN, HUE, Chart
from dflash_fit.charts import Drawing
from dflash_fit.report_look import THEME, charting, coloured, light_colours
from dflash_fit.report_words import legend, title_of
from dflash_fit.runs import Standing

WIDTH, COLUMNS = 430, 3
OF_PICTURE: dict[str, Any] = {
    "background": "@card",
    "title": {"anchor": "start", "fontSize": 14, "subtitleColor": "@soft", "subtitlePadding": 4},
}


def picture(standings: Sequence[Standing], drawing: Drawing) -> bytes:
    """A PNG."""
    charts = [_still(chart) for chart in drawing.charts]
    if charts and len(standings) > 1:
        charts[0]["encoding"] = {**charts[0]["encoding"], "color": named_hues(standings)}
    spec = {
        "params": [AXIS, {**CHOSEN, "value": drawing.first}],
        "title": {"text": title_of(standings), "fontSize": 22, "offset": 40},
        "concat": charts,
        "columns": COLUMNS,
        "spacing": {"row": 120, "column": 110},
        "bounds": "flush",
        "padding": 28,
        "resolve": {"scale": {"color": "independent"}},
        "datasets": drawing.rows,
        "config": coloured({**THEME, **OF_PICTURE}, light_colours()),
    }
    return bytes(charting().vegalite_to_png(spec, scale=2.0, allowed_base_urls=[]))


def named_hues(standings: Sequence[Standing]) -> dict[str, Any]:
    """The colours of runs with a legend, which the page has outside of its charts."""
    lines = legend(standings)
    names = json.dumps({line["hue"]: line["name"] for line in lines})
    shown = {
        "title": None,
        "orient": "bottom",
        "columns": 2,
        "labelLimit": 190,
        "values": [line["hue"] for line in lines],
        "labelExpr": f"{names}[datum.value]",
    }
    return {**HUE, "legend": shown}


def _still(chart: Chart) -> dict[str, Any]:
    """A chart without what answers a pointer; its parameters are those of the whole picture."""
    spec = {name: value for name, value in chart.spec.items() if name != "params"}
    if "layer" in spec:
        spec["layer"] = [layer for layer in spec["layer"] if "params" not in layer]
    return {
        **spec,
        "data": {"name": chart.data},
        "title": {"text": chart.title, "subtitle": textwrap.wrap(chart.note, 70)},
        "width": WIDTH,
        "height": chart.height,
    }
