"""An animated picture of a command in a terminal of 80 columns, recorded while it runs.

    python benchmarks/cast.py docs/pictures/race.svg "outrider compare -n 64"

The command runs in tmux, whose screen is read ten times a second. Frames have the times at which they were seen, except
that a progress bar is shown for at most a second, a frame that does not change for 1.5, and the last for eight. The
picture is one file that loads nothing; where a reader prefers reduced motion it shows the last frame.
"""

import argparse
import html
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

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
    return "'" + f'sleep 1; clear; printf "$ %s\\n" "{quoted}"; {quoted}' + "'"


def durations_s(frames: list[Frame]) -> list[float]:
    """Seconds for which each frame is shown."""
    shown = []
    bar_s = 0.0
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        seconds = following.time_s - frame.time_s if following else 8.0
        if any(re.search(r"\bruns .*━", line) for line in frame.lines):
            seconds = min(seconds, max(0.0, 1.0 - bar_s))
            bar_s += seconds
        shown.append(min(seconds, 8.0 if following is None else 1.5))
    return shown


def svg_line(line: str) -> str:
    """A line with its colours, as SVG."""
    parts, style, column = [], {}, 0
    for codes, text in re.findall(r"(?:\x1b\[([\d;]*)m)|([^\x1b]+)", line):
        if text:
            text = text.replace("\x0e", "").replace("\x0f", "")
            attributes = "".join(f' {name}="{value}"' for name, value in style.items())
            if text.strip():
                length = f' textLength="{len(text) * CHAR_PX:.1f}"'
                parts.append(f'<tspan x="{column * CHAR_PX:.1f}"{length}{attributes}>{html.escape(text)}</tspan>')
            column += len(text)
            continue
        numbers = [int(code or 0) for code in codes.split(";")]
        if numbers[:2] == [38, 5]:
            style["fill"] = COLOURS[numbers[2] % 8]
            continue
        for number in numbers:
            if number == 0:
                style = {}
            elif number == 1:
                style["font-weight"] = "bold"
            elif number == 2:
                style["opacity"] = "0.6"
            elif number == 4:
                style["text-decoration"] = "underline"
            elif 30 <= number <= 37 or 90 <= number <= 97:
                style["fill"] = COLOURS[number % 10]
            elif number == 39:
                style.pop("fill", None)
    return "".join(parts)


def picture(frames: list[Frame], title: str) -> str:
    shown_s = durations_s(frames)
    kept = [(frame, seconds) for frame, seconds in zip(frames, shown_s, strict=True) if seconds > 0]
    total_s = sum(seconds for _, seconds in kept)
    width, height = COLUMNS * CHAR_PX + 2 * MARGIN_PX, ROWS * LINE_PX + 2 * MARGIN_PX
    numbers: dict[str, int] = {}
    screens, steps, at_s = [], [], 0.0
    for index, (frame, seconds) in enumerate(kept):
        uses = []
        for row, line in enumerate(frame.lines[:ROWS]):
            if line:
                number = numbers.setdefault(line, len(numbers))
                uses.append(f'<use href="#l{number}" y="{index * height + row * LINE_PX:g}"/>')
        screens.append("".join(uses))
        steps.append(f"{100 * at_s / total_s:.3f}%{{transform:translateY({-index * height:g}px)}}")
        at_s += seconds
    lines = "".join(
        f'<text id="l{number}" xml:space="preserve">{svg_line(line)}</text>' for line, number in numbers.items()
    )
    last = -(len(kept) - 1) * height
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" \
viewBox="0 0 {width:g} {height:g}" role="img"><title>{html.escape(title)}</title>
<style>text{{font:14px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#d8dee9}}
.f{{animation:k {total_s:.2f}s step-end infinite}}@keyframes k{{{"".join(steps)}}}
@media (prefers-reduced-motion:reduce){{.f{{animation:none;transform:translateY({last:g}px)}}}}</style>
<defs>{lines}</defs><rect width="100%" height="100%" rx="8" fill="#1e222a"/>
<svg x="{MARGIN_PX}" y="{MARGIN_PX + 12}" width="{width - MARGIN_PX:g}" height="{height - MARGIN_PX:g}">
<g class="f">{"".join(screens)}</g></svg></svg>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("command")
    parser.add_argument("--limit-s", type=float, default=170)
    chosen = parser.parse_args()
    frames = record(chosen.command, chosen.limit_s)
    chosen.output.write_text(picture(frames, chosen.command), encoding="utf-8")
    print(f"{len(frames)} frames, {frames[-1].time_s:.0f} s")


main()
