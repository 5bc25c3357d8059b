# SPDX-License-Identifier: Apache-2.0
"""The drafter's dense forward for training: many blocks of many sequences in one pass, no pages.

Context K/V is computed once per sequence and layer. Matrix products run over all rows at once;
attention runs sequence by sequence, blocks × own rows and blocks × earlier context rows in one
soft-max. Gives the same hidden states as the paged path of `DSparkModel`.
"""

from __future__ import annotations

import torch

from trtllm_dspark.models.drafter import Attend, DSparkModel
from trtllm_dspark.training.block_softmax import BlockSoftmax, make_block_softmax
from trtllm_dspark.training.packing import PackedBlocks

PLAIN_SOFTMAX = make_block_softmax(False)


def forward_blocks(
    model: DSparkModel,
    taps: torch.Tensor,
    packed: PackedBlocks,
    softmax: BlockSoftmax = PLAIN_SOFTMAX,
) -> torch.Tensor:
    """Hidden states after the final norm, [N, γ, H]; taps [C, T·H] of the packed context rows."""
    block_len = model.block_len
    anchors = torch.from_numpy(packed.anchors)
    x = model.embed_blocks(torch.from_numpy(packed.token_ids[packed.anchor_rows]))
    positions = (anchors[:, None] + torch.arange(block_len)).view(-1)
    rope = model.rope_table.index_select(0, positions)
    context = model.project_context(taps, torch.from_numpy(packed.positions))
    for layer, (k, v) in zip(model.layers, context, strict=True):
        x = layer(x, rope, dense_attend(model, (k, v), packed, softmax))
    return model.finish_blocks(x)


def dense_attend(
    model: DSparkModel,
    context: tuple[torch.Tensor, torch.Tensor],
    packed: PackedBlocks,
    softmax: BlockSoftmax,
) -> Attend:
    """Attention of one layer over its context K/V ([C, kv_heads, d]) and the blocks' own rows."""
    block_len, scale = model.block_len, model.attention_scale

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outputs = []
        for index in range(len(packed.cu_seq_lens) - 1):
            first, last = packed.cu_blocks[index : index + 2].tolist()
            if first == last:
                continue
            anchors = torch.from_numpy(packed.anchors[first:last])
            rows = slice(first * block_len, last * block_len)
            start = int(packed.cu_seq_lens[index])
            seen = slice(start, start + int(anchors[-1]))
            outputs.append(
                attend_sequence(
                    q[rows] * scale,
                    (k[rows], v[rows]),
                    (context[0][seen], context[1][seen]),
                    anchors,
                    softmax,
                )
            )
        return torch.cat(outputs)

    return attend


def attend_sequence(
    q: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    context: tuple[torch.Tensor, torch.Tensor],
    anchors: torch.Tensor,
    softmax: BlockSoftmax,
) -> torch.Tensor:
    """n blocks of one sequence: scaled q [n·B, heads, d], own and context (K, V) → q's shape.

    anchors [n] ascending; context holds the rows before the last of them.
    """
    num_rows, heads, dim = q.shape
    kv_heads, n, length = own[0].shape[1], len(anchors), len(context[0])
    block_len, per_kv = num_rows // n, heads // kv_heads
    q = q.view(n, block_len, kv_heads, per_kv, dim).permute(2, 0, 3, 1, 4).contiguous()
    q_all = q.view(kv_heads, n * per_kv * block_len, dim)
    q_own = q_all.view(kv_heads * n, per_kv * block_len, dim)
    own_k, own_v = (
        t.view(n, block_len, kv_heads, dim).permute(2, 0, 1, 3).reshape(-1, block_len, dim)
        for t in own
    )
    context_k, context_v = (t.transpose(0, 1) for t in context)
    far = torch.bmm(q_all, context_k.transpose(1, 2))
    near = torch.bmm(q_own, own_k.transpose(1, 2))
    shape = (kv_heads, n, per_kv, block_len)
    far, near = softmax(far.view(*shape, length), near.view(*shape, block_len), anchors)
    out = torch.bmm(far.view(kv_heads, -1, length), context_v)
    out = out + torch.bmm(near.view(kv_heads * n, -1, block_len), own_v).view(out.shape)
    out = out.view(kv_heads, n, per_kv, block_len, dim).permute(1, 3, 0, 2, 4)
    return out.reshape(num_rows, heads, dim)
