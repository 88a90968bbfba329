"""An animated picture of a command in a terminal of 80 columns, recorded while it runs; or what a race's page replays.

    python benchmarks/cast.py docs/pictures/race.svg "outrider compare"
    python benchmarks/cast.py docs/pictures/race.json "outrider compare"    # for .ci/site.py

The command runs in tmux, whose screen is read ten times a second. Frames have the times at which they were seen, except
that loading and a progress bar are shown for a second, a frame that does not change for 1.5, and the last for eight.
The picture is one file that loads nothing; where a reader prefers reduced motion it shows the last frame.
"""

import argparse
import html
import json
import re
import shlex
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COLUMNS, ROWS = 80, 24
CHAR_PX, LINE_PX, MARGIN_PX = 8.4, 18, 14
COLOURS = ["#3b4252", "#e06c75", "#7fbf7f", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d8dee9"]
SOCKET = "outrider-cast"


@dataclass(frozen=True)
class Frame:
    """A screen, and the seconds since the start at which it appeared."""

    time_s: float
    lines: tuple[str, ...]


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", "-L", SOCKET, *arguments], capture_output=True, text=True, check=True).stdout


def record(command: str, limit_s: float) -> list[Frame]:
    """Screens of a command from its start to its end, without repetitions."""
    shell = f"PS1='$ ' PS2='' exec bash --norc -c {command_words(command)}"
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), shell)
    tmux("set-option", "-g", "remain-on-exit", "on")
    tmux("set-option", "-g", "remain-on-exit-format", "")
    frames: list[Frame] = []
    start_s = time.monotonic()
    try:
        while time.monotonic() - start_s < limit_s:
            is_over = tmux("list-panes", "-F", "#{pane_dead}").strip() == "1"
            lines = tuple(line.rstrip() for line in tmux("capture-pane", "-e", "-p").splitlines())
            if not frames or frames[-1].lines != lines:
                frames.append(Frame(time.monotonic() - start_s, lines))
            if is_over:
                break
            time.sleep(0.1)
    finally:
        tmux("kill-server")
    return frames


def command_words(command: str) -> str:
    """The argument of ``bash -c``: show the command as if it had been typed, then run it."""
    quoted = command.replace("'", "'\\''")
    return "'" + f'clear; printf "$ %s\\n" "{quoted}"; {quoted}' + "'"


def durations_s(frames: list[Frame]) -> list[float]:
    """Seconds for which each frame is shown."""
    shown, waited_s = [], {"loading": 0.0, "runs": 0.0}
    for frame, following in zip(frames, [*frames, None][1:], strict=True):
        seconds = min(following.time_s - frame.time_s, 1.5) if following else 8.0
        screen = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(frame.lines))
        waits = re.search(r"(loading) |^(runs) [━╸╺]", screen, re.MULTILINE)
        if waits and following:
            name = waits[1] or waits[2]
            seconds = max(0.0, min(seconds, 1.0 - waited_s[name]))
            waited_s[name] += seconds
        shown.append(seconds)
    return shown


def svg_lines(lines: tuple[str, ...]) -> list[str]:
    """The lines of a screen with their colours, as SVG. A style lasts until it is changed, also into the next line."""
    style: dict[str, str] = {}
    drawn = []
    for line in lines:
        parts, column = [], 0
        for codes, text in re.findall(r"(?:\x1b\[([\d;]*)m)|([^\x1b]+)", line):
            if text:
                attributes = "".join(f' {name}="{value}"' for name, value in style.items())
                if text.strip():
                    length = f' textLength="{len(text) * CHAR_PX:.1f}"'
                    parts.append(f'<tspan x="{column * CHAR_PX:.1f}"{length}{attributes}>{html.escape(text)}</tspan>')
                column += len(text)
            else:
                style = restyled(style, [int(code or 0) for code in codes.split(";")])
        drawn.append("".join(parts))
    return drawn


def restyled(style: dict[str, str], codes: list[int]) -> dict[str, str]:
    """A style after a sequence of SGR codes."""
    if codes[:2] == [38, 5]:
        return {**style, "fill": COLOURS[codes[2] % 8]}
    for code in codes:
        if code == 0:
            style = {}
        elif code in (1, 2, 4):
            name, value = {1: ("font-weight", "bold"), 2: ("opacity", "0.6"), 4: ("text-decoration", "underline")}[code]
            style = {**style, name: value}
        elif 30 <= code <= 37 or 90 <= code <= 97:
            style = {**style, "fill": COLOURS[code % 10]}
        elif code == 39:
            style = {name: value for name, value in style.items() if name != "fill"}
    return style


def picture(frames: list[Frame], title: str) -> str:
    shown_s = durations_s(frames)
    kept = [(frame, seconds) for frame, seconds in zip(frames, shown_s, strict=True) if seconds > 0]
    total_s = sum(seconds for _, seconds in kept)
    width, height = COLUMNS * CHAR_PX + 2 * MARGIN_PX, ROWS * LINE_PX + 2 * MARGIN_PX
    numbers: dict[str, int] = {}
    screens, steps, at_s = [], [], 0.0
    for index, (frame, seconds) in enumerate(kept):
        uses = []
        for row, line in enumerate(svg_lines(frame.lines)[:ROWS]):
            if line:
                number = numbers.setdefault(line, len(numbers))
                uses.append(f'<use href="#l{number}" y="{index * height + row * LINE_PX + 14:g}"/>')
        screens.append("".join(uses))
        steps.append(f"{100 * at_s / total_s:.3f}%{{transform:translateY({-index * height:g}px)}}")
        at_s += seconds
    lines = "".join(f'<text id="l{number}" xml:space="preserve">{line}</text>' for line, number in numbers.items())
    last = -(len(kept) - 1) * height
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" \
viewBox="0 0 {width:g} {height:g}" role="img"><title>{html.escape(title)}</title>
<style>text{{font:14px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#d8dee9}}
.f{{animation:k {total_s:.2f}s step-end infinite}}@keyframes k{{{"".join(steps)}}}
@media (prefers-reduced-motion:reduce){{.f{{animation:none;transform:translateY({last:g}px)}}}}</style>
<defs>{lines}</defs><rect width="100%" height="100%" rx="8" fill="#1e222a"/>
<svg x="{MARGIN_PX}" y="{MARGIN_PX}" width="{width - MARGIN_PX:g}" height="{height - 2 * MARGIN_PX:g}">
<g class="f">{"".join(screens)}</g></svg></svg>
"""


def recorded_race(command: str) -> dict[str, Any]:
    """Arguments of ``outrider.race.page.recorded_page``: rounds with their times, then the measurement."""
    with tempfile.TemporaryDirectory() as folder:
        page, document = Path(folder) / "race.html", Path(folder) / "race.json"
        subprocess.run([*shlex.split(command), "--html", str(page), "--json", str(document)], check=True)
        found = re.search(r'id="recording">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
        assert found
        return {"events": json.loads(found[1]), "document": json.loads(document.read_text(encoding="utf-8"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("command")
    parser.add_argument("--limit-s", type=float, default=170)
    chosen = parser.parse_args()
    if chosen.output.suffix == ".json":
        chosen.output.write_text(json.dumps(recorded_race(chosen.command)), encoding="utf-8")
        return
    frames = record(chosen.command, chosen.limit_s)
    chosen.output.write_text(picture(frames, chosen.command), encoding="utf-8")
    print(f"{len(frames)} frames, {frames[-1].time_s:.0f} s")


main()
