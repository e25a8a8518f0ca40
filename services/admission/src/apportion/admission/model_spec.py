"""What a job may say about its model instead of MiB: the fields of a request's `model` object, and their checks.

`parse_model` makes a checked `ModelSpec` of plain data, `architecture_of` the shape that it means: a row of the known
models, or what the request spelled out. Turning either into bytes is left to `sizing`.
"""

from __future__ import annotations

import difflib
import math
import re
from enum import StrEnum

import msgspec

from apportion.admission.architecture import (
    Architecture,
    Family,
    block_params,
    embedding_params,
    total_params,
)
from apportion.admission.models import canonical_name, known_model
from apportion.contracts.causes import Refusal


class ModelSpecInvalid(ValueError):
    """A field of a `model` object can't be used; says which, what was expected, and what was found."""

    def __init__(self, *, path: str, expected: str, found: object, code: Refusal = Refusal.FIELD_INVALID) -> None:
        self.code = code
        self.path = path
        self.expected = expected
        self.found = found
        super().__init__(f"{path}: expected {expected}, found {found!r}")


class Dtype(StrEnum):
    """How weights are stored. The 4- and 8-bit formats leave embeddings, norms and (mostly) the head at 16 bits."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    GPTQ_INT8 = "gptq-int8"
    GPTQ_INT4 = "gptq-int4"
    AWQ = "awq"
    NF4 = "nf4"
    NF4_DQ = "nf4-dq"
    FP4 = "fp4"
    FP4_DQ = "fp4-dq"
    MXFP4 = "mxfp4"


class KvDtype(StrEnum):
    """How keys and values are cached; `auto` is 16 bits, or 32 with 32-bit weights."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class Engine(StrEnum):
    """What runs the model; decides workspaces and which modules a quantiser leaves alone."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"
    LITGPT = "litgpt"
    SGLANG = "sglang"
    TGI = "tgi"
    OTHER = "other"


class Attention(StrEnum):
    """Whether attention scores are held in memory (`eager`) or recomputed in blocks (`sdpa`, `flash`)."""

    AUTO = "auto"
    EAGER = "eager"
    SDPA = "sdpa"
    FLASH = "flash"


class Measure(StrEnum):
    """What p50 counts: the tensors that the framework's allocator holds, or all that the device shows as used."""

    ALLOCATOR = "allocator"
    DEVICE = "device"


class Method(StrEnum):
    """How a model is trained; `none` is inference."""

    NONE = "none"
    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Optimizer(StrEnum):
    """What keeps state per trained parameter."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"
    LION = "lion"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the model is trained, if it is."""

    method: Method = Method.NONE
    optimizer: Optimizer = Optimizer.ADAMW
    rank: int = 8
    """Rank of LoRA's matrices."""
    target_modules: str = "attention"
    """Where LoRA's matrices sit: `attention` (queries and values) or `all` (every linear layer)."""
    checkpointing: bool = False
    """Activations are recomputed; one hidden state per layer is kept."""
    master_weights: bool = True
    """With 16-bit weights: the optimizer keeps a 32-bit copy (mixed precision)."""
    zero_stage: int = 0
    """0 to 3; FSDP's full sharding is 3."""
    data_parallel: int = 1
    """Devices that share what the stage shards."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job's `model` object: a known name, or an architecture, and how it is used.

    A field beside a known name replaces the table's value. What isn't said takes the default that the field names.
    """

    name: str = ""
    """A known model's name in any spelling; with an architecture beside it, merely a label."""
    params_millions: int | float | None = None
    family: Family | None = None
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int | None = None
    mlp: str = ""
    """`gated` (swiglu, geglu) or `plain` (gelu, relu)."""
    tied_embeddings: bool | None = None
    experts_total: int | None = None
    experts_active: int | None = None
    moe_intermediate: int | None = None
    shared_intermediate: int | None = None
    dense_layers: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int | None = None
    global_every: int | None = None

    dtype: Dtype = Dtype.BF16
    kv_dtype: KvDtype = KvDtype.AUTO
    group_size: int = 128
    """Weights that share one scale, in GPTQ and AWQ."""
    batch: int | None = None
    """Sequences at once on one device; 1 if not said."""
    context_tokens: int | None = None
    """Tokens of one sequence, prompt and output together; 2048 (training: 512) if not said."""
    prompt_tokens: int | None = None
    """Those of them that are read at once; all, if not said."""
    training: Training = Training()
    tensor_parallel: int = 1
    engine: Engine = Engine.OTHER
    attention: Attention = Attention.AUTO
    kv_pool_mib: int | None = None
    """An engine's fixed KV pool, which replaces the computed cache."""
    measure: Measure = Measure.ALLOCATOR


_DTYPE_SPELLINGS = {
    "float32": "fp32",
    "f32": "fp32",
    "32-true": "fp32",
    "bfloat16": "bf16",
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "16-true": "fp16",
    "fp8-e4m3": "fp8",
    "float8": "fp8",
    "w8a8": "int8",
    "llm.int8": "int8",
    "bnb.int8": "int8",
    "8bit": "int8",
    "4bit": "int4",
    "gptq": "gptq-int4",
    "gptq-4bit": "gptq-int4",
    "gptq-8bit": "gptq-int8",
    "awq-int4": "awq",
    "bnb.nf4": "nf4",
    "bnb.nf4-dq": "nf4-dq",
    "bnb-nf4": "nf4",
    "qlora": "nf4",
    "bnb.fp4": "fp4",
    "bnb.fp4-dq": "fp4-dq",
}
_OPTIMIZER_SPELLINGS = {
    "adam": "adamw",
    "adamw-torch": "adamw",
    "paged-adamw": "adamw",
    "adam8bit": "adamw-8bit",
    "adamw8bit": "adamw-8bit",
    "adam-8bit": "adamw-8bit",
    "adamw-bnb-8bit": "adamw-8bit",
    "paged-adamw-8bit": "adamw-8bit",
    "momentum": "sgd-momentum",
}
_MLP_SPELLINGS = {
    "gated": True,
    "swiglu": True,
    "geglu": True,
    "silu": True,
    "glu": True,
    "plain": False,
    "gelu": False,
    "relu": False,
}
_ENGINE_SPELLINGS = {"hf": "transformers", "peft": "transformers", "lit-gpt": "litgpt"}
_FAMILY_SPELLINGS = {"encdec": "encoder-decoder", "seq2seq": "encoder-decoder", "causal": "decoder"}
# The wire contract's first draft said `precision`; the others are what models' own config.json and engines say.
_FIELD_SPELLINGS = {
    "precision": "dtype",
    "quantization": "dtype",
    "quantisation": "dtype",
    "tp": "tensor_parallel",
    "tensor_parallel_size": "tensor_parallel",
    "context": "context_tokens",
    "context_length": "context_tokens",
    "max_model_len": "context_tokens",
    "batch_size": "batch",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "intermediate",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
}
# Parameters counted one by one.
_PARAMETER_SPELLINGS = frozenset({"params", "parameters"})
_PARAMETERS_MIN = 100_000
_TRAINING_FIELD_SPELLINGS = {
    "optimiser": "optimizer",
    "gradient_checkpointing": "checkpointing",
    "lora_rank": "rank",
    "zero": "zero_stage",
}
# A degree of FSDP's full sharding is ZeRO's third stage over so many devices.
_FSDP = "fsdp"
_FULL_SHARDING = 3

_POSITIVE = (
    "params_millions",
    "layers",
    "hidden",
    "intermediate",
    "heads",
    "kv_heads",
    "head_dim",
    "vocab",
    "experts_total",
    "experts_active",
    "moe_intermediate",
    "batch",
    "context_tokens",
    "prompt_tokens",
    "tensor_parallel",
    "group_size",
)
_NOT_NEGATIVE = (
    "shared_intermediate",
    "dense_layers",
    "q_lora_rank",
    "kv_lora_rank",
    "rope_dim",
    "v_head_dim",
    "sliding_window",
    "global_every",
    "kv_pool_mib",
)
# Beyond any machine; keeps a slip of the keyboard from becoming an overflow elsewhere.
_COUNT_MAX = 10**9


def parse_model(data: object, *, path: str = "model") -> ModelSpec:
    """The checked spec that this plain data means; `path` names the object in errors.

    Raises ModelSpecInvalid, with the field's path, what was expected and what was found.
    """
    if not isinstance(data, dict):
        raise ModelSpecInvalid(path=path, expected="an object", found=data)
    fields = _respelled(data, path)
    try:
        spec = msgspec.convert(fields, ModelSpec)
    except msgspec.ValidationError as err:
        raise _invalid_from(str(err), fields, path) from err
    check(spec, path=path)
    return spec


def check(spec: ModelSpec, *, path: str = "model") -> None:
    """Nothing, if all values are in range and agree with each other; raises ModelSpecInvalid otherwise."""
    for field in _POSITIVE:
        value = getattr(spec, field)
        # `not 0 < x` also turns away NaN.
        if value is not None and not 0 < value <= _COUNT_MAX:
            raise ModelSpecInvalid(path=f"{path}.{field}", expected=f"a number from 1 to {_COUNT_MAX}", found=value)
    for field in _NOT_NEGATIVE:
        value = getattr(spec, field)
        if value is not None and not 0 <= value <= _COUNT_MAX:
            raise ModelSpecInvalid(path=f"{path}.{field}", expected=f"a number from 0 to {_COUNT_MAX}", found=value)
    training = spec.training
    for field, value, low, high in (
        ("rank", training.rank, 1, 65536),
        ("zero_stage", training.zero_stage, 0, 3),
        ("data_parallel", training.data_parallel, 1, 1_000_000),
    ):
        if not low <= value <= high:
            raise ModelSpecInvalid(
                path=f"{path}.training.{field}", expected=f"a number from {low} to {high}", found=value
            )
    if training.target_modules not in ("attention", "all"):
        raise ModelSpecInvalid(
            path=f"{path}.training.target_modules", expected="one of attention, all", found=training.target_modules
        )
    if spec.mlp and spec.mlp not in _MLP_SPELLINGS:
        raise ModelSpecInvalid(
            path=f"{path}.mlp", expected=f"one of {', '.join(sorted(_MLP_SPELLINGS))}", found=spec.mlp
        )
    if spec.prompt_tokens and spec.context_tokens and spec.prompt_tokens > spec.context_tokens:
        raise ModelSpecInvalid(
            path=f"{path}.prompt_tokens", expected=f"at most context_tokens ({spec.context_tokens})",
            found=spec.prompt_tokens,
        )  # fmt: skip
    if training.method is Method.FULL and spec.dtype not in (Dtype.FP32, Dtype.BF16, Dtype.FP16, Dtype.FP8):
        raise ModelSpecInvalid(
            path=f"{path}.dtype", expected="fp32, bf16, fp16 or fp8 with training.method full", found=spec.dtype.value
        )
    if known_model(spec.name) is None and spec.params_millions is None and not _is_spelled_out(spec):
        if spec.name:
            raise ModelSpecInvalid(
                path=f"{path}.name", expected="a known model, or params_millions or an architecture", found=spec.name
            )
        raise ModelSpecInvalid(
            path=path,
            expected="a name, params_millions or an architecture",
            found="none of them",
        )
    arch = architecture_of(spec)
    if arch.kv_heads > arch.heads:
        raise ModelSpecInvalid(path=f"{path}.kv_heads", expected=f"at most heads ({arch.heads})", found=arch.kv_heads)
    if arch.experts_active > arch.experts:
        raise ModelSpecInvalid(
            path=f"{path}.experts_active", expected=f"at most experts_total ({arch.experts})", found=arch.experts_active
        )
    if arch.dense_layers > arch.layers:
        raise ModelSpecInvalid(
            path=f"{path}.dense_layers", expected=f"at most layers ({arch.layers})", found=arch.dense_layers
        )
    if spec.tensor_parallel > arch.heads:
        raise ModelSpecInvalid(
            path=f"{path}.tensor_parallel", expected=f"at most heads ({arch.heads})", found=spec.tensor_parallel
        )


def architecture_of(spec: ModelSpec) -> Architecture:
    """The shape that the spec means: the known model's, with the spec's own columns in place of the table's.

    Without a known name, what isn't said is filled in: heads of 128, as many kv heads as heads (the larger cache), an
    MLP four times as wide as the hidden state (8/3 if gated), and of a model known by its size alone, the depth and
    width that its size usually has.
    """
    known = known_model(spec.name)
    base = known.architecture if known is not None else _guessed_shape(spec)
    changes: dict[str, object] = {
        target: value
        for target, value in (
            ("family", spec.family),
            ("layers", spec.layers),
            ("hidden", spec.hidden),
            ("intermediate", spec.intermediate),
            ("heads", spec.heads),
            ("kv_heads", spec.kv_heads),
            ("head_dim", spec.head_dim),
            ("vocab", spec.vocab),
            ("gated", _MLP_SPELLINGS[spec.mlp] if spec.mlp else None),
            ("tied", spec.tied_embeddings),
            ("experts", spec.experts_total),
            ("experts_active", spec.experts_active),
            ("moe_intermediate", spec.moe_intermediate),
            ("shared_intermediate", spec.shared_intermediate),
            ("dense_layers", spec.dense_layers),
            ("q_lora_rank", spec.q_lora_rank),
            ("kv_lora_rank", spec.kv_lora_rank),
            ("rope_dim", spec.rope_dim),
            ("v_head_dim", spec.v_head_dim),
            ("window_tokens", spec.sliding_window),
            ("global_every", spec.global_every),
        )
        if value is not None
    }
    arch = msgspec.structs.replace(base, **changes)
    if spec.params_millions is not None and spec.tied_embeddings is None:
        arch = _tied_as_counted(arch, round(spec.params_millions * 1_000_000))
    return arch


def params_of(spec: ModelSpec) -> int:
    """Parameters: as the request says; else as published, if the shape is the table's; else as the shape implies."""
    if spec.params_millions is not None:
        return round(spec.params_millions * 1_000_000)
    known = known_model(spec.name)
    arch = architecture_of(spec)
    if known is not None and arch == known.architecture:
        return known.params_millions * 1_000_000
    return total_params(arch)


def family_key(spec: ModelSpec) -> str:
    """The group whose runs teach each other: same model, storage, engine and kind of training.

    Batch and context are left out: the estimate carries them, and the ratio to it is what is learned.
    """
    label = canonical_name(spec.name) if spec.name else f"{params_of(spec) // 1_000_000}m"
    # Ends up in keys and subjects of projections, where dots and spaces have a meaning.
    plain = re.sub(r"[^a-z0-9-]+", "-", label).strip("-")[:64] or "unnamed"
    return f"{plain}/{spec.dtype.value}/{spec.engine.value}/{spec.training.method.value}"


def _is_spelled_out(spec: ModelSpec) -> bool:
    return spec.layers is not None and spec.hidden is not None


def _guessed_shape(spec: ModelSpec) -> Architecture:
    if _is_spelled_out(spec):
        layers, hidden = spec.layers or 1, spec.hidden or 1
    else:
        # Published dense models keep near hidden = 128 x layers, so that 12 x layers x hidden^2 parameters fix both.
        params = (spec.params_millions or 1) * 1_000_000
        layers = spec.layers or max(2, round(math.cbrt(params / (12 * 128 * 128))))
        hidden = spec.hidden or max(64, 64 * round(math.sqrt(params / (12 * layers)) / 64))
    gated = _MLP_SPELLINGS.get(spec.mlp, True)
    heads = spec.heads or max(1, hidden // (spec.head_dim or 128))
    return Architecture(
        family=spec.family or Family.DECODER,
        layers=layers,
        hidden=hidden,
        intermediate=spec.intermediate or (hidden * 8 // 3 if gated else 4 * hidden),
        heads=heads,
        kv_heads=spec.kv_heads or heads,
        head_dim=spec.head_dim or max(1, hidden // heads),
        vocab=spec.vocab or 32000,
        gated=gated,
    )


def _tied_as_counted(arch: Architecture, params: int) -> Architecture:
    """The shape with its head tied or not, whichever comes nearer to this parameter count."""
    if arch.family in (Family.ENCODER, Family.VISION):
        return arch
    tied_params = block_params(arch) + embedding_params(arch)
    untied_params = tied_params + arch.vocab * arch.hidden
    is_tied = abs(params - tied_params) < abs(params - untied_params)
    return msgspec.structs.replace(arch, tied=is_tied)


def _respelled(data: dict[object, object], path: str) -> dict[str, object]:
    """The same fields under our names and values; two spellings of one field are an error."""
    fields: dict[str, object] = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise ModelSpecInvalid(path=path, expected="fields named by strings", found=key)
        target = "params_millions" if key in _PARAMETER_SPELLINGS else _FIELD_SPELLINGS.get(key, key)
        if target in fields:
            raise ModelSpecInvalid(path=f"{path}.{key}", expected=f"{target} to be said once", found=value)
        fields[target] = _millions(value, f"{path}.{key}") if key in _PARAMETER_SPELLINGS else value
    for field, spellings in (
        ("dtype", _DTYPE_SPELLINGS),
        ("kv_dtype", _DTYPE_SPELLINGS),
        ("engine", _ENGINE_SPELLINGS),
        ("family", _FAMILY_SPELLINGS),
    ):
        fields.update(_plain_word(fields, field, spellings))
    mlp = fields.get("mlp")
    if isinstance(mlp, str):
        word = mlp.strip().lower()
        if word.endswith("-encdec"):
            fields.setdefault("family", Family.ENCODER_DECODER.value)
            word = word.removesuffix("-encdec")
        fields["mlp"] = word
    training = fields.get("training")
    if isinstance(training, str):
        fields["training"] = {"method": training.strip().lower()}
    elif training is None and "training" in fields:
        del fields["training"]
    elif isinstance(training, dict):
        inner: dict[object, object] = {}
        for key, value in training.items():
            target_key = _TRAINING_FIELD_SPELLINGS.get(key, key) if isinstance(key, str) else key
            if target_key in inner:
                raise ModelSpecInvalid(
                    path=f"{path}.training.{key}", expected=f"{target_key} to be said once", found=value
                )
            inner[target_key] = value
        if _FSDP in inner:
            if twice := sorted({"zero_stage", "data_parallel"} & {str(key) for key in inner}):
                raise ModelSpecInvalid(
                    path=f"{path}.training.{_FSDP}", expected=f"nothing beside {twice[0]}", found=inner[_FSDP]
                )
            inner |= {"zero_stage": _FULL_SHARDING, "data_parallel": inner.pop(_FSDP)}
        inner.update(_plain_word(inner, "optimizer", _OPTIMIZER_SPELLINGS))
        inner.update(_plain_word(inner, "method", {}))
        fields["training"] = inner
    # QLoRA names a storage as well as a method.
    said = fields.get("training")
    if isinstance(said, dict) and said.get("method") == Method.QLORA.value:
        fields.setdefault("dtype", Dtype.NF4.value)
    return fields


def _millions(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= _PARAMETERS_MIN:
        raise ModelSpecInvalid(
            path=path, expected=f"parameters one by one, at least {_PARAMETERS_MIN}, or params_millions", found=value
        )
    return value / 1_000_000


def _plain_word(
    fields: dict[str, object] | dict[object, object], field: str, spellings: dict[str, str]
) -> dict[str, object]:
    value = fields.get(field)
    if not isinstance(value, str):
        return {}
    word = value.strip().lower().replace("_", "-")
    return {field: spellings.get(word, word)}


def _invalid_from(message: str, fields: dict[str, object], path: str) -> ModelSpecInvalid:
    """Our error from msgspec's sentence, which ends in the place: "Expected `int`, got `str` - at `$.batch`"."""
    what, _, place = message.partition(" - at `$")
    steps = [step for step in place.rstrip("`").split(".") if step]
    code = Refusal.FIELD_INVALID
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown is not None:
        code = Refusal.FIELD_UNKNOWN
        expected = _known_fields(unknown.group(1), steps)
        steps.append(unknown.group(1))
    else:
        expected = what
        wanted = re.match(r"Expected `(.*?)`", what)
        if wanted is not None:
            expected = wanted.group(1).removesuffix(" | null")
        elif what.startswith("Invalid enum value") and steps:
            expected = _choices(steps[-1])
    found: object = fields
    for step in steps:
        found = found.get(step) if isinstance(found, dict) else None
    return ModelSpecInvalid(path=".".join([path, *steps]), expected=expected, found=found, code=code)


def _known_fields(name: str, steps: list[str]) -> str:
    """What may stand there: the field that the name looks like, or where else it belongs, or all that there are."""
    kind = Training if steps == ["training"] else ModelSpec
    if kind is ModelSpec and _TRAINING_FIELD_SPELLINGS.get(name, name) in {*Training.__struct_fields__, _FSDP}:
        return f"it as training.{name}"
    alike = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
    return f"a known field, as {alike[0]}" if alike else f"one of {', '.join(kind.__struct_fields__)}"


def _choices(field: str) -> str:
    enums: dict[str, type[StrEnum]] = {
        "dtype": Dtype,
        "kv_dtype": KvDtype,
        "engine": Engine,
        "attention": Attention,
        "measure": Measure,
        "family": Family,
        "method": Method,
        "optimizer": Optimizer,
    }
    choices = enums.get(field)
    return f"one of {', '.join(choices)}" if choices is not None else "another value"
