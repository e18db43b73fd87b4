"""Draw the committed CSVs: whole steps as bars, kernels as their time over cuBLAS dW.

    python benchmarks/plots.py [FILE.csv ...] [--output DIR]

Without files: every CSV of `step.py` and `kernels.py` under benchmarks/results/, told by its columns. A PNG
of the same name goes next to the CSV or into --output. A line without figures is drawn as its result ("out of
memory"). Colours: Okabe and Ito's eight, which stay apart for colour-blind readers; hatching repeats them.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"
#: Start of a line's name -> its colour and hatch.
FAMILIES = {
    "forward": ("#999999", ""),
    "adamw_torch": ("#0072B2", "//"),
    "bitsandbytes": ("#E69F00", ".."),
    "FlashAdamW": ("#009E73", "\\\\"),
    "forge_adamw": ("#D55E00", ""),
}
#: Column of kernels.csv -> label, colour, line style and marker.
CURVES = {
    "fused_fp32_ms": ("cuBLAS + torch fused, fp32", "#56B4E9", ":", "s"),
    "fused_bf16_ms": ("cuBLAS + torch fused, bf16 moments", "#0072B2", ":", "D"),
    "bitsandbytes_8bit_ms": ("cuBLAS + bitsandbytes, 8-bit moments", "#E69F00", "--", "^"),
    "flashoptim_8bit_ms": ("cuBLAS + FlashOptim, 8-bit moments", "#009E73", "--", "v"),
    "ours_fp32_ms": ("ours, fp32", "#CC79A7", "-", "s"),
    "ours_bf16_ms": ("ours, bf16 moments", "#D55E00", "-", "D"),
    "ours_8bit_ms": ("ours, 8-bit moments", "#000000", "-", "o"),
}

Row = dict[str, str]


def style_of(name: str) -> tuple[str, str]:
    """Colour and hatch of a line."""
    return next((style for start, style in FAMILIES.items() if name.startswith(start)), ("#CC79A7", ""))


def grouped(rows: list[Row], column: str) -> dict[str, list[Row]]:
    """Rows by a column's values, in the order of the file."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get(column, ""), []).append(row)
    return groups


def draw_bars(axes: plt.Axes, rows: list[Row], column: str, label: str, named: bool) -> None:
    """One horizontal bar per line, its figure written at its end."""
    values = [float(row[column] or 0) for row in rows]
    top = max(values, default=0) or 1.0
    for place, (row, value) in enumerate(zip(rows, values, strict=True)):
        colour, hatch = style_of(row["line"])
        axes.barh(place, value, color=colour, hatch=hatch, edgecolor="white", height=0.75)
        text = f"{value:.4g}" if row[column] else row.get("result") or "no figure"
        axes.text(value + top * 0.01, place, text, va="center", fontsize=8)
    names = [row["line"] for row in rows]
    axes.set_yticks(range(len(rows)), names if named else [""] * len(rows), fontsize=9)
    axes.set_xlim(0, top * 1.22)
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def plot_steps(rows: list[Row], path: Path) -> None:
    """Step time and peak memory, a row of two panels per setting."""
    settings = grouped(rows, "setting")
    heights = [len(lines) + 1.6 for lines in settings.values()]
    figure, grid = plt.subplots(
        len(settings),
        2,
        figsize=(11, 0.27 * sum(heights) + 0.8),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for panels, (setting, lines) in zip(grid, settings.items(), strict=True):
        draw_bars(panels[0], lines, "step_ms", "ms per step, median", named=True)
        draw_bars(panels[1], lines, "peak_gib", "peak GiB", named=False)
        panels[0].set_title(setting, loc="left", fontsize=10, fontweight="bold")
    figure.suptitle(f"Whole training steps, {source(rows)}", fontsize=11)
    save(figure, path)


def plot_kernels(rows: list[Row], path: Path) -> None:
    """Time over cuBLAS dW against the number of tokens, a panel per shape."""
    shapes: dict[str, list[Row]] = {}
    for row in rows:
        title = " ".join(filter(None, (row.get("model", ""), f"{row['N']}×{row['K']}")))
        shapes.setdefault(title, []).append(row)
    columns = min(len(shapes), 4)
    height = -(-len(shapes) // columns)
    figure, grid = plt.subplots(
        height,
        columns,
        figsize=(3.4 * columns, 3.1 * height + 1),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for axes in grid.flat[len(shapes) :]:
        axes.axis("off")
    for axes, (title, points) in zip(grid.flat, shapes.items(), strict=False):
        for column, (label, colour, dashes, marker) in CURVES.items():
            known = [row for row in points if row.get(column)]
            tokens = [int(row["T"]) for row in known]
            ratios = [float(row[column]) / float(row["dw_ms"]) for row in known]
            if known:
                axes.plot(tokens, ratios, dashes, color=colour, marker=marker, markersize=4, label=label)
        axes.axhline(1, color="#999999", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        every = sorted({int(row["T"]) for row in points})
        axes.set_xticks(every, [str(count) for count in every], fontsize=8, rotation=30 * (len(every) > 4))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens T", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("dW and update over cuBLAS dW alone", fontsize=8)
    handles, labels = max(
        (axes.get_legend_handles_labels() for axes in grid.flat), key=lambda pair: len(pair[1])
    )
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(3, columns), fontsize=8, frameon=False
    )
    figure.suptitle(source(rows), fontsize=10)
    save(figure, path)


def source(rows: list[Row]) -> str:
    """Card and versions, from the first row that has them."""
    row = next((row for row in rows if row.get("card")), rows[0])
    found = [f"{name} {row[name]}" for name in ("torch", "transformers", "triton") if row.get(name)]
    return ", ".join([row.get("card") or "unknown card", *found])


def save(figure: plt.Figure, path: Path) -> None:
    """Write the PNG."""
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)


def draw(file: Path, folder: Path) -> bool:
    """Draw one CSV; False if it is of neither kind."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    path = folder / f"{file.stem}.png"
    if rows and {"setting", "line", "step_ms", "peak_gib"} <= rows[0].keys():
        plot_steps(rows, path)
    elif rows and {"N", "K", "T", "dw_ms"} <= rows[0].keys():
        plot_kernels(rows, path)
    else:
        return False
    return True


def main() -> int:
    """Draw; 1 if a file that was named is of neither kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, help="folder of the PNGs")
    arguments = parser.parse_args()
    unknown = [
        file
        for file in arguments.files or sorted(RESULTS.glob("*.csv"))
        if not draw(file, arguments.output or file.parent)
    ]
    if arguments.files and unknown:
        print("neither of step.py nor of kernels.py: " + ", ".join(map(str, unknown)), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
