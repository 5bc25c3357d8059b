# SPDX-License-Identifier: Apache-2.0
"""The light heads on top of the drafter's backbone: sequential (Markov, gated, RNN) and confidence.

Every sequential head comes down to features f_k of rank r, from the previous token and h_k, with
logits_k = U_k + W2 f_k. They know nothing of caches, sampling or the frozen head that makes U.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from trtllm_dspark.config import DrafterConfig
from trtllm_dspark.ops import native_markov
from trtllm_dspark.ops.linear import Linear
from trtllm_dspark.ops.markov import PEAK_LIMIT


class VocabularyProjection(Linear):
    """W2 [V, r]; once packed it also finds the best token without adding up all of them."""

    def __init__(self, rank: int, vocab_size: int) -> None:
        super().__init__(rank, vocab_size)
        self._norms: torch.Tensor | None = None

    def pack_(self) -> None:
        """See `Linear`."""
        super().pack_()
        self._norms = native_markov.row_norms(self.weight)

    def find_best(
        self, base_logits: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Arg-max [R] of U + W2 f and its log-odds, or None where there is no kernel for it."""
        if self._norms is None:
            return None
        return native_markov.markov_argmax(base_logits, features, self.weight, self._norms)


class SequentialHead(nn.Module):
    """W1 [V, r], W2 [V, r] and what turns W1[x_{k−1}] (and h_k) into features.

    `markov`: f = e. `gated`: f = σ(G[h; e]) ⊙ e. `rnn`: z = [s; e; h], s ← σ(W_g z)⊙s +
    (1 − σ(W_g z))⊙tanh(W_c z), f = tanh(W_o z) with the state before the update in z, s_0 = 0.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.head_type = config.head_type
        self.rank = rank
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.w1.weight.requires_grad_(False)
        self.w2 = VocabularyProjection(rank, config.vocab_size)
        if self.head_type == "gated":
            self.gate_proj = Linear(hidden + rank, rank, bias=True)
        elif self.head_type == "rnn":
            self.joint_proj = Linear(2 * rank + hidden, 3 * rank, bias=True)

    def embed(self, previous_ids: torch.Tensor) -> torch.Tensor:
        """W1[x_{k−1}]: [...] int → [..., r]; the confidence head sees it too."""
        return self.w1(previous_ids)

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One slot: embedded [R, r], hidden [R, H], state [R, r] → (features [R, r], next state).

        A `None` state is s_0 = 0; heads without a state return `None`.
        """
        if self.head_type == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1)))
            return gate * embedded, None
        if self.head_type == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            joint = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
        return embedded, None

    def scan(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All slots, teacher-forced: embedded [N, γ, r], hidden [N, γ, H] → [N, γ, r]."""
        if self.head_type != "rnn":
            return self.step(embedded, hidden, None)[0]
        state, features = None, []
        for slot in range(embedded.shape[1]):
            feature, state = self.step(embedded[:, slot], hidden[:, slot], state)
            features.append(feature)
        return torch.stack(features, dim=1)


class ConfidenceHead(nn.Module):
    """Logit of c_k = σ(w·[h_k; W1[x_{k−1}]; l_k] + b), the last two where the drafter has them.

    The peak l_k is the log-odds of the likeliest token of slot k (`ops.markov.peak_log_odds`): made
    of the context and the drafts before alone, so that it may decide what is verified.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.with_peak = config.confidence_with_peak
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        width += self.with_peak
        self.proj = Linear(width, 1, bias=config.confidence_bias)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor | None,
        peak: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [..., H], embedded [..., r], peak [...] float32 → logits [...] float32."""
        features = self.join(hidden, embedded, peak)
        bias = None if self.proj.bias is None else self.proj.bias.float()
        return functional.linear(features, self.proj.weight.float(), bias).squeeze(-1)

    def join(
        self, hidden: torch.Tensor, embedded: torch.Tensor | None, peak: torch.Tensor | None
    ) -> torch.Tensor:
        """What w is multiplied with: [..., H (+ r) (+ 1)] float32."""
        parts = [hidden.float()]
        if self.with_markov:
            if embedded is None:
                raise ValueError("the confidence head needs W1[x_{k−1}] and found no embedding")
            parts.append(embedded.float())
        if self.with_peak:
            if peak is None:
                raise ValueError("the confidence head needs the slot's peak and found none")
            parts.append(peak.float().clamp(-PEAK_LIMIT, PEAK_LIMIT).unsqueeze(-1))
        return torch.cat(parts, dim=-1)
