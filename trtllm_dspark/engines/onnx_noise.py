# SPDX-License-Identifier: Apache-2.0
"""The keyed Gumbel noise of `ops.noise` as ONNX: Philox-4x32-10 in int64 arithmetic.

Products are taken in halves, so that nothing leaves int64: the same bits as numpy's, and Gumbels in
float64. TensorRT has neither float64 nor bitwise operators on int64: there the plugin does this.
"""

from __future__ import annotations

from trtllm_dspark.ops.noise import _MULTIPLIERS, _WEYL, NUM_ROUNDS, Purpose

DOUBLE = 11
"""onnx.TensorProto.DOUBLE"""
_PREPARE = """
words = Constant <value_int = 4294967296> ()
half = Constant <value_int = 65536> ()
seed_column = Unsqueeze ({seeds}, second)
seed_low = Mod (seed_column, words)
seed_rest = Sub (seed_column, seed_low)
seed_shifted = Div (seed_rest, words)
seed_high = Mod (seed_shifted, words)
position_column = Unsqueeze ({positions}, second)
three = Constant <value_int = 3> ()
padded_size = Add ({vocab}, three)
four = Constant <value_int = 4> ()
num_lanes = Div (padded_size, four)
lanes_flat = Range (zero, num_lanes, one)
lanes = Unsqueeze (lanes_flat, first)
purpose = Constant <value_int = {purpose}> ()
multiplier0_high = Constant <value_int = {m0_high}> ()
multiplier0_low = Constant <value_int = {m0_low}> ()
multiplier1_high = Constant <value_int = {m1_high}> ()
multiplier1_low = Constant <value_int = {m1_low}> ()
weyl0 = Constant <value_int = {weyl0}> ()
weyl1 = Constant <value_int = {weyl1}> ()
"""
_PRODUCT = """
x{n} = Mul ({counter}, multiplier{m}_high)
y{n} = Mul ({counter}, multiplier{m}_low)
y{n}_high = Div (y{n}, half)
y{n}_low = Mod (y{n}, half)
t{n} = Add (x{n}, y{n}_high)
high{n} = Div (t{n}, half)
t{n}_low = Mod (t{n}, half)
t{n}_shifted = Mul (t{n}_low, half)
low{n} = Add (t{n}_shifted, y{n}_low)
"""
_MIX = """
mixed{r}_0 = BitwiseXor (high{r}_1, {c1})
c{r}_0 = BitwiseXor (mixed{r}_0, {k0})
mixed{r}_2 = BitwiseXor (high{r}_0, {c3})
c{r}_2 = BitwiseXor (mixed{r}_2, {k1})
k{r}_0_sum = Add ({k0}, weyl0)
k{r}_0 = Mod (k{r}_0_sum, words)
k{r}_1_sum = Add ({k1}, weyl1)
k{r}_1 = Mod (k{r}_1_sum, words)
"""
_GUMBEL = """
third = Constant <value_ints = [2]> ()
{unsqueezed}
stacked = Concat <axis = 2> ({names})
row_shape = Constant <value_ints = [0, -1]> ()
all_words = Reshape (stacked, row_shape)
vocab_end = Unsqueeze ({vocab}, first)
row_words = Slice (all_words, first, vocab_end, second)
word_numbers = Cast <to = {double}> (row_words)
narrow_half = Constant <value_float = 0.5> ()
one_half = Cast <to = {double}> (narrow_half)
narrow_unit = Constant <value_float = {unit}> ()
unit = Cast <to = {double}> (narrow_unit)
middles = Add (word_numbers, one_half)
noise_uniforms = Mul (middles, unit)
log_uniforms = Log (noise_uniforms)
exponentials = Neg (log_uniforms)
log_exponentials = Log (exponentials)
gumbels = Neg (log_exponentials)
"""


def gumbel_lines(seeds: str, positions: str, vocab: str) -> str:
    """Nodes that make `gumbels` [N, V] float64 of COUPLED keys.

    The arguments name tensors: seeds and positions [N] int64, the size V int64 scalar. The text
    around it has made zero, one (scalars), first and second ([0], [1]).
    """
    halves = [divmod(m, 65536) for m in _MULTIPLIERS]
    text = _PREPARE.format(
        seeds=seeds,
        positions=positions,
        vocab=vocab,
        purpose=int(Purpose.COUPLED),
        m0_high=halves[0][0],
        m0_low=halves[0][1],
        m1_high=halves[1][0],
        m1_low=halves[1][1],
        weyl0=_WEYL[0],
        weyl1=_WEYL[1],
    )
    counter, key = ["lanes", "position_column", "zero", "purpose"], ["seed_low", "seed_high"]
    for r in range(NUM_ROUNDS):
        text += _PRODUCT.format(n=f"{r}_0", m=0, counter=counter[0])
        text += _PRODUCT.format(n=f"{r}_1", m=1, counter=counter[2])
        text += _MIX.format(r=r, c1=counter[1], c3=counter[3], k0=key[0], k1=key[1])
        counter = [f"c{r}_0", f"low{r}_1", f"c{r}_2", f"low{r}_0"]
        key = [f"k{r}_0", f"k{r}_1"]
    names = [f"word{i}" for i in range(4)]
    unsqueezed = [
        f"{name} = Unsqueeze ({c}, third)" for name, c in zip(names, counter, strict=True)
    ]
    return text + _GUMBEL.format(
        unsqueezed="\n".join(unsqueezed),
        names=", ".join(names),
        vocab=vocab,
        unit=2.0**-32,
        double=DOUBLE,
    )
