"""The console script ``aiockpt``. Commands import their modules when they run, so that help and version are fast."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from aiockpt._version import __version__
from aiockpt.cli.app import Code, Commands, run

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Trust = Annotated[bool, typer.Option("--trust", help="Let a file of torch.save run the code in it.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there already.")]
Dtype = Annotated[
    Literal["float64", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None,
    typer.Option(
        metavar="DTYPE",
        help="Cast floating-point tensors to bfloat16, float16, float32 or float64, bf16 and so on for short.",
    ),
]
Checkpoint = Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint: a directory or a file.")]
Keys = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY", help="Only these keys, containers, or patterns: 'model.*'."),
]

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_UNITS_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_names(text: str) -> Any:
    """Return the names of a manager's steps by a text such as checkpoint-{}; raise typer.BadParameter for another."""
    from aiockpt.manager.scan import StepNames

    try:
        return StepNames(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None


Names = Annotated[
    Any,
    typer.Option(
        "--names", parser=parse_names, metavar="NAME", help="How the manager names its steps: 'checkpoint-{}'."
    ),
]
_STEPS: Any = "step-{:08d}"

app = typer.Typer(
    name="aiockpt",
    cls=Commands,
    invoke_without_command=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as 90s, 15m, 12h, 7d or 2w; raise typer.BadParameter for another."""
    try:
        seconds = float(text[:-1]) * _UNITS_S[text[-1:]]
    except (ValueError, KeyError):
        seconds = -1
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is no duration: use a number with s, m, h, d or w, such as 12h")
    return seconds


def parse_size(text: str) -> int:
    """Return the bytes of a text such as 4096, 512M or 2 GiB, in powers of 1024; raise BadParameter for another."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size: use a number with K, M, G or T, such as 512M or 2GiB")
    return int(float(found[1]) * _UNITS_BYTES[found[2].lower()])


def parse_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of a text such as region=eu or retries=3; raise typer.BadParameter for another."""
    name, mark, value = text.partition("=")
    if not name.isidentifier() or not mark:
        raise typer.BadParameter(f"{text!r} is no NAME=VALUE, such as region=eu", param_hint="--storage-option")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aiockpt {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the trace of an error. May stand behind the command as well.")
    ] = False,
    storage_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the storages of URLs: text, or JSON. May be repeated."),
    ] = None,
) -> None:
    """Checkpoints of PyTorch: look at them, check, compare, convert and remove them.

    Every format that aiockpt reads is understood: its own, torch.distributed.checkpoint, torch.save and safetensors.

    Exit codes: 0 fine, 1 problems or differences were found, 2 wrong usage, 3 it could not be done, 130 interrupted.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(Code.USAGE)
    if storage_option:
        from aiockpt.storage.registry import default_options

        context.with_resource(default_options(dict(map(parse_option, storage_option))))


@app.command()
def ls(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A run's directory, or any other.")] = ".",
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="The mirror of the run: whether it has each step, too.")
    ] = None,
    names: Names = _STEPS,
    as_json: Json = False,
) -> None:
    """List the checkpoints in a directory: state, size, time and metrics.

    Reads no tensors: "complete" means that every file is there with its size. To check the bytes, use verify.
    """
    from aiockpt.cli.ls import ls

    ls(directory, mirror=mirror, names=names, as_json=as_json)


@app.command()
def inspect(
    path: Checkpoint,
    keys: Keys = None,
    stats: Annotated[bool, typer.Option("--stats", help="Read the tensors: minimum, maximum, mean, nan.")] = False,
    depth: Annotated[int | None, typer.Option("--depth", "-d", min=1, help="Show so many levels.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Show all levels, and each of several layers that are alike.")
    ] = False,
    trust: Trust = False,
    as_json: Json = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page for browsers; with --stats, with histograms.")
    ] = None,
) -> None:
    """Show the keys of a checkpoint as a tree, with dtypes, shapes and bytes.

    On a terminal, deep trees are shown to the level that fits, and layers that are alike are shown once.
    """
    from aiockpt.cli.inspect import inspect, write_page

    keys = keys or []
    if html is None:
        run(inspect(path, keys, stats=stats, depth=depth, everything=everything, as_json=as_json, trust=trust))
    elif as_json:
        raise typer.BadParameter("--html and --json can't be given together")
    else:
        run(write_page(path, keys, html, stats=stats, trust=trust))


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, the older one.")],
    b: Annotated[str, typer.Argument(metavar="B", help="A checkpoint.")],
    keys: Keys = None,
    rtol: Annotated[float, typer.Option(min=0, help="Tolerate this ratio to the larger absolute value.")] = 0.0,
    atol: Annotated[float, typer.Option(min=0, help="Tolerate this difference.")] = 0.0,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints of any formats: their keys, dtypes, shapes and values.

    Without tolerances values are the same if all bits are. Large tensors are read part by part.

    Exit codes: 0 no differences, 1 differences, 2 wrong usage, 3 it could not be done.
    """
    from aiockpt.cli.diff import Tolerance, diff

    tolerance = Tolerance(rtol, atol)
    raise typer.Exit(run(diff(a, b, keys or (), tolerance=tolerance, as_json=as_json, trust=trust)))


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint of any format.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where to write: a directory or a file.")],
    to: Annotated[
        Literal["dcp", "torch", "safetensors"] | None,
        typer.Option(help="The format. By default, what the ending of DST stands for, else dcp."),
    ] = None,
    dtype: Dtype = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Only this key, container, or pattern: 'model.*'. May be repeated."),
    ] = None,
    overwrite: Overwrite = False,
    trust: Trust = False,
) -> None:
    """Convert a checkpoint to another format, or to another dtype, or leave out keys.

    dcp is a directory, torch a file, and safetensors a file if DST ends so, else a directory with files of 5 GB at
    most. Memory is bounded. DST appears at once and complete, or not at all.
    """
    from aiockpt.cli.convert import convert

    run(convert(source, target, to=to, keys=keys, dtype=dtype, overwrite=overwrite, trust=trust))


@app.command()
def verify(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Checkpoints, or directories of them."),
    ],
    as_json: Json = False,
) -> None:
    """Check every byte of checkpoints: files, sizes, CRCs, framing, and whether they match the metadata.

    Exit codes: 0 all are sound, 1 there are errors, 3 something can't be read at all.
    """
    from aiockpt.cli.verify import verify

    raise typer.Exit(run(verify(paths, as_json=as_json)))


@app.command()
def prune(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of a manager's run.")],
    latest: Annotated[
        int | None, typer.Option("--keep-latest", min=1, metavar="N", help="Keep so many of the newest.")
    ] = None,
    every: Annotated[
        list[int] | None, typer.Option("--keep-every", min=1, metavar="N", help="Keep the multiples of this number.")
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--keep-within", parser=parse_duration, metavar="TIME", help="Keep what is younger: 90m, 12h, 7d, 2w."
        ),
    ] = None,
    best: Annotated[
        list[str] | None,
        typer.Option("--keep-best", metavar="N:METRIC[:max]", help="Keep the best: 2:loss, 1:accuracy:max."),
    ] = None,
    names: Names = _STEPS,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove the steps of a run that none of these policies keeps.

    The newest complete step always stays, and so do damaged ones and what is no step of a manager. While a manager
    writes to the run, only --dry-run is possible.
    """
    from aiockpt.cli.removing import policies_of, prune

    try:
        policies = policies_of(latest, every or (), within, best or ())
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None
    raise typer.Exit(prune(directory, policies, names=names, dry_run=dry_run, as_json=as_json))


@app.command()
def rm(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Checkpoints: directories or files."),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Delete checkpoints, each at once as a whole. Nothing else is deleted: a directory with other files stays."""
    from aiockpt.cli.removing import rm

    raise typer.Exit(rm(paths, yes=yes))


@app.command()
def clean(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory that holds checkpoints.")] = ".",
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=parse_duration, metavar="TIME", help="Also what unknown processes left, if unchanged for: 12h, 7d."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove what killed processes have left: unfinished, hidden directories. What still is in use stays."""
    from aiockpt.cli.removing import clean

    clean(directory, older_than_s=older_than, as_json=as_json)


@app.command()
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, or a URL; it may not be there yet.")],
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="CMD",
            help="A shell command to run: it has AIOCKPT_STEP and AIOCKPT_PATH in its environment.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End after the first version.")] = False,
    names: Names = _STEPS,
) -> None:
    """Follow a run: print each new version, and run a command for it. The newest wins. Ends with Ctrl-C.

    Exit codes: 0 fine, 1 the command has failed for the last version.
    """
    from aiockpt.cli.watch import watch

    raise typer.Exit(watch(run, command, names=names, once=once))


@app.command()
def mirror(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The directory of a manager's run.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Its mirror: a URL, or another directory.")],
    bandwidth: Annotated[
        int | None, typer.Option(parser=parse_size, metavar="BYTES", help="Copy at most so much per second: 200M.")
    ] = None,
    names: Names = _STEPS,
    as_json: Json = False,
) -> None:
    """Copy the steps of a run that its mirror lacks, such as after the job has ended before its uploads.

    Copies that were interrupted go on with what is whole. Nothing is deleted. While a manager writes to the mirror,
    this is refused.
    """
    from aiockpt.cli.mirror import mirror

    raise typer.Exit(mirror(directory, url, names=names, bytes_per_s=bandwidth, as_json=as_json))


@app.command()
def bench(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A directory on the disk to measure.")] = ".",
    size: Annotated[
        int, typer.Option("--size", parser=parse_size, metavar="BYTES", help="Save at most so much at a time.")
    ] = "1GiB",  # type: ignore[assignment] # as it is typed
    as_json: Json = False,
) -> None:
    """Measure how fast a disk saves and loads, and print the settings for it. Nothing is left there.

    Saves and loads a state past the page cache and through it, with several numbers of threads.
    """
    from aiockpt.cli.bench import bench

    bench(directory, size_bytes=size, as_json=as_json)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=2, help="How many steps to train.")] = 32,
    every: Annotated[int, typer.Option(min=1, help="How many steps to train between two checkpoints.")] = 8,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir", file_okay=False, help="Where checkpoints go, and stay; must be empty. By default they are removed."
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to train.")] = "cpu",
    layers: Annotated[int, typer.Option(min=1, hidden=True)] = 4,
    width: Annotated[int, typer.Option(min=4, hidden=True)] = 256,
) -> None:
    """A model trains, dies in the middle of a save, and resumes exactly. Takes half a minute, on busy cores a minute.

    A small GPT learns from the sources of aiockpt. It saves beside training, and the same states with torch.save, to
    compare the time that training waits. Then another process does the same run, and kills itself while it saves a
    checkpoint. The run is resumed, and compared with the first one: every loss, and every bit of the final states.

    Exit codes: 0 the runs are identical, 1 they differ, 2 wrong usage, 3 the demo could not be completed.
    """
    if steps < 2 * every:
        raise typer.BadParameter("at least two checkpoints are needed: --steps must be twice --every, or more")
    if width % 4:
        raise typer.BadParameter("--width must be a multiple of 4")
    from aiockpt.cli.demo import Config, run_demo

    config = Config(layers=layers, width=width, steps=steps, every=every, device=device)
    raise typer.Exit(run_demo(config, directory))


@app.command()
def docs(
    topic: Annotated[str | None, typer.Argument(help="The page to show. By default, the list of pages.")] = None,
    file: Annotated[Path | None, typer.Argument(help="For tutorial: the file to write, ./tutorial.ipynb.")] = None,
) -> None:
    """Show the documentation: a list of topics, or one page. The tutorial is a notebook, which is written to a file."""
    from aiockpt.cli.docs import TUTORIAL, export_tutorial, show_topic, show_topics

    if topic == TUTORIAL:
        export_tutorial(file or Path(f"{TUTORIAL}.ipynb"))
        return
    if file is not None:
        raise typer.BadParameter(f"only {TUTORIAL} is written to a file", param_hint="FILE")
    if topic is None:
        show_topics()
        return
    show_topic(topic)
