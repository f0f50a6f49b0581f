"""Figures with Matplotlib, which is imported when the first one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ._cachemate import Curve, Matrix


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot() needs Matplotlib: pip install matplotlib") from error
    return pyplot.subplots()[1]


def _size(size: float, _position: float = 0) -> str:
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g}{unit}"
    return f"{size:g}"


def curve(curve: Curve, ax: Axes | None = None) -> Axes:
    """Misses by cache size, with the 95 % interval of a sample."""
    ax = _axes(ax)
    has_instructions = curve.mpki is not None
    misses = curve.mpki if curve.mpki is not None else 100 * curve.misses_per_access
    (line,) = ax.plot(curve.sizes, misses, label=curve.name)
    if curve.errors is not None:
        scale = misses / curve.misses_per_access.clip(min=1e-300)
        low = scale * (curve.misses_per_access - curve.errors).clip(min=0)
        high = scale * (curve.misses_per_access + curve.errors)
        ax.fill_between(curve.sizes, low, high, alpha=0.3, color=line.get_color(), linewidth=0)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(_size)
    ax.set_xlabel("cache size, bytes")
    ax.set_ylabel("misses per 1000 instructions" if has_instructions else "misses, % of accesses")
    ax.set_ylim(bottom=0)
    return ax


def matrix(matrix: Matrix, ax: Axes | None = None) -> Axes:
    """Slowdown of each row beside each column."""
    ax = _axes(ax)
    values = matrix.values
    ax.imshow(values, cmap="cividis", vmin=0)
    middle = values.max() / 2 if values.size else 0
    for row, column in ((row, column) for row in range(len(values)) for column in range(len(values))):
        value = values[row, column]
        color = "black" if value > middle else "white"
        ax.text(column, row, f"{value:.1f}", ha="center", va="center", color=color)
    ax.set_xticks(range(len(matrix.names)), matrix.names, rotation=45, ha="right")
    ax.set_yticks(range(len(matrix.names)), matrix.names)
    unit = "slowdown, %" if matrix.unit == "percent" else "weight"
    ax.set_title(f"{unit}: row beside column, by {matrix.model}")
    return ax
