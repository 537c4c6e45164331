"""How a report looks: the files of its page, the theme of its charts, and who draws them.

Colours stand in page/report.css alone, twice: light and dark.
"""

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dflash_fit.chart_rows import HUES
from dflash_fit.errors import FitError

# Of Vega-Lite.  `@ink` is the colour --ink of report.css, which the page and the picture look up.
THEME: dict[str, Any] = {
    "background": None,
    "view": {"stroke": None},
    "axis": {
        "labelFontSize": 11,
        "labelPadding": 6,
        "labelColor": "@soft",
        "gridColor": "@grid",
        "ticks": False,
        "domain": False,
    },
    "legend": {
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": 400,
        "labelColor": "@soft",
        "titleColor": "@soft",
        "symbolSize": 60,
        "symbolOpacity": 1,
    },
    "mark": {"color": "@h0"},
    "text": {"color": "@soft"},
    "range": {
        "category": [f"@h{hue}" for hue in range(HUES + 1)],
        "ramp": ["@low", "@high"],
        "heatmap": ["@low", "@high"],
        "pair": ["@h0", "@h1"],
        "limits": ["@h2", "@h1", "@h3"],
    },
    "style": {
        "halo": {"fill": "@card", "stroke": "@card", "strokeWidth": 4, "strokeJoin": "round"}
    },
}


def coloured(theme: Any, colours: Mapping[str, str]) -> Any:
    """A theme with the names of colours looked up."""
    if isinstance(theme, dict):
        return {name: coloured(value, colours) for name, value in theme.items()}
    if isinstance(theme, list):
        return [coloured(value, colours) for value in theme]
    return colours[theme[1:]] if isinstance(theme, str) and theme.startswith("@") else theme


def light_colours() -> dict[str, str]:
    """The colours of report.css by day."""
    return dict(re.findall(r"--(\w+): (#\w+)", page_file("report.css").split("@media")[0]))


def page_file(name: str) -> str:
    """A file of the page."""
    return (resources.files("dflash_fit") / "page" / name).read_text(encoding="utf-8")


def charting() -> Any:
    """The library that has the charts' scripts, whole and offline, and that draws pictures."""
    try:
        import vl_convert
    except ImportError:
        raise FitError(
            "dflash report draws with vl-convert-python, which is not installed; "
            "run: pip install 'dflash-toolkit[report]'"
        ) from None
    return vl_convert
