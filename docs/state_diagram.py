"""Draw the state diagram of a secure sum from the transition tables of `cgd.secagg.states`.

`python docs/state_diagram.py` writes docs/images/secure-sum.svg, which docs/design.md shows. The output depends on the
tables only, so that a test can detect an outdated picture.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from cgd.secagg.codec import KINDS
from cgd.secagg.states import EXPECTED, TRANSITIONS, State

PICTURE = Path(__file__).parent / "images" / "secure-sum.svg"

NAMESPACE = "http://www.w3.org/2000/svg"
COLUMN: list[State] = [state for state in State if state is not State.FAILED]
WIDTH, TOP, ROW = 760, 78, 92  # picture width; y of the first state's centre; distance between states
CENTRE, BOX_WIDTH, BOX_HEIGHT = 360, 150, 44  # x of the states' centre; size of a state's box
FAILED_LEFT, FAILED_WIDTH = 610, 110
HEIGHT = TOP + ROW * (len(COLUMN) - 1) + 50

STYLE = """
  text { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #24292f; }
  .state { font-weight: 600; text-anchor: middle; }
  .kinds { text-anchor: end; }
  .head { font-size: 12px; fill: #57606a; }
  .fault { font-size: 11px; fill: #a40e26; text-anchor: middle; }
  .box { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.5; }
  .finished { fill: #dafbe1; stroke: #1a7f37; }
  .failed { fill: #ffebe9; stroke: #cf222e; }
  .on { stroke: #0969da; stroke-width: 1.5; marker-end: url(#on); }
  .off { stroke: #cf222e; stroke-width: 1.2; stroke-dasharray: 5 4; marker-end: url(#off); }"""


def draw() -> str:
    """Return the picture as SVG text."""
    lines = [
        f'<svg xmlns="{NAMESPACE}" role="img" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        "<title>The states of one secure sum</title>",
        f"<style>{STYLE}\n</style>",
        f"<defs>{_arrowhead('on', '#0969da')}{_arrowhead('off', '#cf222e')}</defs>",
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
        _text(CENTRE - BOX_WIDTH // 2 - 18, 30, "kinds head", "expected messages"),
        _text(CENTRE, 30, "state head", "state"),
    ]
    for state in COLUMN:
        kinds = ", ".join(kind.__name__ for kind in KINDS if kind in EXPECTED.get(state, ()))
        lines.append(_box(CENTRE - BOX_WIDTH // 2, _middle(state) - BOX_HEIGHT // 2, BOX_WIDTH, BOX_HEIGHT, state))
        lines.append(_text(CENTRE, _middle(state) + 5, "state", state.name))
        lines.append(_text(CENTRE - BOX_WIDTH // 2 - 18, _middle(state) + 5, "kinds", kinds or "—"))
    failing = [_middle(state) for (state, _), after in TRANSITIONS.items() if after is State.FAILED]
    top, bottom = min(failing) - BOX_HEIGHT // 2, max(failing) + BOX_HEIGHT // 2
    lines.append(_box(FAILED_LEFT, top, FAILED_WIDTH, bottom - top, State.FAILED))
    lines.append(_text(FAILED_LEFT + FAILED_WIDTH // 2, (top + bottom) // 2 + 5, "state", State.FAILED.name))
    for (state, event), after in TRANSITIONS.items():
        y = _middle(state)
        if after is State.FAILED:
            left = CENTRE + BOX_WIDTH // 2
            lines.append(f'<path class="off" d="M{left} {y}H{FAILED_LEFT - 2}"/>')
            lines.append(_text((left + FAILED_LEFT) // 2, y - 7, "fault", event.value))
        elif _middle(after) == y + ROW:
            lines.append(f'<path class="on" d="M{CENTRE} {y + BOX_HEIGHT // 2}V{y + ROW - BOX_HEIGHT // 2 - 2}"/>')
            lines.append(_text(CENTRE + 12, y + ROW // 2 + 4, "event", event.value))
        else:
            raise ValueError(f"{state.name} to {after.name}: the layout has no place for this arrow; extend draw()")
    return "\n".join([*lines, "</svg>", ""])


def _middle(state: State) -> int:
    return TOP + ROW * COLUMN.index(state)


def _box(x: int, y: int, width: int, height: int, state: State) -> str:
    return f'<rect class="box {state.name.lower()}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>'


def _text(x: int, y: int, style: str, words: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(words)}</text>'


def _arrowhead(name: str, colour: str) -> str:
    shape = f'<path d="M0 0L10 5L0 10z" fill="{colour}"/>'
    size = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
    return f'<marker id="{name}" {size} orient="auto">{shape}</marker>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
