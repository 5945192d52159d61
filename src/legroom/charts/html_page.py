"""One HTML template for every report: no script, nothing loaded from elsewhere, light and dark.

Functions take plain text and escape it; only `page` and `figure` take markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legroom.charts.drawing import DARK, LIGHT, Drawing, svg, xml_text
from legroom.messages import language, say

_NAMES = ("ink", "soft", "grid", "paper", "blue", "critical")
_STYLE = f"""
:root{{color-scheme:light dark;{"".join(f"--{name}:{LIGHT[name]};" for name in _NAMES)}}}
@media (prefers-color-scheme:dark){{:root{{{"".join(f"--{name}:{DARK[name]};" for name in _NAMES)}}}}}
body{{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--ink);background:var(--paper);
margin:0 auto;padding:16px;max-width:1000px}}
h1{{font-size:1.35rem;margin:0}}h2{{font-size:1.1rem;margin:1.8rem 0 .4rem}}h3{{font-size:1rem;margin:1rem 0 .2rem}}
p{{margin:.3rem 0}}.soft{{color:var(--soft)}}li{{overflow-wrap:anywhere}}
pre{{font:.85rem/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:.4rem 0}}
.wide{{overflow-x:auto}}.wide svg{{display:block;width:100%;min-width:560px}}
table{{border-collapse:collapse}}
th,td{{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--grid);vertical-align:top}}
td.n{{white-space:nowrap;font-variant-numeric:tabular-nums}}
.verdict{{border-left:4px solid var(--critical);padding:.2rem 0 .2rem .8rem}}.fine{{border-color:var(--blue)}}
"""


def page(title: str, body: Iterable[str]) -> str:
    """The whole page: its title as heading, then the parts of the body, which are markup."""
    return (
        f'<!doctype html><html lang="{language()}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline'\">"
        f"<title>{xml_text(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{xml_text(title)}</h1>{''.join(body)}</main></body></html>\n"
    )


def element(name: str, text: str, style: str = "") -> str:
    """One element with a text in it."""
    opening = f'{name} class="{style}"' if style else name
    return f"<{opening}>{xml_text(text)}</{name}>"


def figure(drawing: Drawing) -> str:
    """A chart; on a narrow screen it scrolls."""
    return f'<div class="wide">{svg(drawing)}</div>'


def bullets(lines: Sequence[str]) -> str:
    """A list; of an item with several lines, those after the first are commands to type. Empty without items."""
    items = []
    for line in lines:
        sentence, *commands = line.splitlines() or [""]
        items.append(f"<li>{xml_text(sentence)}{element('pre', chr(10).join(commands)) if commands else ''}</li>")
    return f"<ul>{''.join(items)}</ul>" if items else ""


def table(heading: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table below its heading, or the word "none"."""
    lines = list(rows)
    if not lines:
        return element("h2", heading) + element("p", say("none"), "soft")
    head = "".join(f'<th scope="col">{xml_text(name)}</th>' for name in columns)
    body = "".join(
        f"<tr>{''.join(element('td', cell, 'n') for cell in line[:-1])}{element('td', line[-1])}</tr>" for line in lines
    )
    return (
        element("h2", heading)
        + f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
