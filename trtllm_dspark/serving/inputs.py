# SPDX-License-Identifier: Apache-2.0
"""Typed reading of one request's input tensors, with refusals that name tensor, value and bound.

Knows numpy arrays by tensor name; the server has already checked data types and ranks against the
model's configuration. Knows no sampling and no server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from trtllm_dspark.errors import InvalidRequestError, UnsupportedError
from trtllm_dspark.serving.tensors import InputSpec, Support

MAX_NUM_WORDS = 128
"""Stop words, bad words or bias words in one request, each."""
MAX_WORDS_BYTES = 16384
"""Bytes of all words of one kind in one request."""

Tensors = Mapping[str, npt.NDArray]


def read_scalar(tensors: Tensors, *names: str) -> object | None:
    """The value of a one-element tensor under any of its spellings, None where none was sent."""
    found = {name: _one(name, tensors[name]) for name in names if name in tensors}
    if len({repr(value) for value in found.values()}) > 1:
        both = " and ".join(f"{name} = {value}" for name, value in found.items())
        raise InvalidRequestError(f"{both} contradict each other: send one of them")
    return next(iter(found.values()), None)


def _one(name: str, array: npt.NDArray) -> object:
    if array.size != 1:
        raise InvalidRequestError(
            f"{name} has {array.size} elements (shape {list(array.shape)}): one is allowed"
        )
    return array.reshape(-1)[0].item() if array.dtype != object else array.reshape(-1)[0]


def read_int(tensors: Tensors, *names: str) -> int | None:
    """A one-element integer tensor."""
    value = read_scalar(tensors, *names)
    return None if value is None else int(value)  # type: ignore[call-overload]


def read_float(tensors: Tensors, *names: str) -> float | None:
    """A one-element float tensor, at the precision it was sent in (0.7 stays 0.7)."""
    value = read_scalar(tensors, *names)
    return None if value is None else float(str(np.float32(value)))  # type: ignore[arg-type]


def read_bool(tensors: Tensors, name: str, default: bool = False) -> bool:
    """A one-element boolean tensor."""
    value = read_scalar(tensors, name)
    return default if value is None else bool(value)


def decode_utf8(name: str, value: object) -> str:
    """Text of a BYTES element; bytes that are not UTF-8 are refused with their position."""
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")  # type: ignore[call-overload]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8: byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}"
        ) from error


def read_text(tensors: Tensors, name: str) -> str:
    """The one string of a required tensor."""
    if name not in tensors:
        raise InvalidRequestError(f"{name} is missing: send exactly one string")
    return decode_utf8(name, _one(name, tensors[name]))


def read_words(tensors: Tensors, name: str) -> tuple[str, ...]:
    """Words of a list tensor; empty words ask for nothing and are left out."""
    if name not in tensors:
        return ()
    values = [v.encode() if isinstance(v, str) else bytes(v) for v in tensors[name].reshape(-1)]
    values = [value for value in values if value]
    num_bytes = sum(len(value) for value in values)
    if len(values) > MAX_NUM_WORDS or num_bytes > MAX_WORDS_BYTES:
        raise InvalidRequestError(
            f"{name} holds {len(values)} words of {num_bytes} bytes: at most {MAX_NUM_WORDS} words "
            f"of {MAX_WORDS_BYTES} bytes together are allowed"
        )
    return tuple(decode_utf8(name, value) for value in values)


def read_word_ids(tensors: Tensors, name: str) -> tuple[tuple[int, ...], ...]:
    """Token sequences of a [2, n] tensor: ids joined together, and end offsets padded with −1.

    Example: [[5, 6, 7], [2, 3, −1]] → ((5, 6), (7,)).
    """
    if name not in tensors or tensors[name].size == 0:
        return ()
    array = tensors[name].reshape(-1, *tensors[name].shape[-2:])
    if array.shape[0] != 1 or array.shape[1] != 2:
        raise InvalidRequestError(
            f"{name} has shape {list(tensors[name].shape)}: it must be [1, 2, n]"
        )
    ids, offsets = array[0]
    ends = [int(end) for end in offsets if end > 0]
    if ends != sorted(set(ends)) or (ends and ends[-1] > len(ids)) or len(ends) > MAX_NUM_WORDS:
        raise InvalidRequestError(
            f"{name} has end offsets {ends[:8]}: they must ascend, be at most {len(ids)} and be "
            f"{MAX_NUM_WORDS} or fewer"
        )
    return tuple(
        tuple(int(i) for i in ids[start:end])
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    )


def write_word_ids(words: list[list[int]]) -> npt.NDArray[np.int32]:
    """The [2, n] form of token sequences; nothing gives [2, 0]."""
    ids = [i for word in words for i in word]
    offsets = np.cumsum([len(word) for word in words]).tolist()
    offsets += [-1] * (len(ids) - len(offsets))
    return np.array([ids, offsets], np.int32).reshape(2, len(ids))


def refuse_unsupported(tensors: Tensors, refused: Mapping[str, InputSpec]) -> None:
    """Refuse by name what this server does not do; neutral values and empty tensors ask nothing."""
    for name in tensors:
        spec = refused.get(name)
        if spec is None or tensors[name].size == 0:
            continue
        if spec.support is Support.NEUTRAL_ONLY:
            value = read_scalar(tensors, name)
            if value in spec.neutral:
                continue
            allowed = " or ".join(str(v) for v in spec.neutral)
            raise UnsupportedError(
                f"{name} = {value} is not supported ({spec.note}): leave it out or send {allowed}"
            )
        raise UnsupportedError(f"{name} is not supported ({spec.note}): leave it out")


def parse_parameters(parameters: str | Mapping[str, object] | None) -> dict[str, object]:
    """Request parameters as a dictionary, without the server's own (triton_…)."""
    values = json.loads(parameters or "{}") if isinstance(parameters, str) else parameters or {}
    return {name: v for name, v in values.items() if not name.startswith("triton_")}


def refuse_unknown_parameters(parameters: str | Mapping[str, object] | None) -> None:
    """Refuse request parameters (HTTP generate turns unknown keys into them) by name."""
    names = list(parse_parameters(parameters))
    if names:
        raise InvalidRequestError(
            f"unknown option {names[0]!r}: see the model's metadata for the inputs it takes"
        )


def refuse_batches(tensors: Tensors, name: str) -> None:
    """Refuse several prompts in one request, judged by a required tensor."""
    if name in tensors and tensors[name].shape and tensors[name].shape[0] > 1:
        raise UnsupportedError(
            f"{name} has a batch of {tensors[name].shape[0]}: send one prompt per request; the "
            "server batches requests by itself"
        )
