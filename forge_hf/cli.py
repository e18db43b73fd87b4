"""The `forge-hf` command. It parses and prints; the work is elsewhere and imported when needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"forge-hf {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Optimizers for Hugging Face that consume weight gradients instead of storing them."""


@app.command()
def demo(
    optim: Annotated[
        str, typer.Option(help="Optimizer to compare with adamw_torch: forge_adamw, forge_lion or forge_sgd.")
    ] = "forge_adamw",
    steps: Annotated[int | None, typer.Option(help="Steps per run.", show_default="240")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    output_dir: Annotated[Path, typer.Option(help="Where the results go.")] = Path("forge_hf_demo"),
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and 20 steps: seconds.")] = False,
) -> None:
    """Train a small RoBERTa twice, with adamw_torch and with ours, and compare. No downloads.

    Takes a minute or two on two idle cores. Prints loss, accuracy, memory and time side by side, and writes a
    plot. The exit code is 1 if forge_adamw does not end where adamw_torch does.
    """
    from rich.console import Console

    from .hf.demo import DemoError, DemoSettings, run_demo

    settings = DemoSettings.quick() if quick else DemoSettings()
    steps = settings.steps if steps is None else steps
    settings = replace(settings, optim=optim, seed=seed, output_dir=output_dir, steps=steps)
    try:
        code = run_demo(settings, Console())
    except DemoError as error:
        typer.echo(f"forge-hf demo: error: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
