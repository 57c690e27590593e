"""The command line: `relax VERB`. Verbs import what they need when they are called, so that help is instant."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from relax import __version__
from relax.errors import RelaxError

app = typer.Typer(
    name="relax",
    help="Asynchronous reinforcement learning for language models: one TOML file a run, section.key=value to override.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunFile = Annotated[Path, typer.Argument(help="The run's TOML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings to override: section.key=value ...")]
RunDir = Annotated[Path, typer.Argument(help="A run folder, for example runs/arithmetic.")]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"relax {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Settings of every verb."""


@app.command()
def train(
    run_file: Annotated[Path | None, typer.Argument(help="The run's TOML file.")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run folder from its last checkpoint.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace the run folder if it exists.")] = False,
) -> None:
    """Train a policy: start the roles, watch them, stop them."""
    from relax.cli.train import train as run

    given = list(overrides or [])
    if resume is not None and run_file is not None:
        given, run_file = [str(run_file), *given], None  # after --resume every argument is an override
    raise typer.Exit(run(run_file, given, resume=resume, overwrite=overwrite))


@app.command()
def sft(run_file: RunFile, overrides: Overrides = None) -> None:
    """Supervised fine-tuning, for example as a warm start."""
    from relax.cli.sft import sft as run

    raise typer.Exit(run(run_file, list(overrides or [])))


@app.command(name="eval")
def evaluate(
    run_file: RunFile,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Evaluate this model folder instead of model.path.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every response as jsonl.")] = None,
) -> None:
    """Evaluate a model on a run file's held-out data, without training."""
    from relax.cli.evaluate import evaluate as run

    raise typer.Exit(run(run_file, list(overrides or []), model=model, out=out))


@app.command()
def check(
    run_file: RunFile,
    overrides: Overrides = None,
    ask_teacher: Annotated[bool, typer.Option(help="Ask a teacher behind a server about a few tokens.")] = False,
    all_media: Annotated[bool, typer.Option(help="Decode the media of all rows, not of the first few.")] = False,
) -> None:
    """Validate a run file, its model and its data without starting anything."""
    from relax.cli.check import check as run

    report = run(run_file, list(overrides or []), ask_teacher=ask_teacher, all_media=all_media)
    typer.echo(report.render())
    raise typer.Exit(report.exit_code)


@app.command()
def explain(run_file: RunFile, overrides: Overrides = None) -> None:
    """Print what each setting turns into: roles, devices, how far generation may run ahead."""
    from relax.cli.explain import explain as run
    from relax.config import load_config

    typer.echo(run(load_config(run_file, list(overrides or []))))


@app.command()
def parity(
    run_file: RunFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; default: NAME-parity beside the run's own.")] = None,
) -> None:
    """Prove that the modes learn the same: runs each on-policy, and one killed and resumed, and compares every bit."""
    from relax.cli.parity import parity as run

    raise typer.Exit(run(run_file, list(overrides or []), steps=steps, out=out))


@app.command()
def status(run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show where a run stands: step, reward, ages, who waits for whom, the fate of every prompt."""
    import json

    from relax.cli.status import render_status, status_dict

    typer.echo(json.dumps(status_dict(run_dir), indent=2) if as_json else render_status(run_dir))


@app.command()
def export(
    run_dir: RunDir,
    out: Annotated[Path, typer.Argument(help="Folder to write the Hugging Face model to.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the last one.")] = None,
) -> None:
    """Write a checkpoint as a folder that from_pretrained loads."""
    from relax.cli.export import export_run

    typer.echo(f"exported to {export_run(run_dir, out, step)}")


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help="reward, data, algorithm or run.")],
    name: Annotated[str, typer.Argument(help="Name of what is made.")],
    folder: Annotated[Path, typer.Option(help="Where to write it.")] = Path(),
) -> None:
    """Write a reward, a data generator, an algorithm or a run file to start from, with its test."""
    from relax.cli.new import new as make
    from relax.cli.new import next_steps

    for path in make(kind, name, folder):
        typer.echo(f"wrote {path}")
    typer.echo("\n".join(["what next:", *(f"  {line}" for line in next_steps(kind, name, folder))]))


def main() -> None:
    """Entry point: a user's mistake is one clear message and exit code 2, never a traceback."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # they would tear the display of the run
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app()
    except RelaxError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
