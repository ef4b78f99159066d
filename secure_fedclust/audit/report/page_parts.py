"""Pieces of a page. Whatever comes in is text, and is escaped here."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Cells = Sequence[Any]

# They turn the text around that follows them, so that it reads otherwise than it is.
_TURNING = {
    code: f"\\u{code:04x}"
    for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


class Markup(str):
    """Text that is HTML already."""


def escaped(words: str) -> str:
    """Text as HTML, within quotes too."""
    return escape(words.translate(_TURNING), quote=True)


def text(value: Any) -> str:
    """Anything as HTML."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return f"{value:,}"
    return escaped(str(value))


def number(value: float) -> str:
    """Four digits, the way people write them."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return small(value)
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def small(value: float) -> str:
    """A small probability: 1e-5, and not 1e-05."""
    return re.sub(r"e([+-])0*", lambda found: f"e{found.group(1)}".rstrip("+"), f"{value:.3g}")


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def paragraph(words: Any, kind: str | None = None) -> str:
    """One paragraph."""
    return f"<p{_kind(kind)}>{text(words)}</p>"


def items(lines: Iterable[Any], tag: str = "ul") -> str:
    """A list."""
    return f"<{tag}>" + "".join(f"<li>{text(line)}</li>" for line in lines) + f"</{tag}>"


def section(name: str, title: str, *parts: str) -> str:
    """A section with its heading."""
    head = f'<h2 id="{name}">{text(title)}</h2>'
    return f'<section aria-labelledby="{name}">{head}{"".join(parts)}</section>'


def status(word: str) -> Markup:
    """A word in a coloured frame: the word says it, not the colour."""
    return Markup(f'<span class="status {escaped(word)}">{escaped(word)}</span>')


def code(words: str) -> Markup:
    """A command, or a hash."""
    return Markup(f"<code>{escaped(words)}</code>")


def figure(drawing: str, caption: str) -> str:
    """A picture, with what it shows in words."""
    return f"<figure>{drawing}<figcaption>{text(caption)}</figcaption></figure>"


def numbers(pairs: Sequence[tuple[str, Any]]) -> str:
    """A few figures, large."""
    return (
        '<ul class="numbers">'
        + "".join(f"<li><b>{text(value)}</b>{text(label)}</li>" for label, value in pairs)
        + "</ul>"
    )


def table(
    caption: str,
    header: Sequence[str],
    rows: Iterable[Cells],
    *,
    kind: str = "cards",
    marked: Sequence[int] = (),
    wrapped: Sequence[int] = (),
) -> str:
    """A table in a box of its own; one of kind ``cards`` becomes a list on a narrow screen.

    Parameters
    ----------
    caption : str
    header : sequence of str
    rows : iterable of sequences
        The first of each is its heading.
    kind : {"cards", "plain", "rows"}
    marked : sequence of int
        Rows before which a new group begins.
    wrapped : sequence of int
        Columns of a table of kind ``rows`` whose text may take several lines.
    """
    body = []
    all_rows = list(rows)
    numeric = [
        bool(all_rows) and all(_is_number(row[j]) for row in all_rows) for j in range(len(header))
    ]
    for i, row in enumerate(all_rows):
        cells = []
        for j, value in enumerate(row):
            klass = ' class="n"' if numeric[j] else ' class="wrap"' if j in wrapped else ""
            if j == 0:
                cells.append(f'<th scope="row" role="rowheader"{klass}>{text(value)}</th>')
            else:
                label = text(header[j])
                cells.append(f'<td role="cell" data-label="{label}"{klass}>{text(value)}</td>')
        group = ' class="party"' if i in marked else ""
        body.append(f'<tr role="row"{group}>{"".join(cells)}</tr>')
    heads = "".join(
        f'<th scope="col" role="columnheader"{" class=n" if n else ""}>{text(name)}</th>'
        for name, n in zip(header, numeric, strict=True)
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(caption)}">'
        f'<table class="{kind}" role="table"><caption><span>{text(caption)}</span></caption>'
        f'<thead role="rowgroup"><tr role="row">{heads}</tr></thead>'
        f'<tbody role="rowgroup">{"".join(body)}</tbody></table></div>'
    )


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _kind(kind: str | None) -> str:
    return "" if kind is None else f' class="{escaped(kind)}"'
