"""The memory that a model will need on one device: an interval with its parts, a pure function of the request.

p50 is the expected peak, p95 what 19 of 20 runs stay below, both in the measure that was asked for: an allocator's, or
the device's, which also has what lies beside tensors. Admission books the device's p95, and the pool's own buffer.
Parts are whole MiB and sum to p50.
All arithmetic is on integers: equal requests get equal answers on every machine.

Where the formulas come from, term by term, is said beside each. "Measured" means the public rows that
`tests/data/vram_ground_truth.csv` holds with their sources; `tests/test_sizing.py` judges the estimator on them.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from apportion.admission.architecture import (
    Architecture,
    Family,
    block_params,
    cached_tokens,
    embedding_params,
    head_params,
    kv_elements_per_token,
)
from apportion.admission.model_spec import (
    Attention,
    Dtype,
    Engine,
    KvDtype,
    Measure,
    Method,
    ModelSpec,
    ModelSpecInvalid,
    Optimizer,
    architecture_of,
    check,
    family_key,
    params_of,
)
from apportion.admission.models import known_model

METHOD_VERSION = "analytic-v4"

_MIB = 1 << 20
_BP = 10_000
# An exbibyte: no request means it, and all sums that others make of answers stay within 64 bits.
_MIB_MAX = 1 << 40

_SEGMENTS_MIB = 64
"""PyTorch's allocator takes memory in segments of 2 and 20 MiB, and libraries some more: of a small model, much."""

INFERENCE_CONTEXT_TOKENS = 2048
TRAINING_CONTEXT_TOKENS = 512


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the expected MiB go; whole MiB each, and together p50."""

    weights: int = 0
    kv_cache: int = 0
    activations: int = 0
    logits: int = 0
    dequantisation: int = 0
    """16-bit copies that 4- and 8-bit matrices are unpacked into."""
    gradients: int = 0
    optimizer: int = 0
    adapters: int = 0
    """LoRA's own matrices with their gradients and optimizer state."""
    gathered: int = 0
    """Layers of sharded weights that are whole for a moment."""
    framework: int = 0
    """What the device holds outside tensors; counted in p50 only where the measure is the device."""


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The expected memory of one replica on one device. MiB."""

    memory_mib_p50: int
    """The expected peak, in the requested measure."""
    memory_mib_p95: int
    """What 19 of 20 runs stay below, in the same measure."""
    memory_mib_p95_device: int
    """Enough for the device as a whole in 19 of 20 runs; what admission books."""
    memory_mib_device: int
    """The expected peak as the device shows it: p50 with the context. What observed peaks are compared with."""
    parts: Parts
    method: str
    family: str
    """The group of runs whose observed peaks correct this estimate."""
    params_millions: int
    assumed: tuple[str, ...] = ()
    """What the request left open and was filled in."""


class _Storage(msgspec.Struct, frozen=True):
    """How one format stores a matrix: bits per weight with scales, and whether it is unpacked to be used."""

    millibits: int
    """Thousandths of a bit per quantised weight, scales and zero points included."""
    is_quantised: bool
    is_unpacked: bool = False
    """Matrices are dequantised into a 16-bit buffer for each multiplication (bitsandbytes)."""


class _Job(msgspec.Struct, frozen=True):
    """A request with everything filled in that the terms below need."""

    spec: ModelSpec
    arch: Architecture
    params: int
    batch: int
    context_tokens: int
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        return self.batch * self.context_tokens

    @property
    def token_layers(self) -> int:
        """Blocks times the tokens that they read: an encoder may read others than its decoder."""
        if not self.arch.source_tokens:
            return self.tokens * self.arch.layers
        encoders = self.arch.layers - self.arch.decoders
        return self.batch * (encoders * self.arch.source_tokens + self.arch.decoders * self.context_tokens)

    @property
    def is_training(self) -> bool:
        return self.spec.training.method is not Method.NONE


def estimate(spec: ModelSpec) -> Sizing:
    """The memory that this model is expected to need on each of its devices.

    Raises ModelSpecInvalid if a value is out of range or two contradict each other.
    """
    check(spec)
    assumed: list[str] = []
    is_training = spec.training.method is not Method.NONE
    if spec.batch is None:
        assumed.append("batch")
    if spec.context_tokens is None:
        assumed.append("context_tokens")
    arch = architecture_of(spec)
    context_tokens = spec.context_tokens or max(spec.prompt_tokens or 0, _default_context_tokens(arch, is_training))
    known = known_model(spec.name)
    if known is None and (spec.layers is None or spec.hidden is None):
        assumed.append("architecture")
    job = _Job(
        spec=spec,
        arch=arch,
        params=params_of(spec),
        batch=spec.batch or 1,
        context_tokens=context_tokens,
        prompt_tokens=spec.prompt_tokens or context_tokens,
    )
    tensors = _training_parts(job) if is_training else _inference_parts(job)
    context_mib = _context_mib(job)
    is_device = spec.measure is Measure.DEVICE
    parts = msgspec.structs.replace(tensors, framework=context_mib) if is_device else tensors
    p50 = _sum_mib(parts)
    device_mib = _sum_mib(tensors) + context_mib
    booked_mib = device_mib + _margin_mib(job, tensors, assumed)
    if booked_mib > _MIB_MAX:
        raise ModelSpecInvalid(path="model", expected=f"a model of at most {_MIB_MAX} MiB", found="more than that")
    return Sizing(
        memory_mib_p50=p50,
        memory_mib_p95=booked_mib - device_mib + p50,
        memory_mib_p95_device=booked_mib,
        memory_mib_device=device_mib,
        parts=parts,
        method=f"{METHOD_VERSION}/{_basis(spec, assumed)}/{spec.training.method.value}",
        family=family_key(spec),
        params_millions=job.params // 1_000_000,
        assumed=tuple(assumed),
    )


def fits(sizing: Sizing, device_memory_mib: int) -> bool:
    """The device has room for what would be booked."""
    return sizing.memory_mib_p95_device <= device_memory_mib


def _default_context_tokens(arch: Architecture, is_training: bool) -> int:
    tokens = TRAINING_CONTEXT_TOKENS if is_training else INFERENCE_CONTEXT_TOKENS
    # A model with a table of positions can't read more than it has.
    return min(tokens, arch.positions) if arch.positions else tokens


def _basis(spec: ModelSpec, assumed: list[str]) -> str:
    if known_model(spec.name) is not None:
        return "known"
    return "size-only" if "architecture" in assumed else "architecture"


# ---- inference ---------------------------------------------------------------------------------------------------


def _inference_parts(job: _Job) -> Parts:
    spec, arch = job.spec, job.arch
    kv = spec.kv_pool_mib if spec.kv_pool_mib is not None else _mib(_kv_bytes(job))
    activations = _mib(_prefill_bytes(job))
    # One row of 32-bit logits per sequence, and its 16-bit source; prompts keep only their last row.
    logits = 0 if arch.family in (Family.ENCODER, Family.VISION) else _mib(job.batch * arch.vocab * 6)
    copies = max(_mib(_unpacking_bytes(job)), _mib(_head_copy_bytes(job)) - kv - activations - logits)
    return Parts(
        weights=_mib(_weight_bytes(job)),
        kv_cache=kv,
        activations=activations,
        logits=logits,
        dequantisation=copies,
    )


def _kv_bytes(job: _Job) -> int:
    """Keys and values: 2 x layers x kv heads x head dim per token; a latent's width for MLA; windows drop old tokens.

    Measured: vLLM reports 19.28 GiB for 157,936 tokens of Llama-3.1-8B, 131,075 bytes a token; this gives 131,072.
    """
    arch, ways = job.arch, job.spec.tensor_parallel
    elements = kv_elements_per_token(arch)
    # A latent serves all heads, so that each device keeps it whole; of fewer heads than devices, each keeps one.
    share = elements if arch.is_latent or not elements else 2 * _share(arch.kv_heads, ways) * arch.head_dim
    return job.batch * cached_tokens(arch, job.context_tokens) * share * _kv_bits(job.spec) // 8


def _kv_bits(spec: ModelSpec) -> int:
    match spec.kv_dtype:
        case KvDtype.AUTO:
            return 32 if spec.dtype is Dtype.FP32 else 16
        case KvDtype.FP32:
            return 32
        case KvDtype.BF16 | KvDtype.FP16:
            return 16
        case KvDtype.FP8 | KvDtype.INT8:
            return 8
        case KvDtype.INT4:
            return 5  # scales per group of 32 to 64 values
        case _:
            assert_never(spec.kv_dtype)


def _prefill_bytes(job: _Job) -> int:
    """The widest moment of one layer while the prompt is read: gate, up and their product, and three hidden states.

    Measured: Qwen2.5 on transformers at 6,144 to 30,720 prompt tokens holds 2 x tokens x (3 x intermediate + 1 to 4 x
    hidden) bytes beyond weights and cache. vLLM and its kin read prompts in chunks of at most 8,192 tokens.
    """
    spec, arch = job.spec, job.arch
    tokens = job.batch * max(job.prompt_tokens, arch.source_tokens)
    if spec.engine in (Engine.VLLM, Engine.SGLANG, Engine.TGI):
        tokens = min(tokens, 8192)
    wide = (3 if arch.gated else 2) * _share(arch.active_intermediate, spec.tensor_parallel)
    width = wide + 3 * arch.hidden
    scores = 0
    if _is_eager(job):
        scores = 2 * job.batch * _share(arch.heads, spec.tensor_parallel) * job.prompt_tokens * job.prompt_tokens
    return (tokens * width + scores) * _compute_bytes(spec)


# ---- training ----------------------------------------------------------------------------------------------------


def _training_parts(job: _Job) -> Parts:
    spec = job.spec
    training = spec.training
    shards = training.data_parallel
    stage = training.zero_stage
    weights = _weight_bytes(job)
    gathered = 0
    if stage >= 3 and shards > 1:
        weights = -(-weights // shards)
        # Two layers are whole at a time: the one in use and the one that is fetched ahead.
        gathered = 2 * (block_params(job.arch) // job.arch.layers) * _compute_bytes(spec) // spec.tensor_parallel
    adapters = gradients = optimizer = 0
    if training.method is Method.FULL:
        trained = -(-job.params // spec.tensor_parallel)
        gradients = trained * _compute_bytes(spec)
        optimizer = trained * _state_bytes(spec)
        if stage >= 2:
            gradients = -(-gradients // shards)
        if stage >= 1:
            optimizer = -(-optimizer // shards)
    else:
        # Weight, gradient and two moments of 32 bits: 16 bytes per trained parameter, whatever the base's format.
        adapters = _lora_params(job) * (8 + _state_bytes(spec, is_adapter=True)) // spec.tensor_parallel
    return Parts(
        weights=_mib(weights),
        activations=_mib(_activation_bytes(job)),
        logits=_mib(_loss_bytes(job)),
        dequantisation=_mib(_unpacking_bytes(job)),
        gradients=_mib(gradients),
        optimizer=_mib(optimizer),
        adapters=_mib(adapters),
        gathered=_mib(gathered),
    )


def _state_bytes(spec: ModelSpec, *, is_adapter: bool = False) -> int:
    """Optimizer bytes per trained parameter: moments, and the 32-bit master copy of mixed precision.

    With 16-bit weights and gradients, Adam comes to 16 bytes altogether (ZeRO paper, section 3.1), with 8-bit moments
    to 10; with 32 bits throughout to 16 as well.
    """
    match spec.training.optimizer:
        case Optimizer.ADAMW:
            moments = 8
        case Optimizer.ADAMW_8BIT:
            moments = 2
        case Optimizer.LION | Optimizer.SGD_MOMENTUM:
            moments = 4
        case Optimizer.ADAFACTOR | Optimizer.SGD:
            moments = 0  # one row and one column per matrix, or nothing
        case _:
            assert_never(spec.training.optimizer)
    needs_master = not is_adapter and spec.dtype is not Dtype.FP32 and spec.training.master_weights
    return moments + (4 if needs_master else 0)


def _lora_params(job: _Job) -> int:
    arch, rank = job.arch, job.spec.training.rank
    query_width, kv_width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    per_layer = rank * (2 * arch.hidden + query_width + kv_width)
    if job.spec.training.target_modules == "all":
        width = arch.active_intermediate if arch.experts == 0 else arch.experts * arch.expert_width
        per_layer += rank * (2 * arch.hidden + query_width + kv_width)
        per_layer += rank * (3 if arch.gated else 2) * (arch.hidden + width)
    return arch.layers * per_layer


def _activation_bytes(job: _Job) -> int:
    """What the backward pass needs of the forward pass.

    Per token and layer, in elements of the compute type (2 bytes in the fits):
    - plain MLP 10 x hidden + 1 x intermediate; gated MLP with RMSNorm, which works on 32-bit copies, 13.5 x hidden
      + 3 x intermediate. Measured: LoRA on litgpt, four 16-bit rows of GELU models 27.8 to 28.3 bytes per hidden
      (this: 28), one of a SwiGLU model 43.3 (this: 43.1).
    - full fine-tuning and bitsandbytes matrices also keep the inputs of linear layers (weights need them for their
      gradients; `MatMul4Bit` saves them whether or not), 1 x hidden + 1 x intermediate, and the latter one hidden
      more for its cast copy. Measured: two QLoRA rows, 54 bytes per hidden (this: 52.5).
    - eager attention keeps its scores: 2+2+2+1 bytes each at 16 bits, 4+4+4+1 at 32. Selective-recomputation
      paper (Korthikanti et al., 2022) counts 5 of the 7; the raw scores are the rest.
    With checkpointing one hidden state per layer, and one layer as above.
    """
    spec, arch = job.spec, job.arch
    ways = spec.tensor_parallel
    element = _compute_bytes(spec)
    inner = _share(arch.active_intermediate, ways)
    # Half units keep 13.5 an integer.
    half_units = 27 * arch.hidden + 6 * inner if arch.gated else 20 * arch.hidden + 2 * inner
    if spec.training.method is Method.FULL:
        half_units += 2 * (arch.hidden + inner)
    elif _storage(spec).is_unpacked:
        half_units += 2 * (2 * arch.hidden + inner)
    per_token = half_units * element // 2
    if _is_eager(job):
        score_bytes = 13 if element == 4 else 7
        per_token += score_bytes * _share(arch.heads, ways) * job.context_tokens
    if spec.training.checkpointing:
        widest = job.batch * max(job.context_tokens, arch.source_tokens)
        return job.token_layers * arch.hidden * element + widest * per_token
    return job.token_layers * per_token


def _loss_bytes(job: _Job) -> int:
    """Logits, their 32-bit copy and its gradient: 10 bytes per token and word at 16 bits, 12 at 32.

    Measured: it makes batch 1 and 4 of phi-1.5 and of StableLM agree on one activation coefficient.
    """
    if job.arch.family in (Family.ENCODER, Family.VISION):
        return 0
    word_bytes = 12 if _compute_bytes(job.spec) == 4 else 10
    return job.tokens * _share(job.arch.vocab, job.spec.tensor_parallel) * word_bytes


# ---- both --------------------------------------------------------------------------------------------------------


def _storage(spec: ModelSpec) -> _Storage:
    """Bits per weight of each format, with its scales."""
    group = spec.group_size
    match spec.dtype:
        case Dtype.FP32:
            return _Storage(32_000, is_quantised=False)
        case Dtype.BF16 | Dtype.FP16:
            return _Storage(16_000, is_quantised=False)
        case Dtype.FP8:
            return _Storage(8_010, is_quantised=True)  # one 32-bit scale per row or 128 x 128 block
        case Dtype.INT8:
            # LLM.int8: one 32-bit scale per row, outlier columns of activations at 16 bits.
            return _Storage(8_010, is_quantised=True, is_unpacked=False)
        case Dtype.GPTQ_INT8:
            return _Storage(8_000 + 24_000 // group, is_quantised=True)  # a 16-bit scale, an 8-bit zero point
        case Dtype.GPTQ_INT4 | Dtype.AWQ | Dtype.INT4:
            return _Storage(4_000 + 20_000 // group, is_quantised=True)  # a 16-bit scale, a 4-bit zero point
        case Dtype.NF4 | Dtype.FP4:
            return _Storage(4_500, is_quantised=True, is_unpacked=True)  # a 32-bit scale per 64 weights
        case Dtype.NF4_DQ | Dtype.FP4_DQ:
            return _Storage(4_127, is_quantised=True, is_unpacked=True)  # 8-bit scales, 32 bits per 256 of them
        case Dtype.MXFP4:
            return _Storage(4_250, is_quantised=True)  # an 8-bit exponent per 32 weights
        case _:
            assert_never(spec.dtype)


def _weight_bytes(job: _Job) -> int:
    """Weights on one device: quantised blocks at their format, and what a quantiser leaves at 16 bits.

    Embeddings and norms always stay; the head stays too, except in litgpt, whose bitsandbytes plug-in converts every
    linear layer. Measured: gptq-int4 of a model with a tied head fits only if the embedding stays at 16 bits and is
    stored once.
    """
    spec, arch = job.spec, job.arch
    storage = _storage(spec)
    if not storage.is_quantised:
        return -(-job.params * storage.millibits // 8000 // spec.tensor_parallel)
    kept = embedding_params(arch) + (0 if _head_is_quantised(spec) else head_params(arch))
    kept = min(kept + arch.extra_millions * 1_000_000 + 2 * arch.layers * arch.hidden, job.params)
    stored = (job.params - kept) * storage.millibits // 8000 + 2 * kept
    return -(-stored // spec.tensor_parallel)


def _head_is_quantised(spec: ModelSpec) -> bool:
    # An engine that wasn't named gets the same: with the copies in `_unpacking_bytes`, it is the larger answer.
    return spec.engine in (Engine.LITGPT, Engine.OTHER) and _storage(spec).is_unpacked


def _unpacking_bytes(job: _Job) -> int:
    """Two 16-bit copies of the largest matrix that is unpacked to be multiplied: the term that 4-bit estimates lack.

    Measured: three nf4 rows on litgpt (7B, 34B, 70B) hold 1,098 to 1,177 MiB more than their stored weights and
    cache; twice the head at 16 bits is 1,000 to 1,127. GPTQ and AWQ kernels unpack in registers.
    """
    spec, arch = job.spec, job.arch
    if not _storage(spec).is_unpacked:
        return 0
    largest = max(arch.hidden * arch.intermediate, arch.hidden * arch.heads * arch.head_dim)
    if _head_is_quantised(spec):
        largest = max(largest, arch.vocab * arch.hidden)
    return 2 * 2 * largest // spec.tensor_parallel


def _head_copy_bytes(job: _Job) -> int:
    """What loading an AWQ model takes for a moment where its head is tied: the embedding, a second time.

    The run's own needs come after that, so that only what they don't reach counts. Measured: two rows of transformers
    with a prompt of one token, 696 and 1,546 MiB, are weights and two embeddings (this: 700 and 1,541); with 6,144
    tokens and more the same models need no more than others.
    """
    spec, arch = job.spec, job.arch
    if spec.dtype is not Dtype.AWQ or not arch.tied or spec.engine not in {Engine.TRANSFORMERS, Engine.OTHER}:
        return 0
    return 2 * embedding_params(arch) // spec.tensor_parallel


def _compute_bytes(spec: ModelSpec) -> int:
    return 4 if spec.dtype is Dtype.FP32 else 2


def _is_eager(job: _Job) -> bool:
    match job.spec.attention:
        case Attention.EAGER:
            return True
        case Attention.SDPA | Attention.FLASH:
            return False
        case Attention.AUTO:
            # BERT and its kin long had no other implementation; the larger answer is the safe one.
            return job.arch.family is Family.ENCODER
        case _:
            assert_never(job.spec.attention)


def _context_mib(job: _Job) -> int:
    """What the device holds beside tensors: CUDA context, library workspaces, captured graphs, NCCL's buffers.

    A context is 300 to 500 MiB on current drivers; vLLM's graphs 0.5 to 1 GiB (its own start-up log). Training loads
    more kernels and libraries, and its allocator keeps what doesn't fit together: device-wide use of BERT-large at
    batch 1 and 4 (transformers' guide to training on one GPU: 8,681 and 14,949 MiB) extrapolates to 1.4 GiB beyond
    states, with eagerly loaded kernels of 2022.
    """
    mib = 448
    if job.is_training:
        mib += 576
    elif job.spec.engine in (Engine.VLLM, Engine.SGLANG):
        mib += 768
    if job.spec.tensor_parallel > 1 or job.spec.training.data_parallel > 1:
        mib += 512
    return mib


def _margin_mib(job: _Job, parts: Parts, assumed: list[str]) -> int:
    """What p95 adds to the expected device peak: each part's own uncertainty, in basis points."""
    guess = 2_000 if "architecture" in assumed else 0
    activation_bp = 2_500 if job.is_training else 3_500
    # Nobody said how much data there is: the default may be far off.
    if job.is_training and ("batch" in assumed or "context_tokens" in assumed):
        activation_bp = 7_500
    margin = (
        _SEGMENTS_MIB * _BP
        + parts.weights * (300 if _storage(job.spec).is_quantised else 150)
        + parts.kv_cache * (200 + guess)
        + parts.activations * (activation_bp + guess)
        + parts.logits * (1_500 + guess)
        # A copy made while loading is as large as the matrix; and p95 may not fall when the run's needs outgrow it.
        + parts.dequantisation * (5_000 if _storage(job.spec).is_unpacked else 200)
        + (parts.gradients + parts.optimizer + parts.adapters + parts.gathered) * 300
    )
    return -(-margin // _BP)


def _share(width: int, ways: int) -> int:
    return -(-width // ways)


def _mib(size_bytes: int) -> int:
    return -(-size_bytes // _MIB)


def _sum_mib(parts: Parts) -> int:
    return sum(getattr(parts, field) for field in Parts.__struct_fields__)
