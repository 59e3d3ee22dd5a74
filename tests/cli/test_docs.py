from importlib.resources import files

import pytest

from tests.commands import invoke

FOLDER = files("aiockpt") / "docs"
FILES = [page for folder in (FOLDER, FOLDER / "integrations") for page in folder.iterdir() if page.name.endswith(".md")]
PAGES = {page.name.removesuffix(".md"): page.read_text() for page in FILES}


def test_no_two_pages_have_the_same_name():
    assert len(PAGES) == len(FILES)


def test_docs_without_a_topic_lists_topics_with_summaries():
    result = invoke("docs")
    assert result.exit_code == 0
    for topic, text in PAGES.items():
        title, summary, _ = text.split("\n\n", 2)
        assert title.startswith("# ")
        assert "\n" not in summary
        assert any(line.split(maxsplit=1) == [topic, summary] for line in result.output.splitlines()), topic


@pytest.mark.parametrize("topic", sorted(PAGES))
def test_pipe_gets_markdown_source(topic):
    result = invoke("docs", topic)
    assert (result.exit_code, result.output) == (0, PAGES[topic])


def test_unknown_topic_error_lists_the_topics():
    result = invoke("docs", "nonsense", env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert all(topic in result.output for topic in [*PAGES, "tutorial"])


def test_tutorial_is_written_to_a_new_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, name in (([], "tutorial.ipynb"), (["mine.ipynb"], "mine.ipynb")):
        result = invoke("docs", "tutorial", *arguments)
        assert (result.exit_code, name in result.output) == (0, True)
        assert (tmp_path / name).read_bytes() == (FOLDER / "tutorial.ipynb").read_bytes()
    (tmp_path / "mine.ipynb").write_text("mine")
    result = invoke("docs", "tutorial", "mine.ipynb")
    assert (result.exit_code, "exists already: name another file" in " ".join(result.output.split())) == (3, True)
    assert (tmp_path / "mine.ipynb").read_text() == "mine"
    assert invoke("docs", "cli", "mine.ipynb").exit_code == 2
