import pytest
import typer

from aiockpt.cli.main import parse_duration, parse_size


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("0s", 0), ("1.5m", 90), ("12h", 43200), ("2w", 1209600)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "3", "0", "1y", "-1h", "nan", "inf", "one"])
def test_invalid_durations(text):
    with pytest.raises(typer.BadParameter, match="is no duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("512M", 512 << 20), ("2 GiB", 2 << 30), ("1.5gb", 3 << 29), ("7KB", 7 << 10)]
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1e3", "nan"])
def test_invalid_sizes(text):
    with pytest.raises(typer.BadParameter, match="is no size"):
        parse_size(text)
