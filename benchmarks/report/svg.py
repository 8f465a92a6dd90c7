"""Two kinds of pictures as SVG, without any library: lines over categories, and spans of time."""

import math
from xml.sax.saxutils import escape

COLORS = ["#0b6e4f", "#c8553d", "#3d5a99", "#8f5db7", "#b8860b", "#4a4a4a"]
TEXT = 'font-family="sans-serif" font-size="12" fill="#222"'


def number(value):
    return f"{value:.1f}"


def text(x, y, words, anchor="start", extra=""):
    return (
        f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" {TEXT} {extra}>'
        f"{escape(words)}</text>"
    )


def line(x1, y1, x2, y2, color, extra=""):
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} stroke="{color}" {extra}/>'


def rectangle(x, y, width, height, color, title):
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect {place} rx="2" fill="{color}"><title>{escape(title)}</title></rect>'


def document(width, height, parts):
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )


def round_step(span, steps):
    """The smallest of 1, 2, 5, 10, ... that divides the span into at most so many parts."""
    step = 10.0 ** -6
    while True:
        for factor in (1, 2, 5):
            if span <= step * factor * steps:
                return step * factor
        step *= 10


def ticks(low, high, steps):
    step = round_step(high - low, steps)
    index = math.ceil(low / step)
    while step * index <= high + step * 1e-9:
        yield step * index
        index += 1


def linear_axis(values):
    """(share of the height by value, ticks), with a margin on both sides, none below 0."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or high * 0.1 or 1
    low, high = max(0, low - margin), high + margin
    return lambda value: (value - low) / (high - low), list(ticks(low, high, 6))


def logarithmic_axis(values):
    """The same on a logarithmic scale; the values are above 0."""
    low = math.floor(math.log10(min(values)) + 1e-9)
    high = math.ceil(math.log10(max(values)) - 1e-9)
    high = max(high, low + 1)
    marks = [10.0 ** power for power in range(low, high + 1)]
    return lambda value: (math.log10(value) - low) / (high - low), marks


def line_chart(title, categories, series, x_label, y_label, axis=linear_axis):
    """Draws one line for each (name, values by category); None where there is no value."""
    width, height, left, right, top, bottom = 720, 400, 70, 170, 56, 50
    share_of, marks = axis([value for _, ys in series for value in ys if value is not None])

    def x_of(index):
        return left + (width - left - right) * (index + 0.5) / len(categories)

    def y_of(value):
        return height - bottom - (height - top - bottom) * share_of(value)

    parts = [text(left, 22, title, extra='font-weight="bold"')]
    for tick in marks:
        parts.append(line(left, y_of(tick), width - right, y_of(tick), "#ddd"))
        parts.append(text(left - 8, y_of(tick) + 4, f"{tick:g}", "end"))
    for index, category in enumerate(categories):
        parts.append(text(x_of(index), height - bottom + 18, category, "middle"))
    parts.append(text((left + width - right) / 2, height - 10, x_label, "middle"))
    parts.append(text(left, top - 6, y_label))
    for which, (name, ys) in enumerate(series):
        color = COLORS[which % len(COLORS)]
        points = [(x_of(i), y_of(y)) for i, y in enumerate(ys) if y is not None]
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y in points:
            parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="3" fill="{color}"/>')
        y = top + 18 * which
        parts.append(line(width - right + 15, y, width - right + 35, y, color, 'stroke-width="3"'))
        parts.append(text(width - right + 42, y + 4, name))
    return document(width, height, parts)


def lanes_of(spans):
    """A lane for each span, the lowest one that is free when it starts; spans come by start."""
    ends, lanes = [], []
    for _, start, stop, _ in spans:
        lane = next((i for i, end in enumerate(ends) if end <= start), len(ends))
        if lane == len(ends):
            ends.append(stop)
        ends[lane] = stop
        lanes.append(lane)
    return lanes


def timeline(title, rows):
    """Draws one row for each (name, spans); a span is (label, start, end, color index), in ms.

    Overlapping spans of a row are drawn in lanes, one above the other.
    """
    width, left, right, top, row_height = 900, 150, 20, 40, 34
    height = top + row_height * len(rows) + 40
    end = max(span[2] for _, spans in rows for span in spans)

    def x_of(time):
        return left + (width - left - right) * time / end

    floor = top + row_height * len(rows)
    parts = [text(left, 22, title, extra='font-weight="bold"')]
    for tick in ticks(0, end, 10):
        parts.append(line(x_of(tick), top, x_of(tick), floor, "#ddd"))
        parts.append(text(x_of(tick), floor + 18, f"{tick:g}", "middle"))
    parts.append(text(width - right, floor + 34, "ms from the start of the step", "end"))
    for index, (name, spans) in enumerate(rows):
        y = top + row_height * index
        parts.append(text(left - 8, y + row_height / 2 + 4, name, "end"))
        lanes = lanes_of(spans)
        high = (row_height - 8) / (1 + max(lanes))
        for lane, (label, start, stop, color) in zip(lanes, spans):
            color = COLORS[color % len(COLORS)]
            wide = max(x_of(stop) - x_of(start), 1)
            tip = f"{label}: {start:.2f} to {stop:.2f} ms"
            floor_of_lane = y + 4 + high * (lane + 1)
            parts.append(rectangle(x_of(start), floor_of_lane - high, wide, high - 1, color, tip))
            if wide > 7 * len(label) and high >= 12:
                white = 'style="fill:white"'
                middle = floor_of_lane - high / 2 + 4
                parts.append(text(x_of(start) + 4, middle, label, extra=white))
    return document(width, height, parts)
