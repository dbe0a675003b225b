"""A run as one HTML file that needs nothing else: settings, curves as SVG, samples before and after."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxserve.tuning.metrics import read_metrics

REPORT = "report.html"
_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 12, 28
_MAX_POINTS = 600
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 820px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
pre { background: #f5f5f5; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
svg { max-width: 100%; height: auto; } .axis { stroke: #999; } .grid { stroke: #eee; }
text { font-size: 11px; fill: #555; }
.train { fill: none; stroke: #3366cc; } .valid { fill: none; stroke: #cc5500; }
"""

Point = tuple[float, float]


def write_report(folder: Path, title: str, facts: Mapping[str, Any]) -> Path:
    """Writes report.html from a run's metrics. ``facts`` is what stands in the table at the top."""
    lines = read_metrics(folder)
    steps = [line for line in lines if line["kind"] == "step"]
    evals = [line for line in lines if line["kind"] == "eval"]
    losses = [(float(line["step"]), float(line["loss"])) for line in steps]
    valid = [(float(line["step"]), float(line["loss"])) for line in evals]
    rates = [(float(line["step"]), float(line["learning_rate"])) for line in steps]
    speeds = [
        (float(line["step"]), line["num_tokens"] / line["seconds"]) for line in steps if line["seconds"] > 0
    ]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table(facts),
        "<h2>Loss</h2>",
        _chart([("train", losses), ("valid", valid)]),
        "<p>Blue: training, orange: validation.</p>" if valid else "",
        "<h2>Learning rate</h2>",
        _chart([("train", rates)]),
        "<h2>Tokens a second</h2>",
        _chart([("train", speeds)]),
        _samples([line for line in lines if line["kind"] == "sample"]),
    ]
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    path = folder / REPORT
    path.write_text(page, encoding="utf-8")
    return path


def _table(facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return ""
    by_prompt: dict[str, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(sample["prompt"], []).append(sample)
    parts = ["<h2>Samples</h2>"]
    for prompt, texts in by_prompt.items():
        parts.append(f"<h3>Prompt</h3><pre>{html.escape(prompt)}</pre>")
        for sample in texts:
            when = "before" if sample["step"] == 0 else f"after {sample['step']} steps"
            parts.append(f"<p>{when}</p><pre>{html.escape(sample['text'])}</pre>")
    return "".join(parts)


def _chart(curves: Sequence[tuple[str, Sequence[Point]]]) -> str:
    points = [point for _, curve in curves for point in curve if math.isfinite(point[1])]
    if not points:
        return "<p>No figures yet.</p>"
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    span_x = high_x - low_x or 1.0
    span_y = high_y - low_y or abs(high_y) or 1.0

    def place(point: Point) -> str:
        x = _LEFT + (point[0] - low_x) / span_x * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - (point[1] - low_y) / span_y * (_HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)
        kind = "axis" if share == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="4" y="{y + 4:.1f}">{low_y + share * span_y:.4g}</text>')
        x = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}">{low_x + share * span_x:.0f}</text>')
    for kind, curve in curves:
        thin = [point for point in _thinned(curve) if math.isfinite(point[1])]
        if len(thin) == 1:
            at_x, at_y = place(thin[0]).split(",")
            parts.append(f'<circle class="{kind}" cx="{at_x}" cy="{at_y}" r="3"/>')
        elif thin:
            parts.append(f'<polyline class="{kind}" points="{" ".join(place(point) for point in thin)}"/>')
    parts.append("</svg>")
    return "".join(parts)


def _thinned(curve: Sequence[Point]) -> list[Point]:
    """At most so many points, each the mean of its neighbours: a page of a long run stays small."""
    size = -(-len(curve) // _MAX_POINTS)
    if size <= 1:
        return list(curve)
    groups = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
