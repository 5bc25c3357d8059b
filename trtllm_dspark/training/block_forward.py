# SPDX-License-Identifier: Apache-2.0
"""The drafter's dense forward for training: many blocks of many sequences in one pass, no pages.

Context K/V is computed once per sequence and layer. Matrix products run over all rows at once;
attention runs sequence by sequence, blocks × own rows and blocks × earlier context rows in one
soft-max. Gives the same hidden states as the paged path of `DSparkModel`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from trtllm_dspark.models.drafter import Attend, DSparkModel
from trtllm_dspark.training.packing import PackedBlocks


def forward_blocks(model: DSparkModel, taps: torch.Tensor, packed: PackedBlocks) -> torch.Tensor:
    """Hidden states after the final norm, [N, γ, H]; taps [C, T·H] of the packed context rows."""
    block_len = model.block_len
    anchors = torch.from_numpy(packed.anchors)
    x = model.embed_blocks(torch.from_numpy(packed.token_ids[packed.anchor_rows]))
    positions = (anchors[:, None] + torch.arange(block_len)).view(-1)
    rope = model.rope_table.index_select(0, positions)
    masks = context_masks(packed, taps.dtype, block_len)
    context = model.project_context(taps, torch.from_numpy(packed.positions))
    for layer, (k, v) in zip(model.layers, context, strict=True):
        x = layer(x, rope, dense_attend(k, v, packed, masks, block_len, model.attention_scale))
    return model.finish_blocks(x)


def context_masks(packed: PackedBlocks, dtype: torch.dtype, block_len: int) -> list[torch.Tensor]:
    """Additive masks, one per sequence: [1, n, 1, 1, longest visible context] for its n blocks."""
    masks = []
    for index in range(len(packed.cu_seq_lens) - 1):
        anchors = torch.from_numpy(packed.anchors[_blocks(packed, index)])
        length = int(anchors.max()) if len(anchors) else 0
        hidden = torch.arange(length)[None, :] >= anchors[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        masks.append(mask[None, :, None, None, :])
    return masks


def dense_attend(
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    packed: PackedBlocks,
    masks: list[torch.Tensor],
    block_len: int,
    scale: float,
) -> Attend:
    """Attention of one layer over its context K/V ([C, kv_heads, d]) and the blocks' own rows."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        for index, mask in enumerate(masks):
            blocks = _blocks(packed, index)
            rows = slice(blocks.start * block_len, blocks.stop * block_len)
            start = int(packed.cu_seq_lens[index])
            context = slice(start, start + mask.shape[-1])
            if blocks.stop > blocks.start:
                outputs.append(
                    attend_sequence(
                        q[rows] * scale,
                        (k[rows], v[rows]),
                        (context_k[context], context_v[context]),
                        mask,
                        block_len,
                    )
                )
        return torch.cat(outputs)

    return attend


def attend_sequence(
    q: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    context: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor,
    block_len: int,
) -> torch.Tensor:
    """n blocks of one sequence: scaled q [n·B, heads, d], own and context (K, V) → q's shape."""
    num_rows, heads, dim = q.shape
    kv_heads, length = own[0].shape[1], mask.shape[-1]
    n, per_kv = num_rows // block_len, heads // kv_heads
    q = q.view(n, block_len, kv_heads, per_kv, dim).permute(2, 0, 3, 1, 4)
    q_all = q.reshape(kv_heads, n * per_kv * block_len, dim)
    q_own = q_all.view(kv_heads * n, per_kv * block_len, dim)
    own_k, own_v = (
        t.view(n, block_len, kv_heads, dim).permute(2, 0, 1, 3).reshape(-1, block_len, dim)
        for t in own
    )
    context_k, context_v = (t.transpose(0, 1) for t in context)
    seen = torch.bmm(q_all, context_k.transpose(1, 2))
    seen = seen.view(kv_heads, n, per_kv, block_len, length) + mask
    near = torch.bmm(q_own, own_k.transpose(1, 2)).view(kv_heads, n, per_kv, block_len, block_len)
    weights = functional.softmax(torch.cat((seen, near), dim=-1), dim=-1)
    far, near = weights.split((length, block_len), dim=-1)
    out = torch.bmm(far.reshape(kv_heads, -1, length), context_v)
    out = out + torch.bmm(near.reshape(kv_heads * n, -1, block_len), own_v).view(out.shape)
    out = out.view(kv_heads, n, per_kv, block_len, dim).permute(1, 3, 0, 2, 4)
    return out.reshape(num_rows, heads, dim)


def _blocks(packed: PackedBlocks, index: int) -> slice:
    return slice(int(packed.cu_blocks[index]), int(packed.cu_blocks[index + 1]))
