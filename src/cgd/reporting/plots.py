"""The curves of a run as a picture of its own, for slides and papers; the report draws its own."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from cgd.reporting.charts import LOSSES, curve, loss_axis, score_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES: dict[str, dict[str, Any]] = {
    "own": {"color": "#1f5f8b", "linestyle": "-", "linewidth": 1.8},
    "everyone": {"color": "#b4531f", "linestyle": "--", "linewidth": 1.8},
    "training": {"color": "#7b8794", "linestyle": "-", "linewidth": 1.2},
}


def curves_png(run: dict[str, Any]) -> bytes:
    """Loss, and accuracy or R² if there is any, against steps. The same run gives the same bytes.

    Args:
        run: as `load_run` gives it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    score = curve(run, "score")
    figure = Figure(figsize=(10 if score else 6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2 if score else 1, squeeze=False)[0]
    _draw_losses(panels[0], run)
    if score:
        name = score_name(run)
        panels[1].plot(*zip(*score, strict=True), **_STYLES["own"], **_marker(score))
        panels[1].set(xlabel="step", ylabel=f"{name} on our validation records")
    best = (run["outcome"] or {}).get("best_step")
    for axes in panels:
        axes.grid(alpha=0.3)
        if best is not None:
            axes.axvline(best, color="#7b8794", linestyle=":", linewidth=1.2)
    figure.suptitle(_plain(f"{run['federation']['name']}: {run['data']['target']}, {run['participant']}"))
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names may be in any script; the page shows them all
        figure.savefig(content, format="png", dpi=130, metadata={"Software": None})
    return content.getvalue()


def _draw_losses(axes: Axes, run: dict[str, Any]) -> None:
    found = {name: points for name in LOSSES if (points := curve(run, name))}
    for name, points in found.items():
        style, label = LOSSES[name]
        axes.plot(*zip(*points, strict=True), label=label, **_STYLES[style], **_marker(points))
    axes.set(xlabel="step", ylabel="loss")
    if not found:
        return
    axis = loss_axis([value for points in found.values() for _, value in points])
    if axis.logarithmic:
        axes.set_yscale("log")
        axes.set_yticks(axis.ticks, [axis.told(tick) for tick in axis.ticks])
        axes.minorticks_off()
    axes.legend(fontsize="small")


def _marker(points: list[tuple[float, float]]) -> dict[str, Any]:
    return {"marker": "o"} if len(points) < 10 else {}  # a line through one point cannot be seen


def _plain(text: str) -> str:
    """A text in which matplotlib sees no formula, and that fits."""
    text = text.encode(errors="replace").decode()
    return (text if len(text) <= 100 else text[:99] + "…").replace("$", r"\$")
