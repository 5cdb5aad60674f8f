"""Stages of all sorts that a backward can be split for: each takes one tensor of (ROWS, WIDTH)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 6, 5


class Calls(nn.Module):
    """A module of the layers that it is given, called as `function(self, x)`."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *values: Any) -> Any:
        return self.function(self, *values)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Counted(torch.autograd.Function):
    """x · w, and counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        Counted.backwards += 1
        x, w = ctx.saved_tensors
        return gradient * w, (gradient * x).sum(0)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def lora(stage: Any, x: Tensor) -> Tensor:
    return torch.tanh(stage.base(x) + stage.up(stage.down(x)))


def attend(stage: Any, x: Tensor) -> Tensor:
    rows = x[None]
    mixed: Tensor = stage.attention(rows, rows, rows, need_weights=False)[0][0]
    return stage.norm(x + mixed)


def write_into_view(stage: Any, x: Tensor) -> Tensor:
    y = stage.a(x)
    y[:, :2] *= stage.scale
    y[0] = stage.b(x)[1]
    return y


def multiply_in_place(x: Tensor) -> Tensor:
    x *= 2
    return x


def write_rows(x: Tensor) -> Tensor:
    x[1:] = x[:-1].tanh()
    x.t().add_(1)
    return x


#: Ways to write into what is received, by functions that no module tells of.
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "operator": multiply_in_place,
    "relu": lambda x: functional.relu(x, inplace=True),
    "masked": lambda x: x.masked_fill_(x.detach() > 0, 0.5),
    "views": write_rows,
}


def checkpointed(stage: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(stage.block, x, use_reentrant=False)
    return stage.last(y)


def recurrent(stage: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(stage.cell(x))
    return x


def add_one(parameter: Tensor) -> None:
    parameter.grad += 1


def hooked() -> nn.Module:
    """Gradients are changed on their way: of a fork, of a weight that waits, and of one that does not."""

    def call(stage: Any, x: Tensor) -> Tensor:
        y = stage.a(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return recurrent(stage, y)

    module = Calls(call, a=linear(), cell=linear()).double()
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient * 3)
        parameter.register_post_accumulate_grad_hook(add_one)
    return module


#: Stages that take one tensor, by what is special in them.
STAGES: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(WIDTH), linear(bias=False), nn.GELU(), linear()),
    "no weights": lambda: nn.Tanh(),
    "nothing at all": lambda: nn.Identity(),
    "residual": lambda: Calls(lambda s, x: x + s.a(torch.relu(s.b(x))), a=linear(), b=linear()),
    "attention": lambda: Calls(attend, attention=nn.MultiheadAttention(WIDTH, 2), norm=nn.LayerNorm(WIDTH)),
    "all frozen": lambda: frozen(nn.Sequential(linear(), nn.Tanh(), linear())),
    "frozen within": lambda: nn.Sequential(linear(), frozen(nn.Sequential(nn.Tanh(), linear())), linear()),
    "low-rank adapter": lambda: Calls(lora, base=frozen(linear()), down=nn.Linear(WIDTH, 2), up=nn.Linear(2, WIDTH)),
    "weight twice": lambda: Calls(recurrent, cell=linear()),
    "weight twice, transposed": lambda: Calls(
        lambda s, x: functional.linear(torch.tanh(functional.linear(x, s.w)), s.w.t()) * s.w[0], w=weight(WIDTH, WIDTH)
    ),
    "weight behind weights": lambda: Calls(
        lambda s, x: functional.linear(torch.tanh(x @ s.a), s.a @ s.b) + (s.b * s.c)[0],
        **{name: weight(WIDTH, WIDTH) for name in "abc"},
    ),
    "normed weight": lambda: torch.nn.utils.parametrizations.weight_norm(linear()),
    "output without input": lambda: Calls(
        lambda s, x: (s.a(x), s.w * s.v, s.w * 2), a=linear(), w=weight(3), v=weight(3)
    ),
    "outputs share a weight": lambda: Calls(lambda s, x: (x * s.w, s.w * s.v), w=weight(WIDTH), v=weight(WIDTH)),
    "output twice": lambda: Calls(lambda s, x: (s.a(x),) * 2, a=linear()),
    "output is a branch and a spine": lambda: Calls(lambda s, x: ((y := s.a(x)), s.b(y)), a=linear(), b=linear()),
    "in place at once": lambda: nn.Sequential(nn.ReLU(inplace=True), linear(), nn.LeakyReLU(inplace=True), linear()),
    **{
        f"in place at once, {name}": lambda write=write: Calls(lambda s, x: s.a(write(x)), a=linear())
        for name, write in IN_PLACE.items()
    },
    "writes into a view": lambda: Calls(write_into_view, a=linear(), b=linear(), scale=weight(2)),
    "several outputs of one node": lambda: Calls(
        lambda s, x: s.a(x).chunk(3, dim=1)[1] * s.w + torch.unbind(x, 1)[0][:, None], a=linear(), w=weight(2)
    ),
    "numbers": lambda: Calls(
        lambda s, x: s.b(torch.tanh(s.a(x) * 0.5) * 2 + x / 3 - 1.5 * x**2), a=linear(), b=linear()
    ),
    "recurrent layer": lambda: Calls(lambda s, x: s.r(x[None])[0][0], r=nn.LSTM(WIDTH, WIDTH, num_layers=2)),
    "convolution": lambda: Calls(lambda s, x: s.c(x[:, None]).flatten(1), c=nn.Conv1d(1, 3, 3)),
    "batch norm": lambda: nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear()),
    "custom function": lambda: Calls(
        lambda s, x: s.b(Counted.apply(s.a(x), s.w)), a=linear(), b=linear(), w=weight(WIDTH)
    ),
    "custom function in a branch": lambda: Calls(
        lambda s, x: s.a(x) + Counted.apply(s.v, s.w), a=linear(), w=weight(WIDTH), v=weight(ROWS, WIDTH)
    ),
    "hooks": hooked,
    "compiled": lambda: torch.compile(nn.Sequential(linear(), nn.Tanh(), linear()), backend="aot_eager"),
    "compiled within": lambda: nn.Sequential(
        linear(), torch.compile(nn.Sequential(linear(), nn.Tanh()), backend="aot_eager"), linear()
    ),
    "gradient of its own": lambda: Calls(
        lambda s, x: torch.autograd.grad(torch.tanh(s.a(y := s.b(x))).sum(), y, create_graph=True)[0] + x,
        a=linear(),
        b=linear(),
    ),
    "checkpointed": lambda: Calls(
        checkpointed, block=nn.Sequential(linear(), nn.Tanh(), nn.LayerNorm(WIDTH), linear()), last=linear()
    ),
    "checkpointed branch": lambda: Calls(
        lambda s, x: checkpoint(lambda x: s.norm(x) + s.table(torch.arange(ROWS)), x, use_reentrant=False),
        norm=nn.LayerNorm(WIDTH),
        table=nn.Embedding(ROWS, WIDTH),
    ),
}
