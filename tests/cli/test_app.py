"""The behaviour that all commands share, in real processes: exit codes, one-line errors, signals, pipes, imports."""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from aiockpt.cli.app import Code, CommandError, Commands, report
from aiockpt.errors import CorruptCheckpointError
from tests import commands
from tests.cli.checkpoints import FORMATS, make

COMMAND = (sys.executable, "-m", "aiockpt")
TIMEOUT_S = 120


def run(*arguments, **kwargs):
    environment = os.environ | {"COLUMNS": "200"}
    options = {"capture_output": True, "text": True, "timeout": TIMEOUT_S, "check": False, "env": environment}
    return subprocess.run([*COMMAND, *map(str, arguments)], **(options | kwargs))


def make_app(body):
    """Return an application with one command, ``it``."""
    app = typer.Typer(cls=Commands)
    app.callback()(lambda: None)
    app.command("it")(body)
    return app


def invoke(body, *arguments):
    return CliRunner().invoke(make_app(body), [*arguments, "it"] if "--" not in arguments else list(arguments))


def make_failing(error):
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CommandError("no\nsuch thing"), "aiockpt: no such thing\n"),
        (CorruptCheckpointError("a/b is \x1b[31mdamaged"), "aiockpt: a/b is \\x1b[31mdamaged\n"),
        (FileNotFoundError(2, "No such file", "x"), "aiockpt: x: No such file\n"),
        (ImportError("this needs x: pip install x"), "aiockpt: this needs x: pip install x\n"),
        (ImportError("a bug"), "aiockpt: ImportError: a bug (--debug shows the trace)\n"),
        (ValueError("a bug"), "aiockpt: ValueError: a bug (--debug shows the trace)\n"),
    ],
)
def test_error_is_one_line_and_exit_code_3(error, line):
    result = invoke(make_failing(error))
    assert (result.exit_code, result.stderr, result.stdout) == (Code.FAILED, line, "")


def test_debug_shows_the_traceback_before_the_line():
    result = invoke(make_failing(CommandError("no such thing")), "--debug")
    assert result.exit_code == Code.FAILED
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.endswith("\naiockpt: no such thing\n")


def test_debug_after_two_hyphens_is_an_argument():
    def body(name: str) -> None:
        typer.echo(name)

    result = invoke(body, "it", "--", "--debug")
    assert (result.exit_code, result.stdout) == (0, "--debug\n")


def test_exit_code_of_the_command_is_that_of_the_process():
    assert invoke(make_failing(typer.Exit(Code.PROBLEMS))).exit_code == 1
    assert invoke(make_failing(KeyboardInterrupt())).exit_code == 130
    assert invoke(lambda: None).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["nonsense"], ["docs", "--nonsense"], ["docs", "a", "b"], ["--nonsense"]])
def test_wrong_usage_is_one_line_and_exit_code_2(arguments):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("aiockpt: ")
    assert done.stderr.count("\n") == 1
    assert "--help shows the usage" in done.stderr


@pytest.mark.slow
def test_help_is_shown_without_a_command():
    done = run()
    assert done.returncode == 2
    assert "Exit codes" in done.stdout
    assert run("--help").stdout == run("-h").stdout == done.stdout


def test_each_command_has_help():
    result = commands.invoke("--help")
    for command in commands.program().registered_commands:
        name = command.name or command.callback.__name__
        assert f"│ {name} " in result.stdout
        helped = commands.invoke(name, "--help")
        assert helped.exit_code == 0
        assert f"aiockpt {name}" in helped.stdout.replace("root", "aiockpt")


BODY = """
import sys, time, typer
from aiockpt.cli.app import Commands
app = typer.Typer(cls=Commands)
app.callback()(lambda: None)
@app.command()
def it():
    try:
        print("waiting", flush=True)
        while True:
            time.sleep(0.01)  # signal.pause() would sleep on if the signal came just before it
    finally:
        print("cleaned up", flush=True)
app(prog_name="aiockpt", args=["it"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_command_cleans_up_after_a_signal(number, code):
    was = signal.signal(number, signal.default_int_handler)  # nohup ignores the signal, and a child would inherit that
    process = subprocess.Popen([sys.executable, "-c", BODY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(number, was)
    try:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        assert (*process.communicate(timeout=TIMEOUT_S), process.returncode) == ("cleaned up\n", "", code)
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_a_background_command():
    # Shells start background commands with SIGINT ignored.
    command = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{BODY}"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=TIMEOUT_S)[0] == "cleaned up\n"
    assert process.returncode == 143


def test_pipe_closed_during_json_output_is_silent():
    code = (
        "import sys; from aiockpt.cli.output import print_json\n"
        "import typer; from aiockpt.cli.app import Commands\n"
        "app = typer.Typer(cls=Commands); app.callback()(lambda: None)\n"
        "app.command('it')(lambda: print_json(['x' * 1000] * 10000))\n"
        "app(args=['it'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(TIMEOUT_S) == Code.CLOSED_PIPE


def test_closed_pipe_is_silent():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run("docs", "saving", capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (Code.CLOSED_PIPE, "")


def test_closed_pipe_is_silent_on_rich_consoles():
    def body() -> None:
        from aiockpt.cli.output import console

        console().on_broken_pipe()

    result = invoke(body)
    assert (result.exit_code, result.stderr) == (Code.CLOSED_PIPE, "")


# --- the terminal -----------------------------------------------------------------------------------------


def in_terminal(code, columns=100):
    """Run a program whose standard error is a terminal; return the terminal's output."""
    terminal, end = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=end, stdout=subprocess.PIPE, env=environment)
    os.close(end)
    seen = b""
    try:
        while True:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # how Linux reports that the other end of a terminal is closed
                break
            if not data:
                break
            seen += data
        assert process.wait(TIMEOUT_S) == 0
    finally:
        os.close(terminal)
        process.kill()
        process.communicate()
    return seen.decode()


BAR = """
import threading
from aiockpt.cli import output
output._AFTER_S = {after}
with output.bar("checking [red]step[/bold]", 4 << 20) as bar:
    bar.advance(1 << 20)
    {wait}
    bar.advance(2 << 20)
"""
SHOWN = (
    "list(map(threading.Thread.join, [each for each in threading.enumerate() if isinstance(each, threading.Timer)]))"
)


def test_bar_appears_in_a_terminal_with_its_text_as_it_is():
    seen = in_terminal(BAR.format(after=0, wait=SHOWN))
    assert "checking [red]step[/bold]" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert "3.0/4.0 MiB" in seen


def test_no_bar_for_work_of_less_than_a_second():
    assert in_terminal(BAR.format(after=3600, wait="")) == ""


def test_no_bar_without_a_terminal():
    done = subprocess.run(
        [sys.executable, "-c", BAR.format(after=0, wait=SHOWN)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


# --- imports ----------------------------------------------------------------------------------------------


FAST = [["--help"], ["--version"], ["docs"], ["docs", "saving"], ["nonsense"], ["ls", "."], ["ls", ".", "--json"]]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", FAST, ids=" ".join)
def test_commands_that_read_no_tensor_do_not_import_torch(arguments, tmp_path, monkeypatch):
    for form in FORMATS:
        make(form, tmp_path / form)
    monkeypatch.chdir(tmp_path)
    code = (
        f"import runpy, sys\nsys.argv[1:] = {arguments!r}\n"
        "try: runpy.run_module('aiockpt')\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'anyio'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("leave it out with keys=", "leave it out by naming their keys"),
        (
            "x is no tensor: choose the tensors with keys=",
            "x is no tensor: choose the tensors by their keys (--keys of convert), such as model",
        ),
        (
            "no 'a'; see what it holds with aiockpt.open(path), or pass strict=False.",
            "no 'a'; aiockpt inspect shows what it holds.",
        ),
        ("Install it, or register one by aiockpt.storage.register('a', factory)", "Install it"),
        ("If you trust it, pass trust=True.", "If you trust it, pass --trust."),
        ("pass safe_globals=[a.B, c.D] and more, or trust=True.", "pass --trust."),
        ("or pass overwrite=True to replace it", "or pass --overwrite to replace it"),
        ("it is written by 7: end that, or pass read_only=True", "it is written by 7: end that"),
    ],
)
def test_advice_names_the_flags_of_the_command(message, shown, capsys):
    report(message)
    assert capsys.readouterr().err == f"aiockpt: {shown}\n"


@pytest.mark.parametrize("command", [[], ["inspect"], ["convert"], ["prune"]])
def test_help_shows_no_type_behind_a_flag(command):
    result = commands.invoke(*command, "--help", env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert not re.search(r"bool|list\[|(PATH|KEY|SRC|DIR) +<", result.stdout)
