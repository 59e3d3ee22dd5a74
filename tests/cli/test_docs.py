import pydoc
from importlib.resources import files

import pytest
from rich.console import Console
from typer.testing import CliRunner

import aiockpt.cli.docs
from aiockpt.cli.docs import topics
from aiockpt.cli.main import app

FOLDER = files("aiockpt") / "docs"
FILES = [page for folder in (FOLDER, FOLDER / "integrations") for page in folder.iterdir() if page.name.endswith(".md")]
PAGES = {page.name.removesuffix(".md"): page.read_text() for page in FILES}


def test_no_two_pages_have_the_same_name():
    assert len(PAGES) == len(FILES)


def test_docs_without_a_topic_lists_topics_with_summaries():
    result = CliRunner().invoke(app, ["docs"])
    assert result.exit_code == 0
    for topic, text in PAGES.items():
        title, summary, _ = text.split("\n\n", 2)
        assert title.startswith("# ")
        assert "\n" not in summary
        assert any(line.split(maxsplit=1) == [topic, summary] for line in result.output.splitlines()), topic


@pytest.mark.parametrize("topic", sorted(PAGES))
def test_pipe_gets_markdown_source(topic):
    result = CliRunner().invoke(app, ["docs", topic])
    assert (result.exit_code, result.output) == (0, PAGES[topic])


def test_terminal_gets_rendered_page(monkeypatch, capsys):
    monkeypatch.setattr(aiockpt.cli.docs, "console", lambda: Console(force_terminal=True, width=100))
    aiockpt.cli.docs.show_topic("threat-model")
    output = capsys.readouterr().out
    assert "\x1b[" in output
    assert "Threat model" in output
    assert "# Threat model" not in output


def test_page_is_paged_on_a_terminal(monkeypatch):
    paged = []
    monkeypatch.setattr(pydoc, "pager", paged.append)
    monkeypatch.setattr(aiockpt.cli.docs, "console", lambda: Console(force_terminal=True, width=100))
    aiockpt.cli.docs.show_topic("threat-model")
    assert "Threat model" in "".join(paged)


def test_unknown_topic_error_lists_the_topics():
    result = CliRunner().invoke(app, ["docs", "nonsense"], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert all(topic in result.output for topic in topics())


def test_tutorial_is_written_to_a_new_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, name in (([], "tutorial.ipynb"), (["mine.ipynb"], "mine.ipynb")):
        result = CliRunner().invoke(app, ["docs", "tutorial", *arguments])
        assert (result.exit_code, name in result.output) == (0, True)
        assert (tmp_path / name).read_bytes() == (FOLDER / "tutorial.ipynb").read_bytes()
    (tmp_path / "mine.ipynb").write_text("mine")
    result = CliRunner().invoke(app, ["docs", "tutorial", "mine.ipynb"])
    assert (result.exit_code, "exists already: name another file" in " ".join(result.output.split())) == (3, True)
    assert (tmp_path / "mine.ipynb").read_text() == "mine"
    assert CliRunner().invoke(app, ["docs", "cli", "mine.ipynb"]).exit_code == 2
