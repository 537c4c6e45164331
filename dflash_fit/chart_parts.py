"""What the charts of a report are made of: axes, colours, lines, tooltips, in Vega-Lite's words.

A specification names no colour and no size: colours are ranges of the theme (`category` for the
best runs, of which the last is for all others; `ramp` for what has an order), sizes come from the
page or the picture.  Two parameters are the reader's: `axis`, along which curves run, and
`chosen`, the run that is looked at closely.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_fit.chart_rows import HUES, Row

Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One drawing; its `spec` lacks width, height and data, which the page or the picture gives."""

    key: str  # its name in the page
    group: str  # curves, options, close
    title: str
    note: str  # what is drawn, in words and units
    data: str  # name of the rows
    spec: Spec
    height: int = 200
    wide: bool = False


AXIS = {"name": "axis", "value": "step"}
CHOSEN = {"name": "chosen", "value": 0}
# The parameter names a field, so that the reader may turn a chart that stands to another axis.
ALONG = {"calculate": "datum[axis]", "as": "x"}
X = {
    "field": "x",
    "type": "quantitative",
    "title": None,
    "axis": {
        # Hours are small numbers, which SI prefixes would turn into thousandths.
        "labelExpr": "axis === 'hours' ? format(datum.value, '~g') : format(datum.value, '~s')",
        "grid": False,
        "tickCount": 5,
        "labelFlush": True,
    },
    "scale": {"nice": False, "zero": False},
}
HUE = {
    "field": "hue",
    "type": "nominal",
    "legend": None,
    "scale": {"domain": list(range(HUES + 1)), "range": "category"},
}
NAME = {"field": "name", "type": "nominal", "title": "run"}
WHERE = [
    {"field": "step", "type": "quantitative", "format": ",d"},
    {"field": "tokens", "type": "quantitative", "format": ".3~s"},
    {"field": "hours", "type": "quantitative", "format": ".2f"},
]
# Not `nearest`: Vega-Lite 6.4 then loses the words of tooltips, and doubles what a page holds.
NEAR = {"name": "near", "select": {"type": "point", "on": "pointerover", "clear": "pointerout"}}
BEST, OTHERS = f"datum.hue !== {HUES}", f"datum.hue === {HUES}"
FROM_ZERO = {"zero": True, "domainMin": 0}


def y(field: str, *, format: str, scale: Spec | None = None) -> Spec:
    """Up: near the values, unless the scale says more."""
    return {
        "field": field,
        "type": "quantitative",
        "title": None,
        "axis": {"format": format, "tickCount": 5},
        "scale": {"zero": False, "nice": True, **(scale or {})},
    }


def hint(field: str, title: str, format: str) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, "format": format}


def only(condition: str, layer: Spec) -> Spec:
    """A layer of the rows of which the condition holds."""
    return {"transform": [{"filter": condition}], **layer}


def run_lines(rows: Sequence[Row], mark: Spec) -> list[Spec]:
    """A line per run: the best in their colours, above all others; none that would be empty."""
    found = []
    if any(row["hue"] == HUES for row in rows):
        faint = {"mark": {"type": "line", "strokeWidth": 1, "opacity": 0.6}}
        found.append(only(OTHERS, faint))
    if any(row["hue"] != HUES for row in rows):
        found.append(only(BEST, {"mark": {"type": "line", "strokeWidth": 1.8, **mark}}))
    return found


def near_points(tooltip: Sequence[Spec]) -> Spec:
    """Wide points that are seen only under the pointer, and say what they are."""
    return {
        "params": [NEAR],
        "mark": {"type": "point", "filled": True, "size": 260},
        "encoding": {
            "opacity": {"condition": {"param": "near", "empty": False, "value": 0.3}, "value": 0},
            "tooltip": list(tooltip),
        },
    }
