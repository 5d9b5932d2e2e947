"""What the reports share: one HTML page without scripts or anything from the network, readable on a phone and in the dark.

Knows headings, tables and figures, nothing of what they show. Every text that is given is escaped; only arguments called
`content` are HTML already.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5c6670;--line:#d8dde3;--back:#fff;--card:#f6f8fa;--bad:#b3261e;
--c0:#0b66c3;--c1:#c2410c;--c2:#15803d;--c3:#7e22ce;--c4:#a16207;--c5:#0e7490}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4af;--line:#343b44;--back:#12161b;--card:#1b2027;--bad:#ff8a80;
--c0:#6cb2ff;--c1:#ff9a62;--c2:#5fd38d;--c3:#cf9bff;--c4:#e6c15a;--c5:#5fd0e6}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1200px;padding:1rem;background:var(--back);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.1rem;margin:1.6rem 0 .5rem}
p,dl{margin:.4rem 0}.soft,.none{color:var(--soft)}.bad{color:var(--bad)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:.8rem}
figure{margin:0;padding:.6rem;background:var(--card);border-radius:8px}figcaption{font-weight:600;font-size:.9rem}
svg{width:100%;height:auto;display:block}.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:11px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.87rem}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}th{color:var(--soft);font-weight:600}
dt{font-weight:600;float:left;clear:left;margin-right:.5rem}dd{margin:0 0 .3rem 0;overflow:hidden}
.key span{display:inline-block;margin-right:1rem}.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;
margin-right:.35rem;vertical-align:-1px}
"""


def document(title: str, content: str, *, style: str = "") -> str:
    """The page as text. `style` is CSS that follows the shared one."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>{content}</body></html>\n"
    )


def figure(title: str, content: str) -> str:
    """A plot with its title."""
    return f"<figure><figcaption>{escape(title)}</figcaption>{content}</figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls sideways where the screen is narrow; the first two columns are text, the others numbers."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
