"""Ways of changing a tensor between `save()` and `staged`, and the outcome of each; shared with tests/gpu.

Each way returns a tensor, or a container of several, and a function that changes it. The outcomes:
SEEN: version counters detect the change. UNSEEN: they do not; unless samples of the bytes are compared, the checkpoint
may mix two states. KEPT: the change does not affect the save, which holds the values at the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

SEEN: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {}
UNSEEN: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {}
KEPT: dict[str, Callable[[], tuple[Any, Callable[[], Any]]]] = {}
SIDE = 300


def tensor() -> torch.Tensor:
    """Return a tensor of distinct elements, too large to be copied at the call."""
    return torch.arange(1.0, SIDE * SIDE + 1).reshape(SIDE, SIDE)


def _note(found: dict, name: str, change: Callable[[torch.Tensor], Any], make: Callable[[], torch.Tensor] = tensor):
    def way() -> tuple[Any, Callable[[], Any]]:
        value = make()

        @torch.no_grad()
        def act() -> None:
            change(value)

        return value, act

    found[name] = way


def _set_row(value: torch.Tensor) -> None:
    value[-1] = 7.0


def _set_mask(value: torch.Tensor) -> None:
    value[value > SIDE] = 0.0


def _put(value: torch.Tensor) -> None:
    value[[1, SIDE - 1], [5, 7]] = torch.tensor([0.5, 0.25])


def _gather_through_a_view(value: torch.Tensor) -> None:
    value.view(-1)[SIDE:].narrow(0, 0, 5000).mul_(3)


for _name, _change in {
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(2),
    "zero_": lambda v: v.zero_(),
    "copy_": lambda v: v.copy_(v.flip(0)),
    "normal_": lambda v: v.normal_(),
    "clamp_": lambda v: v.clamp_(max=9.0),
    "lerp_": lambda v: v.lerp_(v.flip(0), 0.5),
    "masked_fill_": lambda v: v.masked_fill_(v > 9, 0.0),
    "scatter_": lambda v: v.scatter_(0, torch.zeros(1, SIDE, dtype=torch.int64), -1.0),
    "index_add_": lambda v: v.index_add_(0, torch.tensor([SIDE - 1]), torch.ones(1, SIDE)),
    "index_put_": _put,
    "a row": _set_row,
    "a mask": _set_mask,
    "one element": lambda v: v[-1, -1].add_(1),
    "out=": lambda v: torch.add(v, 1, out=v),
    "a view of a view": _gather_through_a_view,
    "an alias of detach()": lambda v: v.detach().add_(1),
    "set_": lambda v: v.set_(v.flip(0)),
    "set_ of a storage": lambda v: v.set_(v.flip(0).untyped_storage(), 0, v.shape, v.stride()),
    "resize_ to more": lambda v: v.resize_(SIDE + 1, SIDE + 1),
    "resize_ to less": lambda v: v.resize_(SIDE - 1, SIDE),
    "t_": lambda v: v.t_(),
    "nn.init": lambda v: torch.nn.init.xavier_normal_(v),
    "foreach add": lambda v: torch._foreach_add_([v], 1),
    "foreach copy": lambda v: torch._foreach_copy_([v], [v.flip(0)]),
    "foreach lerp": lambda v: torch._foreach_lerp_([v], [v.flip(0)], 0.5),
}.items():
    _note(SEEN, _name, _change)


def _write_bytes(value: torch.Tensor) -> None:
    ctypes.memset(value.data_ptr(), 1, value.nbytes)


def _fused_step(value: torch.Tensor) -> None:
    torch._fused_sgd_(
        [value], [torch.ones_like(value)], [], weight_decay=0.0, momentum=0.0, lr=0.5, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _unscale(value: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(
        [value], torch.zeros(1, device=value.device), torch.full((), 0.5, device=value.device)
    )


for _name, _change in {
    ".data, in place": lambda v: v.data.add_(1),
    ".data, a row": lambda v: v.data[100:250].zero_(),
    ".data, exchanged": lambda v: setattr(v, "data", v.flip(0)),
    "swap_tensors": lambda v: torch.utils.swap_tensors(v, v.flip(0)),
    "its storage": lambda v: v.untyped_storage().copy_(v.flip(0).untyped_storage()),
    "a fused operator by itself": _fused_step,
    "unscaling of gradients": _unscale,
}.items():
    _note(UNSEEN, _name, _change)
for _name, _change in {
    "NumPy": lambda v: v.numpy().fill(3),
    "NumPy, read from elsewhere": lambda v: torch.from_numpy(v.numpy()).mul_(2),
    "DLPack": lambda v: torch.from_dlpack(v).add_(1),
    "its address": _write_bytes,
}.items():
    _note(UNSEEN, f"{_name} (host)", _change)


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return tensor()


@torch.inference_mode()
def _add_in_inference_mode(value: torch.Tensor) -> None:
    value.add_(1)


_note(UNSEEN, "a tensor of inference mode", _add_in_inference_mode, _inference)


def _large_batch_norm():
    norm = torch.nn.BatchNorm1d(40_000)
    return norm.running_var, lambda: norm(torch.randn(4, 40_000))


UNSEEN["statistics of BatchNorm that are too large"] = _large_batch_norm


# --- changes that training programs make ----------------------------------------------------------


def _trained(optimizer: str, **options: Any):
    def way():
        parameters = [torch.nn.Parameter(tensor() / 1e4), torch.nn.Parameter(torch.ones(SIDE, SIDE))]
        if optimizer == "LBFGS":
            options.update(max_iter=1)
        optim = getattr(torch.optim, optimizer)(parameters, **options)

        def step() -> None:
            optim.zero_grad()
            loss = (parameters[0] @ parameters[1]).square().mean()
            loss.backward()
            optim.step((lambda: loss) if optimizer == "LBFGS" else None)

        step()
        return [*parameters, optim.state_dict()], step

    return way


for _kind in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam",
              "RMSprop", "Rprop", "SGD"):  # fmt: skip
    SEEN[f"a step of {_kind}"] = _trained(_kind)
    if _kind in ("Adam", "RMSprop", "SGD"):
        SEEN[f"a step of {_kind}, foreach"] = _trained(_kind, foreach=True)
    if _kind in ("Adagrad", "Adam", "AdamW", "SGD"):
        SEEN[f"a step of {_kind}, fused"] = _trained(_kind, fused=True)
SEEN["a step of SGD with momentum"] = _trained("SGD", momentum=0.9, nesterov=True)
SEEN["a step of AdamW with amsgrad, fused"] = _trained("AdamW", amsgrad=True, fused=True)


def _linear() -> torch.nn.Linear:
    return torch.nn.Linear(SIDE, SIDE)


def _load_state_dict(*, assign: bool):
    def way():
        layer, other = _linear(), _linear()
        return layer.state_dict(), lambda: layer.load_state_dict(other.state_dict(), assign=assign)

    return way


def _average():
    layer = _linear()
    average = torch.optim.swa_utils.AveragedModel(layer, avg_fn=lambda old, new, count: old.lerp(new, 0.25))
    average.update_parameters(_linear())
    return average.state_dict(), lambda: average.update_parameters(_linear())


def _average_at_once():
    average = torch.optim.swa_utils.AveragedModel(
        _linear(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    average.update_parameters(_linear())
    return average.state_dict(), lambda: average.update_parameters(_linear())


def _gradients(change: Callable[[torch.nn.Linear], Any]):
    def way():
        layer = _linear()
        layer(torch.randn(4, SIDE)).sum().backward()
        return layer.weight.grad, lambda: change(layer)

    return way


def _backward_again(layer: torch.nn.Linear) -> None:
    layer(torch.randn(4, SIDE)).sum().backward()


def _views(change: str):
    def way():
        base = torch.stack([tensor(), tensor() + 0.5])
        row = base[1]
        return (row, lambda: base.add_(1)) if change == "base" else (base, lambda: row.add_(1))

    return way


def _tied():
    layer = _linear()
    return [layer.weight, layer.weight.detach()], lambda: torch.nn.init.ones_(layer.weight)


SEEN |= {
    "load_state_dict": _load_state_dict(assign=False),
    "an average of weights": _average,
    "an average of weights, foreach": _average_at_once,
    "gradients that add up": _gradients(_backward_again),
    "gradients that are clipped": _gradients(lambda layer: torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)),
    "gradients that are set to zero": _gradients(lambda layer: layer.zero_grad(set_to_none=False)),
    "the base of a view": _views("base"),
    "a view of it": _views("view"),
    "tied weights": _tied,
}


# --- changes that do not affect the save ----------------------------------------------------------


def _exchange(change: Callable[[torch.nn.Linear], Any]):
    def way():
        layer = _linear()
        return [layer.weight, layer.state_dict()], lambda: change(layer)

    return way


def _batch_norm():
    norm = torch.nn.BatchNorm1d(SIDE)
    return norm.state_dict(), lambda: norm(torch.randn(4, SIDE))


def _load_optimizer():
    layer = _linear()
    optim = torch.optim.Adam(layer.parameters())
    layer(torch.randn(4, SIDE)).sum().backward()
    optim.step()
    state = torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: value + 1, optim.state_dict())
    return optim.state_dict(), lambda: optim.load_state_dict(state)


def _dropout():
    return torch.get_rng_state(), lambda: torch.nn.functional.dropout(torch.ones(1000))


def _objects():
    state = {"log": [1, 2], "lr": {"group": 0.1}, "rng": torch.get_rng_state(), "small": torch.arange(100.0)}

    def change() -> None:
        state["log"].append(3)
        state["lr"]["group"] = 0.2
        state["small"].data.add_(1)
        state["small"].numpy().fill(2)

    return state, change


KEPT |= {
    "load_state_dict(assign=True)": _load_state_dict(assign=True),
    "load_state_dict of an optimizer": _load_optimizer,
    "gradients set to None": _gradients(lambda layer: layer.zero_grad(set_to_none=True)),
    "a parameter's .data": _exchange(lambda layer: setattr(layer.weight, "data", torch.zeros(SIDE, SIDE))),
    "a module's dtype": _exchange(lambda layer: layer.half()),
    "a parameter in the place of another": _exchange(lambda layer: setattr(layer, "weight", None)),
    "a parameter swapped": _exchange(
        lambda layer: torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.zeros(SIDE, SIDE)))
    ),
    "requires_grad_": _exchange(lambda layer: layer.requires_grad_(False)),
    "statistics of BatchNorm": _batch_norm,
    "a generator": _dropout,
    "objects and small tensors": _objects,
}
_note(KEPT, "a copy of it", lambda v: v.clone().add_(1))
_note(KEPT, "nothing: it is read", lambda v: v.sum())
