"""Output in a terminal (a pty) has colours and fits its width; output in a pipe is plain text."""

import functools
import os
import pty
import re
import subprocess

import pytest
import torch

import aiockpt
from tests.cli.checkpoints import make

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with aiockpt.SyncCheckpointManager(home / "run", keep=[aiockpt.KeepLatest(2), aiockpt.KeepBest(1, "loss")]) as run:
        for step in (100, 200, 300):
            run.save(step, {"w": torch.ones(step)}, metrics={"loss": 1 / step, "accuracy": step / 400})
    make("dcp", home / "run" / ("long" * 20))
    with aiockpt.SyncCheckpointManager(home / "other") as run:
        metrics = {"validation_perplexity_of_the_second_set": 30.25, "accuracy": 0.5}
        run.save(7, {"a.rather.long.name.of.a.parameter": torch.ones(3), "lr": torch.tensor(0.5)}, metrics=metrics)
        run.save(8, {"a.rather.long.name.of.a.parameter": torch.zeros(3), "lr": torch.tensor(0.25)})
    state = {f"h.{n}.{'模型' * 30}.weight": torch.full((2, n + 1), float(n)) for n in range(30)}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({f"block{b}": state for b in range(8)}, home / "wide")
        long = "container_of_" * 4
        ckpt.save({f"{long}.{name}": torch.ones(300, 300) for name in ("weight", "bias")}, home / "long")
        ckpt.save({"nan": torch.tensor([float("nan"), 1.0])}, home / "nan")
    return home


@pytest.fixture(scope="module")
def in_terminal(home, python):
    """Function that runs a command in a terminal of ``columns`` columns; it returns the output and the exit code."""
    return functools.partial(_in_terminal, python, home)


def _in_terminal(python, cwd, *arguments, columns, **environment):
    terminal, end = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"COLUMNS": str(columns), "TERM": "xterm-256color"} | environment
    # The shell keeps its end of the pty open until the test has read all output, because output that is
    # still unread when the last end closes may be lost.
    script = '"$@" <&1; echo "END $?"; read _'
    command = ["sh", "-c", script, "sh", *python, "-m", "aiockpt", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=end, stderr=end, env=env, cwd=cwd)
    os.close(end)
    seen = b""
    try:
        while (ended := re.search(rb"END ([0-9]+)\r\n$", seen)) is None:
            seen += os.read(terminal, 1 << 16)
        return seen[: ended.start()].decode().replace("\r\n", "\n"), int(ended[1])
    finally:
        process.communicate()
        os.close(terminal)


def cells(line):
    from rich.cells import cell_len

    return cell_len(ESCAPE.sub("", line))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 160])
@pytest.mark.parametrize(
    "arguments",
    [["ls", "run"], ["ls"], ["inspect", "wide"], ["inspect", "wide", "--depth", "9"], ["inspect", "nan", "--stats"]],
    ids=" ".join,
)
def test_lines_fit_the_terminal(arguments, columns, in_terminal):
    shown, code = in_terminal(*arguments, columns=columns)
    assert code == 0, shown
    table = [line for line in shown.splitlines() if not ESCAPE.sub("", line).startswith(("metadata:", "/", "Direc"))]
    assert max(map(cells, table)) <= columns
    assert "\x1b[" in shown


@pytest.mark.slow
def test_deep_tree_is_cut_to_the_levels_that_fit(in_terminal):
    shown, _ = in_terminal("inspect", "wide", columns=100)
    assert len(shown.splitlines()) < 110
    assert "Levels below 1 are not shown; --all shows everything." in shown
    everything, code = in_terminal("inspect", "wide", "--all", columns=100)
    assert code == 0, everything
    assert len(everything.splitlines()) > 240


def test_name_of_a_container_is_as_long_as_its_line_allows(in_terminal):
    shown, _ = in_terminal("inspect", "long", columns=80)
    (line,) = [ESCAPE.sub("", line) for line in shown.splitlines() if "container" in line]
    assert line.split() == ["container_of_" * 4, "703.1", "KiB"]
    assert cells(line) == cells(next(line for line in shown.splitlines() if "weight" in line))


def test_nan_counts_are_highlighted(in_terminal):
    shown, _ = in_terminal("inspect", "nan", "--stats", columns=80)
    assert re.search(r"\x1b\[1;31m *1\x1b\[0m", shown)


def test_states_are_coloured_unless_no_color_is_set(in_terminal):
    shown, _ = in_terminal("ls", "run", columns=100)
    assert "\x1b[32mcomplete\x1b[0m" in shown
    plain, _ = in_terminal("ls", "run", columns=100, NO_COLOR="1")
    assert "\x1b[32m" not in plain
    assert ESCAPE.sub("", plain) == ESCAPE.sub("", shown)


@pytest.mark.parametrize("arguments", [["ls", "run"], ["inspect", "wide"], ["docs", "cli"]], ids=" ".join)
def test_pipe_gets_plain_text_in_full(arguments, home, python):
    command = [*python, "-m", "aiockpt", *arguments]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    if arguments[0] != "docs":
        assert "long" * 20 in done.stdout or "模型" * 30 in done.stdout


def test_documentation_is_rendered_and_paged(in_terminal):
    shown, code = in_terminal("docs", "cli", columns=80, PAGER="sed 's/^/paged: /'")
    assert code == 0
    assert shown.count("paged: ") == shown.count("\n") > 100
    assert "\x1b[1m" in shown
    assert "# The command line" not in shown


@pytest.mark.parametrize("topic", ["observing", "scale"])
def test_documentation_is_not_cut_in_a_narrow_terminal(topic, in_terminal):
    shown, code = in_terminal("docs", topic, columns=80, PAGER="cat")
    assert code == 0
    assert "…" not in shown
    assert max(map(cells, shown.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "other"],
        ["diff", "other/step-00000007", "other/step-00000008"],
        ["inspect", "a path of some words that is not there, and that is longer than a line"],
        ["inspect", "other/step-00000007", "--stats"],
        ["verify", "other"],
        ["docs"],
    ],
    ids=" ".join,
)
def test_words_are_whole_and_nothing_is_cut(arguments, in_terminal):
    narrow, wide = (in_terminal(*arguments, columns=columns)[0] for columns in (80, 300))
    assert max(map(cells, narrow.splitlines())) <= 80
    ignored = re.compile(r"[0-9.]+ s\)|[0-9.]+")  # a duration differs
    words = [sorted(ignored.sub("", ESCAPE.sub("", shown)).split()) for shown in (narrow, wide)]
    assert words[0] == words[1]


@pytest.mark.parametrize("arguments", [["--help"], ["prune", "--help"], []], ids=" ".join)
def test_help_colours_are_legible_on_light_and_dark(arguments, in_terminal):
    shown, _ = in_terminal(*arguments, columns=100)
    assert "\x1b[1m" in shown
    assert not re.search(r"\x1b\[(?:[0-9]+;)*(?:3[0367]|9[0-7])(?:;[0-9]+)*m", shown)  # black, yellow, cyan, white
