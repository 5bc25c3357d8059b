# SPDX-License-Identifier: Apache-2.0
"""Frozen configurations with ranges checked at construction, JSON in and out.

Knows names and ranges, not files of other projects (that is `checkpoints`) and not how a system is
put together (that is `runtime`).
"""

from __future__ import annotations

import dataclasses
import json
import numbers
import re
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trtllm_dspark.errors import ConfigError

T = TypeVar("T")


def require(condition: bool, name: str, found: object, allowed: str) -> None:
    """Raise `ConfigError` with the field's name, the value found and what is allowed."""
    if not condition:
        raise ConfigError(f"{name} = {found!r} is not allowed: it must be {allowed}")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        require(self.factor >= 1.0, "rope_scaling.factor", self.factor, "≥ 1")
        require(
            self.high_freq_factor > self.low_freq_factor > 0,
            "rope_scaling.low_freq_factor/high_freq_factor",
            (self.low_freq_factor, self.high_freq_factor),
            "0 < low < high",
        )


@dataclass(frozen=True)
class ModelConfig:
    """A target decoder: Llama or Qwen3 family."""

    architecture: str = "llama"
    """'llama' or 'qwen3' (q/k norm)."""
    vocab_size: int = 32000
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.architecture in ("llama", "qwen3"),
            "architecture",
            self.architecture,
            "llama or qwen3",
        )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            require(getattr(self, name) >= 1, name, getattr(self, name), "≥ 1")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads/num_kv_heads",
            (self.num_heads, self.num_kv_heads),
            "a whole number of query heads per K/V head",
        )
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even (rotary halves)")


HEAD_TYPES = ("none", "markov", "gated", "rnn")


@dataclass(frozen=True)
class DrafterConfig:
    """A DSpark/DFlash drafter in the unified format (`label_shift` is always explicit)."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    vocab_size: int = 32000
    attention_bias: bool = False
    qk_norm: bool = True
    num_drafts: int = 7
    """γ: drafts per block."""
    label_shift: bool = True
    """True: slot k predicts anchor+k+1 (γ inputs). False: slot j itself (γ+1)."""
    mask_token_id: int = 0
    target_layer_ids: tuple[int, ...] = (0,)
    """Tapped decoder layers (0-based), in fc's input order; −1 is the embedding output."""
    num_target_layers: int = 2
    target_hidden_size: int = 256
    head_type: str = "none"
    markov_rank: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = False
    confidence_bias: bool = False
    confidence_with_peak: bool = False
    """The confidence head also sees the log-odds of its slot's likeliest token (our addition)."""

    def __post_init__(self) -> None:
        require(self.num_drafts >= 1, "num_drafts", self.num_drafts, "≥ 1")
        require(
            self.head_type in HEAD_TYPES,
            "head_type",
            self.head_type,
            f"one of {', '.join(HEAD_TYPES)}",
        )
        require(
            (self.markov_rank > 0) == (self.head_type != "none"),
            "markov_rank",
            self.markov_rank,
            "positive with a sequential head, 0 without",
        )
        require(
            len(self.target_layer_ids) >= 1,
            "target_layer_ids",
            self.target_layer_ids,
            "one layer or more",
        )
        require(
            all(-1 <= i < self.num_target_layers - 1 for i in self.target_layer_ids),
            "target_layer_ids",
            self.target_layer_ids,
            f"−1 to {self.num_target_layers - 2} (the last target layer must not be tapped)",
        )
        require(
            0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"inside the vocabulary of {self.vocab_size}",
        )
        require(
            not self.confidence_with_markov or self.head_type != "none",
            "confidence_with_markov",
            self.confidence_with_markov,
            "False without a sequential head",
        )
        require(
            not self.confidence_with_peak or self.confidence_head,
            "confidence_with_peak",
            self.confidence_with_peak,
            "False without a confidence head",
        )


@dataclass(frozen=True)
class BucketConfig:
    """The bucket grid and the limits of a step."""

    max_num_requests: int = 16
    """Requests decoded at once (max_batch_size)."""
    max_num_tokens: int = 512
    """Rows of one step at most, prefill chunks included; the last rung of the ladder."""
    request_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    ratios: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        require(self.max_num_requests >= 1, "max_num_requests", self.max_num_requests, "≥ 1")
        require(
            self.max_num_tokens >= self.max_num_requests,
            "max_num_tokens",
            self.max_num_tokens,
            f"≥ max_num_requests ({self.max_num_requests})",
        )
        require(
            bool(self.request_buckets)
            and list(self.request_buckets) == sorted(set(self.request_buckets)),
            "request_buckets",
            self.request_buckets,
            "ascending, without repetition",
        )
        require(self.request_buckets[0] >= 1, "request_buckets", self.request_buckets, "≥ 1")
        require(
            bool(self.ratios) and all(0.0 < r <= 1.0 for r in self.ratios),
            "ratios",
            self.ratios,
            "in (0, 1], one or more",
        )


@dataclass(frozen=True)
class CacheConfig:
    """The paged K/V pool."""

    page_size: int = 32
    """Tokens per page."""
    num_pages: int = 0
    """Pages, the scratch page included; 0 = enough for max_num_requests × max_seq_len."""
    enable_prefix_reuse: bool = True
    """Share full pages of equal prompt prefixes (target and drafter rows alike)."""

    def __post_init__(self) -> None:
        require(self.page_size >= 1, "page_size", self.page_size, "≥ 1")
        require(
            self.num_pages == 0 or self.num_pages >= 2,
            "num_pages",
            self.num_pages,
            "0 (auto) or ≥ 2",
        )


@dataclass(frozen=True)
class SchedulerConfig:
    """Which policy plans verification; `options` are checked by the policy itself."""

    policy: str = "adaptive"
    options: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    """Refuse sampling requests the policy does not cover, instead of drafting greedily."""


@dataclass(frozen=True)
class SystemConfig:
    """Everything `runtime.build_system` needs."""

    model_dir: str = ""
    drafter: str = "auto"
    """'auto' (the model's own drafter, else ngram), 'none', 'ngram', or a drafter directory."""
    backend: str = "torch"
    device: str = "cpu"
    """cpu, cuda or cuda:N; whether the machine has it is checked at load."""
    dtype: str = "auto"
    """auto | bfloat16 | float32 (float16 on cuda)."""
    num_threads: int = 0
    """Torch intra-op threads; 0 = all cores."""
    max_seq_len: int = 2048
    max_queue_size: int = 0
    """Waiting requests at most; 0 = unbounded."""
    buckets: BucketConfig = field(default_factory=BucketConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    profile: str = "auto"
    """Latency table at start: never | auto | force."""

    def __post_init__(self) -> None:
        require(
            self.dtype in ("auto", "bfloat16", "float32", "float16"),
            "dtype",
            self.dtype,
            "auto, bfloat16, float32 or float16",
        )
        require(
            re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device) is not None,
            "device",
            self.device,
            "cpu, cuda or cuda:N",
        )
        require(
            self.backend in ("torch", "tensorrt", "tensorrt_rtx"),
            "backend",
            self.backend,
            "a known backend",
        )
        require(
            self.profile in ("never", "auto", "force"),
            "profile",
            self.profile,
            "never, auto or force",
        )
        require(self.max_seq_len >= 2, "max_seq_len", self.max_seq_len, "≥ 2")


def to_json_dict(config: Any) -> dict[str, Any]:
    """Plain JSON data of a frozen configuration (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json_dict(cls: type[T], data: dict[str, Any], where: str = "") -> T:
    """Build `cls` (nested dataclasses too) from JSON data; unknown keys are refused by name."""
    if not isinstance(data, dict):
        raise ConfigError(
            f"{where or cls.__name__}: expected a JSON object, found {type(data).__name__}"
        )
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise ConfigError(
            f"{where or cls.__name__}: unknown keys {unknown}; known keys are {names}"
        )
    required = {
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(data))
    if missing:
        raise ConfigError(f"{where or cls.__name__}: the keys {missing} are missing")
    return cls(
        **{
            key: _coerce(hints[key], value, f"{where or cls.__name__}.{key}")
            for key, value in data.items()
        }
    )


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """`value` as `hint` has it (lists become tuples); refused where it is of another kind."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    for option in get_args(hint) if is_union else (hint,):
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return from_json_dict(option, value, where)  # type: ignore[arg-type]
        if get_origin(option) is tuple and isinstance(value, (list, tuple)):
            kinds = get_args(option)
            kinds = kinds[:1] * len(value) if kinds[-1:] == (...,) else kinds
            if len(kinds) == len(value):
                pairs = enumerate(zip(kinds, value, strict=True))
                return tuple(_coerce(k, v, f"{where}[{i}]") for i, (k, v) in pairs)
        if _is_kind(option, value):
            return value
    wanted = str(hint) if is_union or get_origin(hint) else getattr(hint, "__name__", str(hint))
    raise ConfigError(f"{where} = {value!r} is of the wrong type: it must be {wanted}")


def _is_kind(option: Any, value: Any) -> bool:
    if option is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if option in (bool, str, type(None)):
        return isinstance(value, option)
    if get_origin(option) in (tuple, dict):
        return get_origin(option) is dict and isinstance(value, dict)
    return not dataclasses.is_dataclass(option)


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object; a missing or broken file is a `ConfigError` that names it."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data
