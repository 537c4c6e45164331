"""One page of an inspection: self-contained, without scripts, light and dark.  Pure text."""

from collections.abc import Iterator, Mapping
from html import escape

from dflash_cache.inspection import (
    Inspection,
    ShownSample,
    SkippedRow,
    Token,
    bucket_name,
)
from dflash_cache.pieces import visible

STYLE = """
:root { color-scheme: light dark;
  --page: #fff; --ink: #1b1f24; --faint: #6a737d; --line: #d9dee3; --box: #f6f8fa;
  --on: #c8f0d2; --on-ink: #0b3d1c; --special: #6f42c1; --bar: #57a773; --skip: #b3261e; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171a; --ink: #e4e7ea; --faint: #8b949e; --line: #30363d; --box: #1d2125;
  --on: #17452a; --on-ink: #c9f2d5; --special: #c9a7ff; --bar: #3f8f5f; --skip: #ff8a80; } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.3rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .3rem }
a { color: inherit }
.up { float: right; font-size: .8rem; font-weight: normal; color: var(--faint) }
.facts { color: var(--faint); margin: 0 0 .6rem }
.note { border-left: 3px solid var(--special); padding-left: .7rem }
.tables { display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start }
table { border-collapse: collapse }
caption { text-align: left; font-weight: 600; padding-bottom: .2rem }
th, td { text-align: left; font-weight: normal; padding: .15rem .9rem .15rem 0;
  border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }
th { color: var(--faint); white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.wide { width: 12rem } .bar { background: var(--bar); height: .8rem; min-width: 1px }
.reason { color: var(--skip) }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--box); padding: .9rem;
  border: 1px solid var(--line); border-radius: 6px;
  font: 13.5px/1.75 ui-monospace, Menlo, Consolas, monospace }
.t { color: var(--faint) } .t:hover { outline: 1px solid var(--ink) }
.s { background: var(--on); color: var(--on-ink) }
.x { color: var(--special); font-weight: 600 }
#ids:checked ~ main .t { border-left: 1px solid var(--line) }
#ids:checked ~ main .t::before { content: attr(data-i); font-size: 9px; vertical-align: sub;
  color: var(--faint); margin: 0 2px }
.key span { padding: 0 .3rem; margin-right: .7rem }
"""


def page(found: Inspection) -> str:
    """The whole page."""
    shown = found.shown
    sections = "\n".join(_section(one) for one in shown)
    return (
        '<!DOCTYPE html>\n<html lang="en" id="top">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_say(found.source)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_say(found.source)}</h1>\n{_notes(found)}"
        f'<div class="tables">\n{_facts(found)}{_buckets(found)}{_skips(found)}</div>\n'
        f"<h2>Shown here</h2>\n{_contents(shown)}\n"
        '<p class="key"><span class="s">supervised</span><span class="t">prompt</span>'
        '<span class="x">special token</span> ⏎ newline, ⇥ tab, · blank at a line end. '
        "Point at a token for its position, id and text.</p>\n"
        '<input type="checkbox" id="ids"> <label for="ids">show ids</label>\n'
        f"<main>\n{sections}\n</main>\n</body>\n</html>\n"
    )


def _say(text: object) -> str:
    return escape(visible(str(text)), quote=True)


def _notes(found: Inspection) -> str:
    return "".join(f'<p class="note">{_say(note)}</p>\n' for note in found.notes)


def _facts(found: Inspection) -> str:
    rows = "".join(
        f"<tr><th>{_say(name)}</th><td>{_say(value)}</td></tr>\n"
        for name, value in found.facts().items()
    )
    return f"<table><caption>Summary</caption>\n{rows}</table>\n"


def _buckets(found: Inspection) -> str:
    buckets = found.totals.buckets
    most = max(buckets.values(), default=1)
    rows = "".join(
        f'<tr><th>{bucket_name(bound)}</th><td class="number">{count:,}</td><td class="wide">'
        f'<div class="bar" style="width: {count / most:.1%}"></div></td></tr>\n'
        for bound, count in buckets.items()
    )
    return _table("Samples by length", rows)


def _skips(found: Inspection) -> str:
    skipped: Mapping[str, int] = found.totals.skipped
    rows = "".join(
        f'<tr><td class="number">{count:,}</td><td>{_say(reason)}</td></tr>\n'
        for reason, count in skipped.items()
    )
    return _table(f"Skipped: {sum(skipped.values()):,}", rows)


def _table(title: str, rows: str) -> str:
    return f"<table><caption>{title}</caption>\n{rows}</table>\n"


def _name(one: ShownSample | SkippedRow) -> str:
    return f"{'sample' if isinstance(one, ShownSample) else 'row'} {one.number}"


def _anchor(one: ShownSample | SkippedRow) -> str:
    return _name(one).replace(" ", "-")


def _contents(shown: list[ShownSample | SkippedRow]) -> str:
    rows = "".join(
        f'<tr><td><a href="#{_anchor(one)}">{_name(one)}</a></td><td>{_short(one)}</td></tr>\n'
        for one in shown
    )
    return f"<table>\n{rows}</table>"


def _short(one: ShownSample | SkippedRow) -> str:
    if isinstance(one, ShownSample):
        return _say(one.facts)
    return f'<span class="reason">skipped, {_say(one.reason)}</span>'


def _section(one: ShownSample | SkippedRow) -> str:
    body = "".join(_spans(one.tokens)) if isinstance(one, ShownSample) else _say(one.beginning)
    return (
        f'<section id="{_anchor(one)}">\n<h2>{_name(one)} <a class="up" href="#top">top</a></h2>\n'
        f'<p class="facts">{_short(one)}</p>\n<div class="text">{body}</div>\n</section>'
    )


def _spans(tokens: list[Token]) -> Iterator[str]:
    for token in tokens:
        classes = "t" + " s" * token.supervised + " x" * token.special
        yield (
            f'<span class="{classes}" data-i="{token.id}" title="{_say_tip(token)}">'
            f"{escape(token.shown)}</span>"
        )


def _say_tip(token: Token) -> str:
    piece = "not known" if token.piece is None else repr(token.piece)
    if token.piece == "":
        piece = "goes on with the character before"
    kind = "supervised" if token.supervised else "prompt"
    return _say(f"position {token.position}, id {token.id}, {kind}: {piece}")
