"""Small pictures for a page, as SVG without scripts: every mark is also said in words."""

import math
from collections.abc import Sequence

from secure_fedclust.audit.report.page_parts import escaped

Point = tuple[float, float]
Interval = tuple[float, float | None]
"""Open to the right where it has no other end."""

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 16, 46


def line_chart(
    *,
    name: str,
    title: str,
    description: str,
    across: str,
    up: str,
    lines: Sequence[tuple[str, str, Sequence[Point]]],
    level: tuple[str, float] | None = None,
    largest: tuple[float, float] | None = None,
    whole: bool = False,
) -> str:
    """Lines, each with a label and a class that says how it is drawn.

    Parameters
    ----------
    name : str
        Tells its elements from those of other pictures on the page.
    title, description : str
        For those who do not see it.
    across, up : str
        What the axes are.
    lines : sequence of (label, class, points)
    level : (label, value), optional
        A limit, drawn across.
    largest : (float, float), optional
        Ends of the axes; what holds everything, if not given.
    whole : bool
        Whether there are whole numbers only across.
    """
    points = [point for _, _, line in lines for point in line] or [(0.0, 0.0)]
    tops = [y for _, y in points] + ([] if level is None else [level[1]])
    end = largest or (max(1e-9, max(x for x, _ in points)), max(1e-9, max(tops)) * 1.12)
    frame = _Frame(end)
    body = [frame.axes(across, up, whole)]
    if level is not None:
        y = frame.y(level[1])
        body.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="note" x="{_LEFT + 6}" y="{y - 6:.1f}">{escaped(level[0])}</text>'
        )
    for label, kind, line in lines:
        if kind == "dots":
            body += [
                f'<circle class="dots" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>'
                for x, y in line
            ]
        else:
            way = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line)
            body.append(
                f'<polyline class="{escaped(kind)}" points="{way}">'
                f"<title>{escaped(label)}</title></polyline>"
            )
            if len(line) == 1:
                x, y = line[0]
                body.append(
                    f'<circle class="dots" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>'
                )
    return _svg(name, title, description, "".join(body), _HEIGHT)


def bar_chart(
    *,
    name: str,
    title: str,
    description: str,
    bars: Sequence[tuple[str, float, Interval | None, float | None]],
) -> str:
    """Horizontal bars, each with an interval and its own ceiling.

    An interval that is open to the right has an arrow there.

    Parameters
    ----------
    name, title, description : str
    bars : sequence of (label, value, interval, ceiling)
    """
    ends = [0.0]
    for _, value, interval, ceiling in bars:
        ends += [x for x in (value, *(interval or ()), ceiling) if x is not None]
    largest = max(ends) * 1.15 or 1.0
    step, wide = 58, _WIDTH - 2 * _RIGHT

    def at(value: float) -> float:
        return _RIGHT + wide * max(0.0, min(value, largest)) / largest

    body = []
    for i, (label, value, interval, ceiling) in enumerate(bars):
        top = 26 + i * step
        says = f"{label}: {value:.3g}" + ("" if ceiling is None else f", ceiling {ceiling:.3g}")
        body.append(
            f'<text class="tick" x="{_RIGHT}" y="{top - 6}">{escaped(says)}</text>'
            f'<rect class="track" x="{_RIGHT}" y="{top}" width="{wide}" height="18"/>'
            f'<rect class="bar" x="{_RIGHT}" y="{top}" width="{max(at(value) - _RIGHT, 1.5):.1f}" '
            'height="18"/>'
        )
        if interval is not None:
            end, middle = interval[1], top + 9
            low, high = at(interval[0]), _RIGHT + wide - 2.0 if end is None else at(end)
            body.append(
                f'<line class="interval" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" '
                f'y2="{middle}"/>'
            )
            if end is None:
                way = f"{high - 7:.1f},{middle - 5} {high:.1f},{middle} {high - 7:.1f},{middle + 5}"
                body.append(f'<polyline class="interval open" points="{way}"/>')
        if ceiling is not None:
            x = at(ceiling)
            body.append(
                f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{top + 21}"/>'
            )
    return _svg(name, title, description, "".join(body), 26 + step * len(bars))


class _Frame:
    """Axes from zero to an end that each of them has."""

    def __init__(self, end: tuple[float, float]) -> None:
        self._end = end

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self._end[0]

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self._end[1]

    def axes(self, across: str, up: str, whole: bool) -> str:
        parts = []
        for value in _ticks(self._end[0], whole):
            x = self.x(value)
            parts.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" '
                f'y2="{_HEIGHT - _BOTTOM}"/><text class="tick" text-anchor="middle" x="{x:.1f}" '
                f'y="{_HEIGHT - _BOTTOM + 16}">{value:g}</text>'
            )
        for value in _ticks(self._end[1]):
            y = self.y(value)
            parts.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/><text class="tick" text-anchor="end" x="{_LEFT - 6}" '
                f'y="{y + 4:.1f}">{value:g}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="axis" text-anchor="middle" x="{middle}" y="{_HEIGHT - 8}">'
            f'{escaped(across)}</text><text class="axis" text-anchor="middle" transform="translate('
            f'14 {(_HEIGHT - _BOTTOM + _TOP) / 2}) rotate(-90)">{escaped(up)}</text>'
        )
        return "".join(parts)


def _ticks(end: float, whole: bool = False) -> list[float]:
    """A few round numbers from 0 to the end."""
    unit = 10.0 ** math.floor(math.log10(end))
    step = next(unit * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if end / (unit * part) <= 6)
    if whole:
        step = max(1.0, math.ceil(step))
    return [float(f"{i * step:.6g}") for i in range(int(end / step + 1e-9) + 1)]


def _svg(name: str, title: str, description: str, body: str, height: float) -> str:
    mark = escaped(name)
    return (
        f'<svg role="img" aria-labelledby="{mark}-title {mark}-desc" viewBox="0 0 {_WIDTH} '
        f'{height:g}" xmlns="http://www.w3.org/2000/svg"><title id="{mark}-title">{escaped(title)}'
        f'</title><desc id="{mark}-desc">{escaped(description)}</desc>{body}</svg>'
    )
