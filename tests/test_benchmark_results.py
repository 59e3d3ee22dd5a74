"""Results of benchmarks as ratios, tables, pictures and in the README; and runs that end in time."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import matrix
from benchmarks.harness import time_limits
from benchmarks.harness.measure import interleave
from benchmarks.matrix import Section
from benchmarks.ranks import scale
from benchmarks.report import figures, markdown, pictures, readme
from benchmarks.report.figures import Claim

ROOT = readme.ROOT
MACHINE = {
    "cpu": "A Processor",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "file_system": "ext4",
    "platform": "Linux-6.1",
    "python": "3.11.9",
    "versions": {"torch": "2.13.0", "absent": None},
}


def run_of(name: str, *samples: dict[str, float], error: str | None = None) -> dict[str, Any]:
    whole = {what: sorted(sample[what] for sample in samples) for sample in samples[:1] for what in sample}
    medians = {what: values[len(values) // 2] for what, values in whole.items()}
    return {"name": name, "samples": list(samples), "medians": medians, "error": error, "note": "", "first": {}}


def table_of(title: str, metric: str, limit: str, *runs: dict[str, Any]) -> dict[str, Any]:
    rows = [[run["name"], str(run["medians"].get(metric, "-")), run["error"] or ""] for run in runs]
    return {
        "title": title,
        "metric": metric,
        "limit": limit,
        "columns": ["", "time", "note"],
        "rows": rows,
        "runs": runs,
    }


def seconds_of(metric: str, *values: float) -> list[dict[str, float]]:
    return [{metric: value} for value in values]


SAVE = table_of(
    "save: 2 GiB",
    "durable_s",
    "raw",
    run_of("raw O_DIRECT, 1 thread", *seconds_of("durable_s", 0.8, 0.9, 0.7)),
    run_of("raw O_DIRECT, 2 threads", *seconds_of("durable_s", 0.5, 0.6, 0.7)),
    run_of("memmove, 1 thread", {"staged_s": 0.2}),
    run_of(
        "aiockpt",
        {"durable_s": 0.75, "staged_s": 0.4},
        {"durable_s": 0.8, "staged_s": 0.5},
        {"durable_s": 1.0, "staged_s": 0.3},
    ),
    run_of("dcp.save, thread_count=2", {"durable_s": 1.6, "staged_s": 1.6}),
    run_of("dcp.async_save", {"durable_s": 2.4, "staged_s": 0.6}),
    run_of("absent | peer", error="No module named 'peer'"),
)
TRAINING = table_of(
    "training: 16 steps",
    "train_s",
    "",
    run_of("no checkpoints", {"train_s": 4.0, "step_max_s": 0.3}),
    run_of("aiockpt, thread", {"train_s": 4.2, "step_max_s": 0.4}) | {"first": {"step_max_s": 0.7}},
    run_of("torch.save + fsync", {"train_s": 5.0, "step_max_s": 0.9}),
)
RESULTS = {
    "written": "2026-11-22",
    "command": "python -m benchmarks all --gib 2",
    "machine": MACHINE,
    "sections": {
        "save": {
            "tables": [SAVE],
            "remarks": ["synced"],
            "bars": [
                {"text": "a : b", "measured": 0.75, "bound": 0.95, "at_most": False, "unit": "x", "passed": False},
                {"text": "c", "measured": None, "bound": None, "at_most": False, "unit": "ms", "passed": None},
            ],
            "details": {
                "timeline": [
                    {"lane": "thread 1", "kind": "stage", "begin_s": 0.0, "end_s": 0.2},
                    {"lane": "file a", "kind": "write", "begin_s": 0.1, "end_s": 0.5},
                    {"lane": "file a", "kind": "fsync", "begin_s": 0.5, "end_s": 0.6},
                ]
            },
        },
        "training": {"tables": [TRAINING], "bars": [], "remarks": []},
        "by size and number": {
            "tables": [],
            "bars": [],
            "details": {
                "size": {"aiockpt": [[1 << 26, 0.05], [1 << 30, 0.5]]},
                "number": {"aiockpt": [[10, 0.05], [10_000, 0.2]]},
                "number_gib": 0.125,
            },
        },
        "scale": {
            "tables": [],
            "bars": [],
            "details": {
                "panels": [
                    {
                        "title": "t",
                        "y": "s",
                        "lines": {"later save": [[8, 0.1], [64, 0.3]], "measured": [[8, 0.2]]},
                        "points": {"later save": [[8, 0.2]]},
                    },
                    {"title": "u", "y": "MiB", "lines": {"first save": [[8, 1.0], [64, 8.0]]}, "points": {}},
                ]
            },
        },
        "hung": {"failed": "ended with 1", "tables": [], "bars": []},
    },
}


# --- figures ---------------------------------------------------------------------------------------------


def test_ratios_are_to_the_fastest_of_the_limit() -> None:
    found = {each.name: each for each in figures.figures(SAVE)}
    assert found["raw O_DIRECT, 1 thread"].ratio == pytest.approx(0.75)
    assert found["raw O_DIRECT, 2 threads"].ratio == 1
    ours = found["aiockpt"]
    assert (ours.value, ours.least, ours.most, ours.ratio) == (0.8, 0.75, 1.0, pytest.approx(0.75))
    assert "absent | peer" not in found
    assert "memmove, 1 thread" not in found, "it has no durable time"
    assert [each.name for each in found.values() if each.is_limit] == [
        "raw O_DIRECT, 1 thread",
        "raw O_DIRECT, 2 threads",
    ]


def test_claims_name_the_best_peer_and_the_limit() -> None:
    claims = [
        Claim("durable", "save", "save", "aiockpt", "raw writes"),
        Claim("staged", "save", "save", "aiockpt", "memmove", "staged_s", ("dcp.async",), "memmove"),
        Claim("not measured", "load", "load", "aiockpt"),
        Claim("not there", "save", "save", "aiockpt, elsewhere"),
    ]
    durable, staged = figures.held(RESULTS, claims)
    assert (durable.ours.value, durable.best.name, durable.limit.value) == (0.8, "dcp.save, thread_count=2", 0.6)
    assert (staged.ours.value, staged.best.name, staged.limit.name) == (0.4, "dcp.async_save", "memmove, 1 thread")


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (set(), "medians of 3 rounds"),
        ({1}, "one round"),
        ({2}, "medians of 2 rounds"),
        ({1, 3}, "medians of 1 to 3 rounds"),
    ],
)
def test_a_title_says_how_many_rounds_were_measured(counts: set[int], said: str) -> None:
    assert figures.title_of("save: 1 GiB, medians of 3 rounds, cold", counts) == f"save: 1 GiB, {said}, cold"


def test_what_peers_are_faster_at_has_a_reason() -> None:
    results = json.loads((readme.RESULTS / matrix.RESULTS).read_text())
    found = figures.faster_peers(results)
    assert found, "aiockpt is the fastest everywhere: drop the table"
    assert {section for section, *_ in found} <= figures.WHY_FASTER.keys()
    assert all(each.claim.why for each in figures.held(results) if each.is_beaten)


def test_points_that_were_not_run_are_one_sentence() -> None:
    rows = [
        ["a: 8 ranks", "-", "not run: no time was left"],
        *([f"b: {n}", "-", "not run: no time was left"] for n in "12"),
    ]
    assert readme._missing(rows, {"a"}) == "Not run (no time was left): a: 8 ranks; all of b."


def test_the_page_has_every_table_with_escaped_cells() -> None:
    page = markdown.document(RESULTS, ["ratios.png"])
    assert "A Processor, 2 cores, 8 GiB of memory, ext4, Linux-6.1, Python 3.11.9; torch 2.13.0\n" in page
    assert "| absent \\| peer | - | No module named 'peer' |" in page
    assert "| a : b | 0.75 x | >= 0.95 x | no |" in page
    assert "| c | - |  |  |" in page
    assert "![ratios](ratios.png)" in page
    assert "Failed: ended with 1" in page


def test_paths_of_the_machine_are_left_out() -> None:
    report_with_paths = {
        "error": "no such file: '/home/someone/runs/a-b/x.pt' at 2 GiB/s and 1/2",
        "runs": [{"path": "/tmp/q/r"}],
        "n": 3,
    }
    assert matrix.without_paths(report_with_paths) == {
        "error": "no such file: 'x.pt' at 2 GiB/s and 1/2",
        "runs": [{"path": "r"}],
        "n": 3,
    }


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all results, and those of one section; from then on matplotlib keeps the files of fonts open."""
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("results")
    matrix.write(RESULTS, directory)
    (directory / "one").mkdir()
    matrix.write({**RESULTS, "sections": {"training": RESULTS["sections"]["training"]}}, directory / "one")
    return directory


def test_every_picture_is_drawn(drawn: Path) -> None:
    names = ["ratios.png", "timeline.png", "scaling.png", "training.png", "scale.png"]
    assert sorted(file.name for file in drawn.iterdir()) == sorted([*names, "one", "results.json", "results.md"])
    for name in names:
        assert (drawn / name).read_bytes().startswith(b"\x89PNG")
        assert f"({name})" in (drawn / "results.md").read_text()
    assert json.loads((drawn / "results.json").read_text()) == json.loads(json.dumps(RESULTS))


def test_the_picture_of_numbers_of_tensors_shows_its_points() -> None:
    pytest.importorskip("matplotlib")
    canvas = pictures.scaling(RESULTS)
    for axis in canvas.axes:
        (least, most), (left, right) = axis.get_ylim(), axis.get_xlim()
        assert least < most / 2
        for line in axis.get_lines():
            assert all(left <= x <= right and least <= y <= most for x, y in line.get_xydata())
        labels = [label for label in axis.get_xticklabels(which="both") if label.get_text()]
        assert len(labels) == len(line.get_xydata()), "labels only where something was measured"


def test_the_longest_step_is_that_of_the_table() -> None:
    pytest.importorskip("matplotlib")
    longest = pictures.training(RESULTS).axes[1]
    assert [text.get_text() for text in longest.texts] == [" 700 ms", " 900 ms"]


def test_titles_name_the_size_that_the_tables_name() -> None:
    pytest.importorskip("matplotlib")
    for picture in (pictures.ratios, pictures.timeline):
        assert "2 GiB, " in picture(RESULTS).axes[0].get_title("left")


def test_sections_without_results_have_no_picture(drawn: Path) -> None:
    assert [file.name for file in (drawn / "one").glob("*.png")] == ["training.png"]


# --- the README ------------------------------------------------------------------------------------------


def test_only_the_section_is_replaced() -> None:
    page = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter {readme.END}\n"
    assert readme.with_section(page, "new") == f"before\n{readme.BEGIN}\nnew\n{readme.END}\nafter {readme.END}\n"
    with pytest.raises(ValueError, match="needs the lines"):
        readme.with_section("no markers", "new")


def test_the_section_has_the_figures() -> None:
    section = readme.section(RESULTS)
    row = "| save, until it is durable (2 GiB) | 0.80 s | 0.60 s, raw writes | 1.60 s, dcp.save, thread_count=2 |"
    assert row in section
    assert "A Processor, 2 cores" in section


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.stem)
def test_the_figures_of_pages_match_the_results(page: Path) -> None:
    results = json.loads((readme.RESULTS / matrix.RESULTS).read_text())
    content = readme.PAGES[page](results)
    assert readme.with_section(page.read_text(), content) == page.read_text(), "run: python -m benchmarks readme"
    assert content.count("|") > 20
    if page == readme.README:
        for name in readme.PICTURES:
            assert (readme.RESULTS / name).read_bytes().startswith(b"\x89PNG")
    if page == readme.SCALE:
        assert page.with_name("scale.png").read_bytes() == (readme.RESULTS / "scale.png").read_bytes()


# --- the model of coordination ---------------------------------------------------------------------------


def test_costs_are_fitted() -> None:
    points = [(ranks, items, 0.5 + 0.25 * ranks + 0.125 * ranks * items) for ranks in (8, 64, 512) for items in (1, 10)]
    fitted = scale.fit(points)
    assert (fitted.constant, fitted.per_rank, fitted.per_item) == pytest.approx((0.5, 0.25, 0.125))
    assert fitted.worst < 1e-9
    assert fitted.at(4096, 100) == pytest.approx(0.5 + 1024 + 51200)


def test_no_cost_is_negative() -> None:
    fitted = scale.fit([(8, 1, 1.0), (64, 1, 0.9), (512, 1, 1.1), (8, 10, 1.0)])
    assert min(fitted.constant, fitted.per_rank, fitted.per_item) >= 0
    assert 0 < fitted.worst < 0.2


# --- a run of the matrix ---------------------------------------------------------------------------------


def test_a_hanging_run_ends_its_process_and_leaves_its_name(tmp_path: Path) -> None:
    file = tmp_path / "running"
    source = f"""
    import threading
    from pathlib import Path
    from benchmarks.harness.time_limits import Limits
    limits = Limits(run_s=0.2, running=Path({str(file)!r}))
    with limits.watch("the quick one"):
        pass
    assert not limits.running.exists()
    with limits.watch("the one that hangs"):
        threading.Event().wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(source)], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 1, done.stderr
    assert file.read_text() == "the one that hangs"


class Counter:
    """A contender that takes part in rounds."""

    note = ""

    def __init__(self, name: str) -> None:
        self.name = name


async def count(_each: Counter, number: int) -> dict[str, float]:
    return {"number": number}


@pytest.mark.parametrize(("until", "numbers"), [(math.inf, [0, 1, 2]), (0.0, [0])])
def test_one_round_is_run_even_if_time_is_over(until: float, numbers: list[int]) -> None:
    before = time_limits.current.set(time_limits.Limits(until=until, without={"b": "it hangs"}))
    try:
        ours, other = asyncio.run(interleave([Counter("a"), Counter("b")], 3, count))
    finally:
        time_limits.current.reset(before)
    assert (ours.first, ours.values("number"), ours.error) == ({"number": -1}, numbers, None)
    assert (other.first, other.samples, other.error) == ({}, [], "it hangs")


PROGRAM = """
import json, os, sys
from pathlib import Path
options = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[2:])
without = [each.split("=", 2)[1] for each in sys.argv[2:] if each.startswith("--without=")]
file = Path(options["json"])
if sys.argv[1] == "hangs" and "the one that hangs" not in without:
    file.with_suffix(".running").write_text("the one that hangs")
    os._exit(1)
if sys.argv[1] == "breaks":
    sys.exit("cannot open " + options["dir"] + "/x")
runs = [{"name": name, "error": None} for name in ("ours", "the one that hangs")]
rows = [[run["name"], "1 s", ""] for run in runs]
file.write_text(json.dumps({"tables": [{"runs": runs, "rows": rows}], "bars": [], "given": options}))
"""


def run_section(benchmark: str, directory: Path) -> dict[str, Any]:
    section = Section("it", benchmark, 1, lambda gib: {"gib": gib / 2}, 2)
    options = Namespace(gib=0.5, rounds=None, run_limit=7.0)
    return matrix.run_section(section, options, directory, 60, (sys.executable, "-c", PROGRAM))


def test_a_contender_that_hangs_has_a_row_and_the_others_have_their_figures(tmp_path: Path) -> None:
    (table,) = run_section("hangs", tmp_path)["tables"]
    why = "killed: one run took longer than 7 s"
    assert [run["error"] for run in table["runs"]] == [None, why]
    assert [row[-1] for row in table["rows"]] == ["", why]
    assert not list(tmp_path.iterdir())


def test_a_section_gets_its_options(tmp_path: Path) -> None:
    given = run_section("works", tmp_path)["given"]
    assert (given["gib"], given["rounds"], given["run-limit"]) == ("0.25", "2", "7.0")


def test_a_section_that_fails_is_reported(tmp_path: Path) -> None:
    report = run_section("breaks", tmp_path)
    assert report["failed"] == "ended with 1: cannot open x\n"
    assert not list(tmp_path.iterdir())


def test_a_run_without_room_on_disk_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"a run of 1e.06 GiB needs .* GiB of disk .*use --gib [\d.e+]+ or --dir"):
        matrix.check_room(tmp_path, 1_000_000)
    matrix.check_room(tmp_path, 0.001)


def test_every_section_has_a_benchmark() -> None:
    from benchmarks.__main__ import MODULES, parser

    for section in matrix.SECTIONS:
        assert section.benchmark in MODULES
        options = {**section.options(2.0), "rounds": 1, "time-limit": 5, "run-limit": 3}
        parser().parse_args(
            [
                section.benchmark,
                *(f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()),
            ]
        )
