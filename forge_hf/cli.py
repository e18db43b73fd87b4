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


@app.command()
def estimate(
    model: Annotated[
        str | None, typer.Argument(help="A config.json, a folder with one, or a model id of the Hub.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Gradient checkpointing.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="bf16 (weights too), mixed (fp32 weights, bf16 autocast) or fp32.")
    ] = "bf16",
    clip: Annotated[
        bool, typer.Option("--clip/--no-clip", help="Gradient clipping, which is the Trainer's default.")
    ] = True,
    rank: Annotated[int, typer.Option(min=1, help="Rank of GaLore.")] = 128,
    card: Annotated[
        int | None,
        typer.Option(help="GB of a card (8, 12, 16, 24, 32, 48, 80, 141): the largest batch on it."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    hidden: Annotated[int | None, typer.Option(help="In place of MODEL: hidden size of a Llama.")] = None,
    layers: Annotated[int, typer.Option(help="Its layers.")] = 32,
    heads: Annotated[int, typer.Option(help="Its attention heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="Its key-value heads.", show_default="--heads")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Its MLP.", show_default="2.6875 x hidden")] = None,
    vocab: Annotated[int, typer.Option(help="Its vocabulary.")] = 32000,
) -> None:
    """Will it fit? Peak memory of a training step by optimizer, from the model's config alone."""
    from .hf.estimate import EstimateError, Setting, llama_config, load_config
    from .hf.estimate_report import show

    if precision not in ("bf16", "mixed", "fp32"):
        raise typer.BadParameter(f"{precision}. Valid: bf16, mixed, fp32.", param_hint="--precision")
    if (model is None) == (hidden is None):
        raise typer.BadParameter("give either MODEL or --hidden with the other sizes.")
    setting = Setting(batch, length, checkpointing, precision, clip, rank)
    try:
        if hidden is not None:
            config = llama_config(hidden, layers, heads, kv_heads or heads, intermediate, vocab)
        else:
            config = load_config(str(model))
        show(config, setting, card, json)
    except EstimateError as error:
        typer.echo(f"forge-hf estimate: error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="A config.json, a folder with one, or a model id of the Hub.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which path each parameter of a model takes, and why. Builds it without weights."""
    from .hf.estimate import EstimateError, Setting, build, load_config
    from .hf.estimate_report import show_paths

    try:
        show_paths(build(load_config(model), Setting()), json)
    except EstimateError as error:
        typer.echo(f"forge-hf explain: error: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def doctor() -> None:
    """Look at the installation: versions, GPU, autoload, and ten steps against torch's AdamW.

    The exit code is 1 if something keeps forge_hf from working.
    """
    from rich.console import Console
    from rich.table import Table

    from .hf.doctor import examine

    findings = examine()
    table = Table(show_header=False, box=None)
    for finding in findings:
        sign = "" if finding.ok is None else "ok" if finding.ok else "FAULT"
        table.add_row(finding.what, finding.value, sign)
    Console().print(table)
    raise typer.Exit(any(finding.ok is False for finding in findings))


if __name__ == "__main__":
    app()
