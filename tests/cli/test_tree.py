import pytest
import torch

from aiockpt import ObjectInfo, TensorInfo
from aiockpt.cli.inspect import build, fitting_depth, lines_of


def tensor(key, *shape, dtype=torch.float32):
    return TensorInfo(key, dtype, shape, ())


def render(infos, **options):
    return [
        f"{'  ' * line.depth}{line.label}{f' x{line.times}' if line.times > 1 else ''}{' ...' if line.is_cut else ''}"
        for line in lines_of(build(infos), **options)
    ]


def layers(count, head="layers", width=4):
    for number in range(count):
        yield tensor(f"{head}.{number}.q.weight", width, 3)
        yield tensor(f"{head}.{number}.q.bias", width)


def test_equal_layers_are_folded_and_single_children_joined():
    infos = [tensor("model.embed.weight", 7, 3), *layers(3, "model.layers"), ObjectInfo("step", "f", 0, 9)]
    assert render(infos) == [
        "model",
        "  embed.weight",
        "  layers",
        "    0..2.q x3",
        "      weight x3",
        "      bias x3",
        "step",
    ]


def test_different_layers_are_not_folded():
    infos = [*layers(3), *(tensor(f"layers.{n}.q.weight", 5, 3) for n in (3,)), tensor("layers.3.q.bias", 5)]
    assert render(infos) == [
        "layers",
        "  0..2.q x3",
        "    weight x3",
        "    bias x3",
        "  3.q",
        "    weight",
        "    bias",
    ]


def test_nested_folds_multiply():
    infos = [tensor(f"a.{i}.{j}", 2) for i in range(4) for j in range(5)]
    assert render(infos) == ["a", "  0..3 x4", "    0..4 x20"]
    assert render(infos, fold=False)[:3] == ["a", "  0", "    0"]


def test_two_equal_siblings_are_not_folded():
    assert render([tensor("0", 2), tensor("1", 2)]) == ["0", "1"]


def test_siblings_are_sorted_by_number():
    assert render([tensor(f"h.{n}", n + 1) for n in (0, 1, 10, 2)], fold=False) == ["h", "  0", "  1", "  2", "  10"]


def test_key_that_is_a_prefix_of_another():
    infos = [tensor("a", 2), tensor("a.b", 3), tensor("", 1), tensor("a..c", 1)]
    assert render(infos) == ["a", "  b", "  .c", ""]
    root = build(infos)
    assert (root.tensors, root.nbytes) == (4, 28)
    assert root.children["a"].nbytes == 24


def test_depth_limits_the_levels():
    infos = [*layers(3), tensor("head", 2)]
    assert render(infos, depth=1) == ["layers ...", "head"]
    assert render(infos, depth=2) == ["layers", "  0..2.q x3 ...", "head"]
    assert render(infos, depth=3) == render(infos)


@pytest.mark.parametrize(("most", "depth"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, None), (100, None)])
def test_fitting_depth(most, depth):
    root = build([*layers(3), tensor("head", 2)])
    assert fitting_depth(root, most) == depth
    if most > 1:
        assert len(list(lines_of(root, depth=depth))) <= most


def test_very_deep_keys():
    infos = [tensor(".".join(["a"] * 2000 + [str(n)]), n) for n in range(3)]
    assert render(infos) == [".".join(["a"] * 2000), "  0", "  1", "  2"]
