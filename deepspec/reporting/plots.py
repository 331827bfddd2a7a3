"""Small SVG drawings: scales, axes, lines, whiskers, bars.

Colours and fonts are the page's CSS classes, so that one drawing serves light, dark and print. Every text is
escaped on its way in.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 262
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 12, 44

Format = Callable[[float], str]


def plain_number(value: float) -> str:
    """The shortest usual form: 0.5, 12, 1,500."""
    return f"{value:,.10g}"


def percent(value: float) -> str:
    """0.25 → 25%."""
    return f"{value * 100:.10g}%"


def times(value: float) -> str:
    """1.2 → 1.2×."""
    return f"{value:.10g}×"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


@dataclass
class Axis:
    """A linear scale from `low` to `high`, with ticks at `at` (None: round numbers)."""

    low: float
    high: float
    label: str = ""
    format: Format = plain_number
    at: Sequence[float] | None = None

    def fraction(self, value: float) -> float:
        span = self.high - self.low
        return (value - self.low) / span if span else 0.5

    def marks(self, about: int) -> Sequence[float]:
        return ticks(self.low, self.high, about) if self.at is None else self.at


def padded(values: Sequence[float], zero: bool = False, margin: float = 0.08) -> tuple[float, float]:
    """A range with some air around the values; `zero`: it begins at 0."""
    low, high = (0.0 if zero else min(values)), max(values)
    air = (high - low or abs(high) or 1.0) * margin
    return (0.0 if zero else low - air), high + air


@dataclass
class Plot:
    """One drawing under construction; `svg` gives it as text."""

    x: Axis
    y: Axis
    height: int = HEIGHT
    left: int = LEFT
    vertical_grid: bool = False
    parts: list[str] = field(default_factory=list)

    def px(self, value: float) -> float:
        return round(self.left + self.x.fraction(value) * (WIDTH - self.left - RIGHT), 1)

    def py(self, value: float) -> float:
        return round(self.height - BOTTOM - self.y.fraction(value) * (self.height - TOP - BOTTOM), 1)

    def line(self, points: Sequence[tuple[float, float]], css: str, step: bool = False) -> None:
        """A line through the points, or a staircase."""
        if not points:
            return
        path = [f"M{self.px(points[0][0])},{self.py(points[0][1])}"]
        for x, y in points[1:]:
            path.append(f"H{self.px(x)}V{self.py(y)}" if step else f"L{self.px(x)},{self.py(y)}")
        self.parts.append(f'<path class="line {css}" d="{"".join(path)}"/>')

    def band(self, points: Sequence[tuple[float, float, float]], css: str) -> None:
        """The area between (x, low, high)."""
        if len(points) < 2:
            return
        there = [f"{self.px(x)},{self.py(high)}" for x, _, high in points]
        back = [f"{self.px(x)},{self.py(low)}" for x, low, _ in reversed(points)]
        self.parts.append(f'<polygon class="band {css}" points="{" ".join(there + back)}"/>')

    def whisker(self, x: float, low: float, high: float, css: str) -> None:
        """A vertical interval."""
        self.parts.append(
            f'<line class="whisker {css}" x1="{self.px(x)}" x2="{self.px(x)}" '
            f'y1="{self.py(low)}" y2="{self.py(high)}"/>'
        )

    def span(self, y: float, low: float, high: float, css: str) -> None:
        """A horizontal interval."""
        self.parts.append(
            f'<line class="whisker {css}" x1="{self.px(low)}" x2="{self.px(high)}" '
            f'y1="{self.py(y)}" y2="{self.py(y)}"/>'
        )

    def dot(
        self, x: float, y: float, css: str, title: str, *, link: str | None = None, radius: float = 4.5
    ) -> None:
        """A point; `title` shows on hovering, `link` is an anchor of the page."""
        circle = (
            f'<circle class="dot {css}" cx="{self.px(x)}" cy="{self.py(y)}" r="{radius}">'
            f"<title>{escape(title)}</title></circle>"
        )
        self.parts.append(f'<a href="#{escape(link)}">{circle}</a>' if link else circle)

    def bar(self, across: tuple[float, float], up: tuple[float, float], css: str, title: str) -> None:
        """A rectangle in data coordinates: from x to x, from y to y."""
        x, y = self.px(across[0]), self.py(up[1])
        width, height = max(self.px(across[1]) - x, 0.0), max(self.py(up[0]) - y, 0.0)
        self.parts.append(
            f'<rect class="bar {css}" x="{x}" y="{y}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def rule(self, x: float | None = None, y: float | None = None, css: str = "reference") -> None:
        """A line across the whole drawing at x, or at y."""
        if x is not None and self.x.low <= x <= self.x.high:
            place = f'x1="{self.px(x)}" x2="{self.px(x)}" y1="{TOP}" y2="{self.height - BOTTOM}"'
        elif y is not None and self.y.low <= y <= self.y.high:
            place = f'x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{self.py(y)}" y2="{self.py(y)}"'
        else:
            return
        self.parts.append(f'<line class="{css}" {place}/>')

    def text(self, x: float, y: float, words: str, css: str = "", *, dx: float = 0, dy: float = 4) -> None:
        """Words at a place in data coordinates, moved by (dx, dy) pixels."""
        place = f'x="{self.px(x) + dx:.1f}" y="{self.py(y) + dy:.1f}"'
        self.parts.append(f'<text class="{css}" {place}>{escape(words)}</text>')

    def label(self, y: float, words: str, css: str = "", longest: int = 24) -> None:
        """A row's name in the left margin, cut to fit (whole on hovering)."""
        short = words if len(words) <= longest else words[: longest - 1] + "…"
        self.parts.append(
            f'<text class="tick end {css}" x="{self.left - 10}" y="{self.py(y) + 4:.1f}">'
            f"{escape(short)}<title>{escape(words)}</title></text>"
        )

    def svg(self, description: str) -> str:
        """The whole drawing; `description` is for those who cannot see it."""
        frame = [*self._x_axis(), *self._y_axis()]
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(description)}">'
            + "".join(frame + self.parts)
            + "</svg>"
        )

    def _x_axis(self) -> list[str]:
        bottom = self.height - BOTTOM
        parts = [f'<line class="axis" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']
        for value in self.x.marks(6 if self.left < 100 else 4):
            x = self.px(value)
            if self.vertical_grid:
                parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP}" y2="{bottom}"/>')
            parts.append(
                f'<text class="tick middle" x="{x}" y="{bottom + 17}">{escape(self.x.format(value))}</text>'
            )
        middle = (self.left + WIDTH - RIGHT) / 2
        parts.append(
            f'<text class="name middle" x="{middle}" y="{self.height - 6}">{escape(self.x.label)}</text>'
        )
        return parts

    def _y_axis(self) -> list[str]:
        parts = []
        for value in self.y.marks(5):
            y, words = self.py(value), escape(self.y.format(value))
            parts.append(f'<line class="grid" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick end" x="{self.left - 8}" y="{y + 4:.1f}">{words}</text>')
        return parts
