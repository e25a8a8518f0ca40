"""The shape of a transformer, and the number of parameters that follows from it.

One struct holds what memory depends on, whether it came from the shipped table (`models`) or from a request that
spelled its architecture out (`model_spec`). Bytes are the business of `sizing`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Family(StrEnum):
    """What a model is made of; decides which blocks are counted and what is cached."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_DECODER = "encoder-decoder"
    VISION = "vision"


class Architecture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns of a public model config that decide memory. Counts and widths, no bytes."""

    family: Family = Family.DECODER
    layers: int
    """All blocks; of an encoder-decoder, both sides together, half of them decoders unless ``decoder_layers`` says."""
    hidden: int
    intermediate: int
    """Width of a dense MLP; of an all-experts model, of one expert."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    """Three MLP matrices (SwiGLU, GeGLU) instead of two (GELU, ReLU)."""
    tied: bool = False
    """The output head shares the embedding's storage."""
    positions: int = 0
    """Rows of a learned position table."""
    extra_millions: int = 0
    """Parameters outside the blocks counted here: a vision tower, a pooler."""
    experts: int = 0
    experts_active: int = 0
    moe_intermediate: int = 0
    """Width of one routed expert; 0 takes `intermediate`."""
    shared_intermediate: int = 0
    """Width of the shared experts of a layer, together."""
    dense_layers: int = 0
    """Layers of a mixture that keep a dense MLP."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Above 0: multi-head latent attention, which caches one latent per token instead of keys and values."""
    rope_dim: int = 0
    v_head_dim: int = 0
    window_tokens: int = 0
    """Sliding window of attention; 0 attends to everything."""
    global_every: int = 0
    """With a window: every Nth layer attends to everything; 0 means that none does."""
    decoder_layers: int = 0
    """Blocks of an encoder-decoder that are decoders; 0: half of them."""
    source_tokens: int = 0
    """Tokens that the encoder reads whatever is asked, as frames of sound; 0: as many as the context."""

    @property
    def decoders(self) -> int:
        """Decoder blocks of an encoder-decoder."""
        return self.decoder_layers or self.layers // 2

    @property
    def is_latent(self) -> bool:
        """Attention caches a compressed latent (DeepSeek V2 and later)."""
        return self.kv_lora_rank > 0

    @property
    def expert_width(self) -> int:
        """Width of one routed expert."""
        return self.moe_intermediate or self.intermediate

    @property
    def active_intermediate(self) -> int:
        """Width of the MLP activations of one token: the dense width, or all experts that it visits."""
        if self.experts == 0:
            return self.intermediate
        width = self.experts_active * self.expert_width + self.shared_intermediate
        return max(width, self.intermediate) if self.dense_layers else width


def attention_params(arch: Architecture) -> int:
    """Parameters of one attention block."""
    if arch.is_latent:
        nope_dim = arch.head_dim
        v_head_dim = arch.v_head_dim or nope_dim
        query_width = arch.heads * (nope_dim + arch.rope_dim)
        query = (
            arch.hidden * arch.q_lora_rank + arch.q_lora_rank * query_width
            if arch.q_lora_rank
            else arch.hidden * query_width
        )
        down = arch.hidden * (arch.kv_lora_rank + arch.rope_dim)
        up = arch.kv_lora_rank * arch.heads * (nope_dim + v_head_dim)
        return query + down + up + arch.heads * v_head_dim * arch.hidden
    query_width = arch.heads * arch.head_dim
    kv_width = arch.kv_heads * arch.head_dim
    return 2 * arch.hidden * (query_width + kv_width)


def mlp_params(arch: Architecture, width: int) -> int:
    """Parameters of one MLP of this width."""
    return (3 if arch.gated else 2) * arch.hidden * width


def block_params(arch: Architecture) -> int:
    """Parameters of all blocks together, without embeddings and head."""
    attentions = arch.layers
    if arch.family is Family.ENCODER_DECODER:
        attentions += arch.decoders  # a decoder block also attends to the encoder
    total = attentions * attention_params(arch)
    if arch.experts:
        sparse_layers = arch.layers - arch.dense_layers
        routed = arch.experts * mlp_params(arch, arch.expert_width) + arch.hidden * arch.experts
        total += sparse_layers * (routed + mlp_params(arch, arch.shared_intermediate))
        total += arch.dense_layers * mlp_params(arch, arch.intermediate)
    else:
        total += arch.layers * mlp_params(arch, arch.intermediate)
    return total + (2 * arch.layers + 1) * arch.hidden  # norms


def embedding_params(arch: Architecture) -> int:
    """Parameters of the token and position tables."""
    return (arch.vocab + arch.positions) * arch.hidden


def head_params(arch: Architecture) -> int:
    """Parameters of an output head with storage of its own."""
    if arch.tied or arch.family in (Family.ENCODER, Family.VISION):
        return 0
    return arch.vocab * arch.hidden


def total_params(arch: Architecture) -> int:
    """Parameters of the whole model."""
    return block_params(arch) + embedding_params(arch) + head_params(arch) + arch.extra_millions * 1_000_000


def kv_elements_per_token(arch: Architecture) -> int:
    """Cached elements of one token in one layer."""
    if arch.family in (Family.ENCODER, Family.VISION):
        return 0
    if arch.is_latent:
        return arch.kv_lora_rank + arch.rope_dim
    return 2 * arch.kv_heads * arch.head_dim


def caching_layers(arch: Architecture) -> int:
    """Layers that keep keys and values."""
    match arch.family:
        case Family.DECODER:
            return arch.layers
        case Family.ENCODER_DECODER:
            return 2 * arch.decoders  # each with its own keys and the encoder's
        case Family.ENCODER | Family.VISION:
            return 0


def cached_tokens(arch: Architecture, context_tokens: int) -> int:
    """Token-layers cached for one sequence: layers times tokens, less what sliding windows drop."""
    layers = caching_layers(arch)
    if arch.source_tokens:
        return arch.decoders * (context_tokens + arch.source_tokens)
    if arch.window_tokens == 0:
        return layers * context_tokens
    global_layers = layers // arch.global_every if arch.global_every else 0
    windowed = min(arch.window_tokens, context_tokens)
    return global_layers * context_tokens + (layers - global_layers) * windowed
