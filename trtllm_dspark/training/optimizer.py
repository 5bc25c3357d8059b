# SPDX-License-Identifier: Apache-2.0
"""AdamW and Muon on float32 master weights of a bfloat16 model; schedules; averaging.

Knows parameters and gradients by name, nothing of losses or data.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def learning_rate_factor(step: int, num_steps: int, warmup: float, schedule: str) -> float:
    """Factor on the peak rate at 0-based `step`: linear warm-up, then the schedule."""
    warmup_steps = max(1, math.ceil(warmup * num_steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - progress if schedule == "linear" else 1.0


OPTIMIZERS = ("adamw", "muon")


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether it maps hidden vectors to hidden vectors: not a head's table, not a vector."""
    return parameter.ndim == 2 and not name.startswith(("markov.", "confidence."))


class MasterOptimizer:
    """Float32 masters, their moments and (optionally) an exponential moving average.

    `optimizer` "muon" moves hidden matrices along the orthogonalised momentum (Jordan et al. 2024),
    scaled to AdamW's step size, and everything else by AdamW. The model's own parameters are
    overwritten after every step. `ema_decay` 0 = no average.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        ema_decay: float = 0.0,
        optimizer: str = "adamw",
    ) -> None:
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in self.params.items()}
        self.lr, self.ema_decay = lr, ema_decay
        self.ema = {n: m.detach().clone() for n, m in self.masters.items()} if ema_decay else {}
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, master in self.masters.items():
            by_muon = optimizer == "muon" and is_hidden_matrix(name, master)
            (matrices if by_muon else rest).append(master)
        self._optimizers: dict[str, torch.optim.Optimizer] = {
            "adam": torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=0.0, fused=True)
        }
        if matrices:
            self._optimizers["muon"] = torch.optim.Muon(
                matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
        self.num_steps = 0

    def step(self, grads: dict[str, torch.Tensor], factor: float, max_norm: float = 1.0) -> float:
        """Clip, update masters with rate lr·factor, write the model back; return the gradient norm.

        grads are float32 by parameter name; a parameter without one stays as it is.
        """
        for name, master in self.masters.items():
            master.grad = grads.get(name)
        norm = nn.utils.clip_grad_norm_(self.masters.values(), max_norm)
        for inner in self._optimizers.values():
            inner.param_groups[0]["lr"] = self.lr * factor
            inner.step()
        self.num_steps += 1
        self._average()
        self.write_(self.masters)
        return float(norm)

    @torch.no_grad()
    def _average(self) -> None:
        if not self.ema_decay:
            return
        decay = min(self.ema_decay, (1 + self.num_steps) / (10 + self.num_steps))
        own, new = list(self.ema.values()), [m.detach() for m in self.masters.values()]
        torch._foreach_lerp_(own, new, 1.0 - decay)

    @torch.no_grad()
    def write_(self, values: dict[str, Any]) -> None:
        """Copy masters or averages into the model's parameters, in their dtype."""
        for name, parameter in self.params.items():
            parameter.copy_(values[name].detach())

    def weights_to_export(self) -> dict[str, torch.Tensor]:
        """The average where there is one, else the masters (float32)."""
        return self.ema or {n: m.detach() for n, m in self.masters.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything an exact continuation needs."""
        return {
            "masters": {n: m.detach() for n, m in self.masters.items()},
            "ema": self.ema,
            **{name: inner.state_dict() for name, inner in self._optimizers.items()},
            "num_steps": self.num_steps,
        }

    def can_load(self, state: dict[str, Any]) -> bool:
        """Whether `state` holds moments of the same kinds."""
        return all((name in state) == (name in self._optimizers) for name in ("adam", "muon"))

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        for name in self.ema:
            self.ema[name].copy_(state["ema"][name])
        for name, inner in self._optimizers.items():
            inner.load_state_dict(state[name])
        self.num_steps = int(state["num_steps"])
        self.write_(self.masters)
