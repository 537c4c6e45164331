"""A page about runs: one HTML file that needs no network, and a picture of its charts.

The page is a template (`page/`), which escapes whatever a run says; its words come from
`report_words`, its charts from `charts`.  A policy in it forbids every request, and every script
but the two that were put there.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from dflash_cache.disk import write_file
from dflash_fit.charts import Drawing, draw
from dflash_fit.config import ReportConfig
from dflash_fit.report_look import THEME, charting, page_file
from dflash_fit.report_picture import picture
from dflash_fit.report_words import words_of
from dflash_fit.runs import Standing, find_standings


def write_report(config: ReportConfig) -> dict[str, Any]:
    """Write the page, and the picture if it is wanted; returns a summary."""
    standings = find_standings(config.runs)
    drawing = draw(standings)
    write_file(config.out, page(standings, drawing).encode())
    if config.png:
        write_file(config.beside, picture(standings, drawing))
    best = standings[0]
    return {
        "page": str(config.out),
        "picture": str(config.beside) if config.png else None,
        "runs": len(standings),
        "best": best.name if best.acceptance is not None else None,
        "acceptance_length": best.acceptance,
        "acceptance_error": best.error,
    }


def page(standings: Sequence[Standing], drawing: Drawing) -> str:
    """The whole page."""
    script, library = page_file("report.js"), charting().javascript_bundle()
    payload = {
        "charts": [
            {"key": one.key, "spec": one.spec, "data": one.data, "height": one.height}
            for one in drawing.charts
        ],
        "rows": drawing.rows,
        "theme": THEME,
        "first": drawing.first,
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(page_file("report.html")).render(
        **words_of(standings),
        charts=drawing.charts,
        groups={chart.group for chart in drawing.charts},
        close=[{"place": place, "name": standings[place].name} for place in drawing.shown],
        policy=policy([library, script]),
        style=Markup(page_file("report.css")),
        library=Markup(library),
        script=Markup(script),
        payload=Markup(json_in_html(payload)),
    )


def policy(scripts: Sequence[str]) -> str:
    """What the page may do: run these very scripts, and nothing else; ask nobody."""
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def json_in_html(value: Any) -> str:
    """JSON that cannot end the element that it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
