"""The page of ``inspect --html`` in a browser: keys, search, keyboard, files, hostile keys, light and dark."""

import json
import math
import re

import pytest
import torch

import aiockpt
from aiockpt import ChunkInfo, ObjectInfo, TensorInfo
from aiockpt.cli.html.page import html_page
from tests.cli.browser import CHROMIUM, Browser
from tests.cli.checkpoints import FORMATS, make
from tests.commands import invoke

browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, so the page is not tested")

ACTIVE = "document.getElementById(document.getElementById('tree').getAttribute('aria-activedescendant'))"
NAMES = "[...document.querySelectorAll('[role=treeitem]')].map(row => row.querySelector('bdi').textContent)"
DETAIL = "document.getElementById('detail').innerText"
BOX = "(({{ x, y, width, height }}) => [x, y, width, height])(document.querySelector('#{}').getBoundingClientRect())"
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>\u2028'\"`&amp;&lt;${1}",
    "__proto__.constructor",
    "a\x00b\x1b[31m\u202egnp.exe",
    "lone \ud800 surrogate",
    "",
    "..",
    "emoji \U0001f600.x",
    "emoji \U0001f601.x",  # shares the first UTF-16 surrogate with the key before
    ".".join(map(str, range(200))),
]


def tensor(key, shape, dtype=torch.float32, file="__0_0.distcp", offset=0):
    nbytes = math.prod(shape) * dtype.itemsize
    return TensorInfo(key, dtype, shape, (ChunkInfo(file, offset, nbytes, (0,) * len(shape), shape),))


INFOS = [
    tensor("model.embed.weight", (100, 8), torch.bfloat16),
    tensor("model.layers.0.w", (16, 8), offset=1600),
    tensor("model.layers.1.w", (16, 8), offset=2112),
    TensorInfo(
        "model.sharded",
        torch.float32,
        (6, 2),
        (
            ChunkInfo("__0_0.distcp", 4096, 24, (0, 0), (3, 2)),
            ChunkInfo("__1_0.distcp", 77, 24, (3, 0), (3, 2)),
        ),
    ),
    tensor("optim.exp_avg", (1024, 1024), file="__1_0.distcp", offset=4096),
    ObjectInfo("optim.groups", "__0_0.distcp", 3000, 333),
    ObjectInfo("step", "", 0, 0),
    TensorInfo("nothing", torch.int64, (0, 3), ()),
]


def write_page(tmp_path, infos, **kwargs):
    page = html_page("runs/a/step-100", "aiockpt", {"loss": 0.5}, infos, **kwargs)
    (tmp_path / "page.html").write_text(page)
    return tmp_path / "page.html"


def decode_data(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def decode_keys(page):
    """Return the keys, decoded from UTF-16 as the page's script does."""
    columns, keys, before = decode_data(page)["keys"], [], b""
    for same, rest in zip(columns[::2], columns[1::2], strict=True):
        before = before[: 2 * same] + rest.encode("utf-16-le", "surrogatepass")
        keys.append(before.decode("utf-16-le", "surrogatepass"))
    return keys


def test_keys_cannot_close_the_data_element():
    keys = [*HOSTILE, *(f"{key}.{key}" for key in HOSTILE)]
    page = html_page("</script>", "torch", {"</script>": "<!--"}, [tensor(key, (2,)) for key in keys])
    assert decode_keys(page) == keys
    assert decode_data(page)["path"] == "</script>"
    assert page.count("</script>") == page.count("<script") == 2
    page.encode()  # a lone surrogate is escaped


def test_page_loads_no_other_resource():
    page = html_page("a", "torch", {}, INFOS)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|\burl\(|<link|<iframe|src=", page)
    assert "default-src 'none'" in page


def test_common_prefixes_of_keys_are_written_once():
    infos = [tensor(f"model.layers.{n // 8}.block.{n % 8}.weight", (64, 64), offset=n * 20_000) for n in range(10_000)]
    page = html_page("a", "aiockpt", {}, infos)
    assert decode_keys(page) == [info.key for info in infos]
    assert len(page) - len(html_page("a", "aiockpt", {}, [])) < 40 * len(infos)


def test_file_lengths_are_those_of_the_storage(anywhere):
    single = make("safetensors", anywhere / "s")
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save({"a": torch.ones(10_000), "n": 3}, anywhere / "c")
        for path, file in [(anywhere / "c", anywhere / "c" / "__0_0.distcp"), (single, single)]:
            with ckpt.open(path) as reader:
                page = html_page(reader.path, reader.format, {}, reader.values(), sizes=reader.files)
            assert decode_data(page)["files"] == [[file.name, file.stat().st_size]]


def test_files_are_in_the_order_of_their_names():
    infos = [tensor(f"k{file}", (2,), file=file) for file in ("b", "c", "a")]
    assert [name for name, _ in decode_data(html_page("x", "aiockpt", {}, infos))["files"]] == ["a", "b", "c"]


@pytest.fixture
def page(tmp_path):
    with Browser() as page:
        yield page
        assert page.logged == []
        assert all(url.startswith(("file:", "about:")) for url in page.requests)


@browser
def test_keyboard_moves_through_the_tree(page, tmp_path):
    page.open(write_page(tmp_path, INFOS))
    assert page.get(f"{NAMES}.slice(0, 4)") == ["model", "embed", "weight", "layers"]  # a small tree begins expanded
    page.press("Tab", "Tab", "Tab", "Tab")  # the focus moves to metadata, search, order and tree
    assert page.get("document.activeElement.id") == "tree"
    page.press("ArrowDown", "ArrowDown", "ArrowDown")
    assert page.get(f"{ACTIVE}.querySelector('bdi').textContent") == "weight"
    assert page.get(f"[{ACTIVE}.ariaSelected, {ACTIVE}.ariaLevel, {ACTIVE}.ariaExpanded]") == ["true", "3", None]
    texts = ("model.embed.weight", "bfloat16", "100 \u00d7 8", "1,600", "__0_0.distcp")
    assert all(text in page.get(DETAIL) for text in texts)
    page.press("ArrowLeft")
    assert page.get(f"{ACTIVE}.querySelector('bdi').textContent") == "embed"
    page.press("ArrowLeft")
    assert page.get(f"{ACTIVE}.ariaExpanded") == "false"
    assert page.get(f"{NAMES}.slice(0, 3)") == ["model", "embed", "layers"]
    page.press("ArrowRight", "ArrowRight")
    assert page.get(f"{ACTIVE}.querySelector('bdi').textContent") == "weight"
    page.press("Home", "Enter")
    assert page.get(f"{NAMES}.slice(0, 2)") == ["model", "optim"]
    assert page.get(f"[{ACTIVE}.ariaPosInSet, {ACTIVE}.ariaSetSize]") == ["1", "4"]
    page.press("End")
    assert page.get(f"{ACTIVE}.querySelector('bdi').textContent") == "nothing"
    assert "it has no elements" in page.get(DETAIL)


@browser
def test_search_filters_the_tree_and_enter_focuses_it(page, tmp_path):
    page.open(write_page(tmp_path, INFOS))
    page.press("/", *"LAYERS 1")
    assert page.get("document.activeElement.id") == "search"
    assert page.get("document.getElementById('search').value") == "LAYERS 1"
    assert page.get(NAMES) == ["model", "layers", "1", "w"]
    assert page.get("document.querySelector('mark').textContent") == "layers"
    assert page.get("document.getElementById('found').textContent") == "1 of 8 keys"
    page.press("Enter")
    assert page.get("document.activeElement.id") == "tree"
    assert "model.layers.1.w" in page.get(DETAIL)
    page.press("/", "Escape")
    assert page.get(f"{NAMES}.length") == 14
    page.press(*"*.w")
    assert page.get("document.getElementById('found').textContent") == "2 of 8 keys"
    page.press(*"zzz")
    assert "No key matches" in page.get("document.getElementById('tree').innerText")


@browser
def test_dtypes_and_files_filter_the_tree(page, tmp_path):
    page.open(write_page(tmp_path, INFOS))
    rows = page.get(
        "[...document.querySelectorAll('#dtypes tbody tr')].map(row => row.innerText.split(/\\s+/).slice(1, 3))"
    )
    page.get("document.querySelector('[data-dtype=\"0\"]').click()")
    assert page.get(NAMES) == ["model", "embed", "weight"]
    page.get("document.querySelector('.chip').click()")
    page.get("document.querySelector('[data-file=\"1\"]').click()")
    assert page.get(NAMES) == ["model", "sharded", "optim", "exp_avg"]
    assert page.get("document.querySelector('[data-file=\"1\"]').ariaPressed") == "true"
    texts = page.get("[...document.querySelectorAll('#dtypes tbody tr')].map(row => row.innerText)")
    assert [text.split()[:2] for text in texts] == [
        ["float32", "4"],
        ["bfloat16", "1"],
        ["object", "2"],
        ["int64", "1"],
    ], rows


@browser
def test_file_map_names_the_key_under_the_pointer(page, tmp_path):
    page.open(write_page(tmp_path, INFOS))
    length = max(
        c.offset + c.nbytes
        for info in INFOS
        if isinstance(info, TensorInfo)
        for c in info.chunks
        if c.file == "__0_0.distcp"
    )
    page.get("document.getElementById('files').scrollIntoView({block: 'end'})")
    box = page.get(
        "(() => { const b = document.querySelector('canvas').getBoundingClientRect(); return [b.x, b.y, b.width] })()"
    )
    for offset, key in [
        (800, "model.embed.weight"),
        (1700, "model.layers.0.w"),
        (2200, "model.layers.1.w"),
        (3100, "optim.groups"),
    ]:
        x = box[0] + (offset / length) * box[2]
        page.hover(x, box[1] + 8)
        assert key in page.get("document.getElementById('tip').innerText")
        page.click(x, box[1] + 8)
        assert page.get(f"{DETAIL}").startswith(key)
    page.hover(box[0] + (3700 / length) * box[2], box[1] + 8)
    assert "nothing is stored here" in page.get("document.getElementById('tip').innerText")


@browser
def test_chunks_of_a_tensor_are_listed(page, tmp_path):
    page.open(write_page(tmp_path, INFOS))
    page.press("/", *"sharded", "Enter")
    rows = page.get("[...document.querySelectorAll('#detail tbody tr')].map(row => row.innerText.split('\\t'))")
    assert rows == [["[0:3, 0:2]", "__0_0.distcp", "4,096", "24"], ["[3:6, 0:2]", "__1_0.distcp", "77", "24"]]


@browser
def test_treemap_is_to_scale_and_follows_the_selection(page, tmp_path):
    page.open(write_page(tmp_path, INFOS))
    area = (
        "[...document.querySelectorAll('.cell')].map(c => [c.title || c.textContent, c.offsetWidth * c.offsetHeight])"
    )
    cells = dict(page.get(area))
    whole = page.get("document.getElementById('map').clientWidth * document.getElementById('map').clientHeight")
    assert cells["exp_avg"] > 0.85 * whole
    page.press("/", *"embed", "Enter", "ArrowLeft", "ArrowLeft")
    assert page.get("document.querySelector('#crumbs [aria-current]').textContent") == "embed"
    page.get("document.querySelector('#crumbs button').click()")
    assert page.get("document.querySelector('#crumbs [aria-current]').textContent") == "all"
    x, y, width, height = page.get(BOX.format("map"))
    page.click(x + width / 2, y + height / 2)
    assert page.get("document.querySelector('.cell.on').textContent") == "exp_avg"
    assert page.get(DETAIL).startswith("optim.exp_avg")


@browser
def test_statistics_are_shown_with_a_histogram(page, tmp_path):
    state = {"w": torch.arange(3200.0), "nan": torch.tensor([math.nan] * 3), "n": 5}
    with aiockpt.SyncCheckpointer() as ckpt:
        ckpt.save(state, tmp_path / "c")
    assert inspect_html(tmp_path / "c", tmp_path / "page.html", "--stats").exit_code == 0
    page.open(tmp_path / "page.html")
    page.press("/", "w", "Enter")
    assert all(text in page.get(DETAIL) for text in ("minimum\n0", "maximum\n3199", "mean\n1599.5", "nan\n0"))
    bars = page.get("[...document.querySelectorAll('.histogram title')].map(bar => bar.textContent)")
    assert (len(bars), bars[0], bars[-1]) == (32, "0 to 99.97: 100", "3099 to 3199: 100")
    page.press("/", *"nan", "Enter")
    assert "nan\n3" in page.get(DETAIL)
    assert page.get("document.querySelector('.histogram')") is None


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_a_page(form, anywhere, tmp_path):
    path = make(form, anywhere / "c")
    result = inspect_html(path, f"file://{tmp_path}/page.html", "model", "--stats")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert result.stdout.startswith(f"{tmp_path}/page.html: ")
    assert sorted(decode_keys(page)) == ["model.0.bias", "model.0.weight"]
    assert decode_data(page)["path"] == str(path)
    assert len(decode_data(page)["stats"]) == 2
    assert [file.name for file in tmp_path.glob("page*")] == ["page.html"]


def test_page_never_replaces_a_checkpoint(tmp_path):
    path, other = make("torch", tmp_path / "c"), make("safetensors", tmp_path / "d")
    before = path.read_bytes(), other.read_bytes()
    for file in (path, other):
        result = inspect_html(path, file)
        assert result.exit_code == 3
        assert result.stderr == f"aiockpt: {file} is a checkpoint; choose another name for the page\n"
    assert (path.read_bytes(), other.read_bytes()) == before
    for _ in range(2):  # the second call replaces the page of the first
        assert inspect_html(path, tmp_path / "page.html").exit_code == 0


@pytest.mark.parametrize(
    ("page", "message"),
    [("", "is a directory"), ("aiockpt-test://server/page.html", "is a URL: name a path of the file system")],
)
def test_page_is_a_file_of_the_file_system(page, message, tmp_path):
    result = inspect_html(make("dcp", tmp_path / "c"), page or tmp_path)
    assert result.exit_code == 3
    assert message in result.stderr


def test_html_and_json_exclude_each_other(tmp_path):
    path = make(FORMATS[0], tmp_path / "c")
    result = inspect_html(path, tmp_path / "page.html", "--json")
    assert result.exit_code == 2
    assert not (tmp_path / "page.html").exists()


def inspect_html(path, page, *more):
    return invoke("inspect", path, *more, "--html", page)


@browser
def test_hostile_keys_are_shown_as_text(page, tmp_path):
    page.open(write_page(tmp_path, [tensor(key, (2,), file=key or "f") for key in HOSTILE]))
    assert page.get("document.querySelectorAll('img, iframe, script:not(#data)').length") == 1
    shown = page.get(NAMES)
    assert "</script><img src=x onerror=alert(1)>" in shown
    assert "<!--<script>" in shown
    assert "a\\u{0}b\\u{1b}[31m\\u{202e}gnp" in shown
    assert "lone \\u{d800} surrogate" in shown
    assert {"emoji \U0001f600", "emoji \U0001f601"} <= set(shown)
    assert page.get("Object.prototype.polluted === undefined && ({}).constructor === Object")
    page.press("/", *"onerror", "Enter", "ArrowDown")
    assert "onerror=alert(1)" in page.get(DETAIL)


@browser
def test_page_of_a_hundred_thousand_tensors(page, tmp_path):
    infos = [
        tensor(f"model.layers.{n // 100}.block.{n % 100}.weight", (1, 1 + n % 7), offset=n * 64) for n in range(100_000)
    ]
    page.open(write_page(tmp_path, infos))
    page.wait("document.documentElement.dataset.ready")
    assert page.get("document.getElementById('found').textContent") == "100,000 keys"
    assert page.get("document.querySelectorAll('*').length") < 2500  # the page has elements only for the rows in view
    page.press("/", *"layers.999.block.99.", "Enter")
    assert page.get("document.getElementById('found').textContent") == "1 of 100,000 keys"
    assert page.get(DETAIL).startswith("model.layers.999.block.99.weight")
    assert f"{99_999 * 64:,}" in page.get(DETAIL)
    page.press("/", "Escape", "Escape", "End", "ArrowUp")
    assert page.get("document.querySelectorAll('[role=treeitem]').length") < 80
    assert page.get(
        f"{ACTIVE}.getBoundingClientRect().bottom <= document.getElementById('tree').getBoundingClientRect().bottom"
    )


@browser
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast_and_fits_the_width(tmp_path, width, dark):
    infos = [*INFOS, tensor("a" * 300 + "." + "b" * 300, (2, 3, 4, 5, 6))]
    with Browser(width=width, dark=dark) as page:
        page.open(write_page(tmp_path, infos))
        assert page.get("document.documentElement.scrollWidth <= innerWidth")
        ratios = page.get(CONTRASTS)
    assert len(ratios) > 20
    assert min(ratio for _, ratio in ratios) >= 4.5, min(ratios, key=lambda each: each[1])


# Contrast ratio of each text node to its nearest opaque background, by the formula of WCAG 2.2.
CONTRASTS = """
(() => {
  const rgb = text => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    context.fillStyle = text; context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = color => color.slice(0, 3).map(c => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !element.checkVisibility() || element.closest("script, noscript")) continue;
    let behind = element;
    while (behind && rgb(getComputedStyle(behind).backgroundColor)[3] < 255) behind = behind.parentElement;
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(c => light(rgb(c)));
    found.push([texts.currentNode.data, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
})()
"""
