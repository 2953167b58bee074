"""Muon for the matrices inside the layers, AdamW for everything else."""

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the usual quintic; maps singular values near one


class Muon(torch.optim.Optimizer):
    """Momentum whose update is the nearest orthogonal matrix; parameters of two or more dims.

    Leading dimensions are batches of matrices. Parameters of one shape are updated together.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update."""
        assert closure is None, "this optimizer takes no closure"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for same in by_shape.values():
                self._update(same, group)

    def _update(self, same: list[nn.Parameter], group: dict[str, float]) -> None:
        grads = torch.stack([_gradient(parameter) for parameter in same])
        state = self.state[same[0]]  # of the whole stack
        if not state:
            state["velocity"] = torch.zeros_like(grads)
        velocity, momentum = state["velocity"], group["momentum"]
        velocity.lerp_(grads, 1 - momentum)
        update = orthogonal(grads.lerp(velocity, momentum))
        rows, columns = update.shape[-2:]
        scale = group["lr"] * max(1.0, rows / columns) ** 0.5
        for parameter, change in zip(same, update.unbind(0), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(change.to(parameter.dtype), alpha=scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each of [..., rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.mT if is_tall else x
    return out


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a parameter has no gradient"
    return parameter.grad


class Schedule:
    """Learning rates over a run: a short rise, a plateau and a linear fall to zero."""

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], warmup: float = 0.02, fall: float = 0.5
    ) -> None:
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.rates = [group["lr"] for group in self.groups]
        self.warmup, self.fall = warmup, fall

    def set(self, progress: float) -> float:
        """Set the rates for a place in [0, 1] of the run; returns their factor."""
        factor = min(1.0, (progress + 1e-3) / self.warmup, max(0.0, 1 - progress) / self.fall)
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate * factor
        return factor
