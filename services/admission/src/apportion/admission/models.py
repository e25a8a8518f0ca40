"""Known models: their architecture and published size, by name.

Columns are those of the public config named in `source` (a repository on Hugging Face, its `config.json`); sizes are
the parameters that the same repository publishes for its weights, tied tensors counted once. The tests recompute
every size from its columns, so that a typing slip can't stay. Pure data; resolving a request is `model_spec`'s task.
"""

from __future__ import annotations

import re

import msgspec

from apportion.admission.architecture import Architecture, Family


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the table."""

    name: str
    params_millions: int
    architecture: Architecture
    source: str
    aliases: tuple[str, ...] = ()


def _row(
    name: str,
    params_millions: int,
    shape: tuple[int, int, int, int, int, int, int],
    source: str,
    *aliases: str,
    **columns: int | bool | Family,
) -> KnownModel:
    """One row; shape is layers, hidden, intermediate, heads, kv heads, head dim, vocabulary."""
    layers, hidden, intermediate, heads, kv_heads, head_dim, vocab = shape
    fields = {
        "layers": layers,
        "hidden": hidden,
        "intermediate": intermediate,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": vocab,
        **columns,
    }
    return KnownModel(
        name=name,
        params_millions=params_millions,
        architecture=msgspec.convert(fields, Architecture),
        source=f"{source} config.json",
        aliases=aliases,
    )


_ENCODER = Family.ENCODER
_ENCDEC = Family.ENCODER_DECODER
_VISION = Family.VISION

MODELS: tuple[KnownModel, ...] = (
    # Meta Llama: SwiGLU, RMSNorm
    _row("llama-7b", 6738, (32, 4096, 11008, 32, 32, 128, 32000), "huggyllama/llama-7b", "vicuna-7b",
         "open-llama-7b"),
    _row("llama-13b", 13016, (40, 5120, 13824, 40, 40, 128, 32000), "huggyllama/llama-13b", "vicuna-13b",
         "open-llama-13b"),
    _row("llama-30b", 32529, (60, 6656, 17920, 52, 52, 128, 32000), "huggyllama/llama-30b", "platypus-30b"),
    _row("llama-65b", 65286, (80, 8192, 22016, 64, 64, 128, 32000), "huggyllama/llama-65b"),
    # Llama 4: an expert that is shared beside one that is routed; the rest is its vision tower. Three layers of four
    # attend to chunks of 8,192 tokens, and engines keep all keys none the less: counted so.
    _row("llama-4-scout", 108642, (48, 5120, 8192, 40, 8, 128, 202048), "meta-llama/Llama-4-Scout-17B-16E",
         "llama-4-scout-17b", experts=16, experts_active=1, shared_intermediate=8192, extra_millions=870),
    _row("llama-4-maverick", 401584, (48, 5120, 16384, 40, 8, 128, 202048), "meta-llama/Llama-4-Maverick-17B-128E",
         "llama-4-maverick-17b", experts=128, experts_active=1, moe_intermediate=8192, shared_intermediate=8192,
         dense_layers=24, extra_millions=870),
    _row("llama-2-7b", 6738, (32, 4096, 11008, 32, 32, 128, 32000), "meta-llama/Llama-2-7b-hf", "vicuna-7b-v1.5"),
    _row("llama-2-13b", 13016, (40, 5120, 13824, 40, 40, 128, 32000), "meta-llama/Llama-2-13b-hf", "vicuna-13b-v1.5"),
    _row("llama-2-70b", 68977, (80, 8192, 28672, 64, 8, 128, 32000), "meta-llama/Llama-2-70b-hf"),
    _row("codellama-7b", 6739, (32, 4096, 11008, 32, 32, 128, 32016), "codellama/CodeLlama-7b-hf"),
    _row("codellama-13b", 13016, (40, 5120, 13824, 40, 40, 128, 32016), "codellama/CodeLlama-13b-hf"),
    _row("codellama-34b", 33744, (48, 8192, 22016, 64, 8, 128, 32000), "codellama/CodeLlama-34b-hf"),
    _row("codellama-70b", 68977, (80, 8192, 28672, 64, 8, 128, 32016), "codellama/CodeLlama-70b-hf"),
    _row("llama-3-8b", 8030, (32, 4096, 14336, 32, 8, 128, 128256), "meta-llama/Meta-Llama-3-8B"),
    _row("llama-3-70b", 70554, (80, 8192, 28672, 64, 8, 128, 128256), "meta-llama/Meta-Llama-3-70B"),
    _row("llama-3.1-8b", 8030, (32, 4096, 14336, 32, 8, 128, 128256), "meta-llama/Llama-3.1-8B",
         "hermes-3-llama-3.1-8b"),
    _row("llama-3.1-70b", 70554, (80, 8192, 28672, 64, 8, 128, 128256), "meta-llama/Llama-3.1-70B",
         "llama-3.1-nemotron-70b"),
    _row("llama-3.1-405b", 405853, (126, 16384, 53248, 128, 8, 128, 128256), "meta-llama/Llama-3.1-405B"),
    _row("llama-3.2-1b", 1236, (16, 2048, 8192, 32, 8, 64, 128256), "meta-llama/Llama-3.2-1B", tied=True),
    _row("llama-3.2-3b", 3213, (28, 3072, 8192, 24, 8, 128, 128256), "meta-llama/Llama-3.2-3B", tied=True),
    _row("llama-3.3-70b", 70554, (80, 8192, 28672, 64, 8, 128, 128256), "meta-llama/Llama-3.3-70B-Instruct"),
    _row("tinyllama-1.1b", 1100, (22, 2048, 5632, 32, 4, 64, 32000), "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    # Alibaba Qwen
    _row("qwen2-0.5b", 494, (24, 896, 4864, 14, 2, 64, 151936), "Qwen/Qwen2-0.5B", tied=True),
    _row("qwen2-1.5b", 1544, (28, 1536, 8960, 12, 2, 128, 151936), "Qwen/Qwen2-1.5B", tied=True),
    _row("qwen1.5-7b", 7721, (32, 4096, 11008, 32, 32, 128, 151936), "Qwen/Qwen1.5-7B"),
    _row("qwen2-7b", 7616, (28, 3584, 18944, 28, 4, 128, 152064), "Qwen/Qwen2-7B"),
    _row("qwen2-72b", 72706, (80, 8192, 29568, 64, 8, 128, 152064), "Qwen/Qwen2-72B"),
    _row(
        "qwen2-57b-a14b",
        57409,
        (28, 3584, 2560, 28, 4, 128, 151936),
        "Qwen/Qwen2-57B-A14B",
        experts=64,
        experts_active=8,
        shared_intermediate=20480,
    ),
    _row("qwen2.5-0.5b", 494, (24, 896, 4864, 14, 2, 64, 151936), "Qwen/Qwen2.5-0.5B", "qwen2.5-coder-0.5b",
         tied=True),
    _row("qwen2.5-1.5b", 1544, (28, 1536, 8960, 12, 2, 128, 151936), "Qwen/Qwen2.5-1.5B", "qwen2.5-coder-1.5b",
         "qwen2.5-math-1.5b", tied=True),
    _row("qwen2.5-3b", 3086, (36, 2048, 11008, 16, 2, 128, 151936), "Qwen/Qwen2.5-3B", "qwen2.5-coder-3b",
         tied=True),
    _row("qwen2.5-7b", 7616, (28, 3584, 18944, 28, 4, 128, 152064), "Qwen/Qwen2.5-7B", "qwen2.5-math-7b"),
    _row("qwen2.5-vl-7b", 8292, (28, 3584, 18944, 28, 4, 128, 152064), "Qwen/Qwen2.5-VL-7B-Instruct",
         "qwen2-vl-7b", extra_millions=676),
    _row("qwen2.5-14b", 14770, (48, 5120, 13824, 40, 8, 128, 152064), "Qwen/Qwen2.5-14B", "qwen2.5-coder-14b"),
    _row("qwen2.5-32b", 32764, (64, 5120, 27648, 40, 8, 128, 152064), "Qwen/Qwen2.5-32B", "qwq-32b"),
    _row("qwen2.5-72b", 72706, (80, 8192, 29568, 64, 8, 128, 152064), "Qwen/Qwen2.5-72B", "qwen2.5-math-72b"),
    _row("qwen2.5-coder-7b", 7616, (28, 3584, 18944, 28, 4, 128, 152064), "Qwen/Qwen2.5-Coder-7B"),
    _row("qwen2.5-coder-32b", 32764, (64, 5120, 27648, 40, 8, 128, 152064), "Qwen/Qwen2.5-Coder-32B"),
    _row("qwen3-0.6b", 596, (28, 1024, 3072, 16, 8, 128, 151936), "Qwen/Qwen3-0.6B", tied=True),
    _row("qwen3-1.7b", 1721, (28, 2048, 6144, 16, 8, 128, 151936), "Qwen/Qwen3-1.7B", tied=True),
    _row("qwen3-4b", 4022, (36, 2560, 9728, 32, 8, 128, 151936), "Qwen/Qwen3-4B", tied=True),
    _row("qwen3-8b", 8191, (36, 4096, 12288, 32, 8, 128, 151936), "Qwen/Qwen3-8B"),
    _row("qwen3-14b", 14768, (40, 5120, 17408, 40, 8, 128, 151936), "Qwen/Qwen3-14B"),
    _row("qwen3-32b", 32762, (64, 5120, 25600, 64, 8, 128, 151936), "Qwen/Qwen3-32B"),
    _row(
        "qwen3-30b-a3b",
        30532,
        (48, 2048, 768, 32, 4, 128, 151936),
        "Qwen/Qwen3-30B-A3B",
        "qwen3-coder-30b-a3b",
        experts=128,
        experts_active=8,
    ),
    _row(
        "qwen3-235b-a22b",
        235094,
        (94, 4096, 1536, 64, 4, 128, 151936),
        "Qwen/Qwen3-235B-A22B",
        experts=128,
        experts_active=8,
    ),
    _row(
        "qwen3-coder-480b-a35b",
        480155,
        (62, 6144, 2560, 96, 8, 128, 151936),
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        experts=160,
        experts_active=8,
    ),
    # Mistral AI
    _row("mistral-7b", 7248, (32, 4096, 14336, 32, 8, 128, 32768), "mistralai/Mistral-7B-v0.3", "mathstral-7b",
         "mistral-7b-v0.2"),
    _row(
        "mistral-7b-v0.1",
        7242,
        (32, 4096, 14336, 32, 8, 128, 32000),
        "mistralai/Mistral-7B-v0.1",
        "zephyr-7b",
        window_tokens=4096,
    ),
    _row("ministral-8b", 8020, (36, 4096, 12288, 32, 8, 128, 131072), "mistralai/Ministral-8B-Instruct-2410"),
    _row("mistral-nemo-12b", 12248, (40, 5120, 14336, 32, 8, 128, 131072), "mistralai/Mistral-Nemo-Base-2407",
         "mistral-nemo", "mistral-nemo-2407"),
    _row("mistral-small-22b", 22247, (56, 6144, 16384, 48, 8, 128, 32768), "mistralai/Mistral-Small-Instruct-2409",
         "mistral-small-2409", "codestral-22b"),
    _row("mistral-small-24b", 23572, (40, 5120, 32768, 32, 8, 128, 131072), "mistralai/Mistral-Small-24B-Base-2501",
         "mistral-small-24b-2501", "mistral-small", "magistral-small", "magistral-small-2506", "devstral-small",
         "devstral-small-2505", "devstral-small-2507"),
    _row("mistral-small-3.1-24b", 24011, (40, 5120, 32768, 32, 8, 128, 131072),
         "mistralai/Mistral-Small-3.1-24B-Base-2503", "mistral-small-3.2-24b", "mistral-small-3.1", "mistral-small-3.2",
         extra_millions=439),
    _row("mistral-large-123b", 122610, (88, 12288, 28672, 96, 8, 128, 32768), "mistralai/Mistral-Large-Instruct-2407",
         "mistral-large-2407", "mistral-large-2411", "mistral-large"),
    _row("mixtral-8x7b", 46703, (32, 4096, 14336, 32, 8, 128, 32000), "mistralai/Mixtral-8x7B-v0.1",
         experts=8, experts_active=2),
    _row("mixtral-8x22b", 140621, (56, 6144, 16384, 48, 8, 128, 32768), "mistralai/Mixtral-8x22B-v0.1",
         experts=8, experts_active=2),
    # Google Gemma
    _row("gemma-2b", 2506, (18, 2048, 16384, 8, 1, 256, 256000), "google/gemma-2b", tied=True),
    _row("gemma-7b", 8538, (28, 3072, 24576, 16, 16, 256, 256000), "google/gemma-7b", "codegemma-7b", tied=True),
    _row("gemma-2-2b", 2614, (26, 2304, 9216, 8, 4, 256, 256000), "google/gemma-2-2b",
         tied=True, window_tokens=4096, global_every=2),
    _row("gemma-2-9b", 9242, (42, 3584, 14336, 16, 8, 256, 256000), "google/gemma-2-9b",
         tied=True, window_tokens=4096, global_every=2),
    _row("gemma-2-27b", 27227, (46, 4608, 36864, 32, 16, 128, 256000), "google/gemma-2-27b",
         tied=True, window_tokens=4096, global_every=2),
    _row("gemma-3-270m", 268, (18, 640, 2048, 4, 1, 256, 262144), "google/gemma-3-270m",
         tied=True, window_tokens=512, global_every=6),
    _row("gemma-3-1b", 1000, (26, 1152, 6912, 4, 1, 256, 262144), "google/gemma-3-1b-it",
         tied=True, window_tokens=512, global_every=6),
    _row("gemma-3-4b", 4300, (34, 2560, 10240, 8, 4, 256, 262208), "google/gemma-3-4b-it",
         tied=True, window_tokens=1024, global_every=6, extra_millions=420),
    _row("gemma-3-12b", 12187, (48, 3840, 15360, 16, 8, 256, 262208), "google/gemma-3-12b-it",
         tied=True, window_tokens=1024, global_every=6, extra_millions=420),
    _row("gemma-3-27b", 27432, (62, 5376, 21504, 32, 16, 128, 262208), "google/gemma-3-27b-it",
         tied=True, window_tokens=1024, global_every=6, extra_millions=420),
    # Microsoft Phi
    _row("phi-1.5", 1418, (24, 2048, 8192, 32, 32, 64, 51200), "microsoft/phi-1_5", "phi-1-5", gated=False),
    _row("phi-2", 2780, (32, 2560, 10240, 32, 32, 80, 51200), "microsoft/phi-2", gated=False),
    _row("phi-3-mini", 3821, (32, 3072, 8192, 32, 32, 96, 32064), "microsoft/Phi-3-mini-128k-instruct",
         "phi-3-mini-4k", "phi-3-mini-128k", "phi-3.5-mini"),
    _row("phi-3-medium", 13960, (40, 5120, 17920, 40, 10, 128, 32064), "microsoft/Phi-3-medium-128k-instruct",
         "phi-3-medium-4k", "phi-3-medium-128k"),
    _row("phi-3.5-moe", 41873, (32, 4096, 6400, 32, 8, 128, 32064), "microsoft/Phi-3.5-MoE-instruct",
         experts=16, experts_active=2),
    _row("phi-4", 14660, (40, 5120, 17920, 40, 10, 128, 100352), "microsoft/phi-4", "phi-4-reasoning",
         "phi-4-reasoning-plus"),
    _row("phi-4-mini", 3836, (32, 3072, 8192, 24, 8, 128, 200064), "microsoft/Phi-4-mini-instruct",
         "phi-4-mini-reasoning", tied=True),
    # DeepSeek
    _row("deepseek-llm-7b", 6910, (30, 4096, 11008, 32, 32, 128, 102400), "deepseek-ai/deepseek-llm-7b-base"),
    _row("deepseek-coder-1.3b", 1346, (24, 2048, 5504, 16, 16, 128, 32256), "deepseek-ai/deepseek-coder-1.3b-base"),
    _row("deepseek-coder-6.7b", 6740, (32, 4096, 11008, 32, 32, 128, 32256), "deepseek-ai/deepseek-coder-6.7b-base"),
    _row("deepseek-coder-33b", 33343, (62, 7168, 19200, 56, 8, 128, 32256), "deepseek-ai/deepseek-coder-33b-base"),
    _row("deepseek-v2-lite", 15706, (27, 2048, 10944, 16, 16, 128, 102400), "deepseek-ai/DeepSeek-V2-Lite",
         "deepseek-coder-v2-lite", experts=64, experts_active=6, moe_intermediate=1408, shared_intermediate=2816,
         dense_layers=1, kv_lora_rank=512, rope_dim=64, v_head_dim=128),
    _row("deepseek-v2", 235741, (60, 5120, 12288, 128, 128, 128, 102400), "deepseek-ai/DeepSeek-V2",
         "deepseek-v2.5", "deepseek-coder-v2", experts=160, experts_active=6, moe_intermediate=1536,
         shared_intermediate=3072, dense_layers=1, q_lora_rank=1536, kv_lora_rank=512, rope_dim=64, v_head_dim=128),
    _row("deepseek-v3", 671026, (61, 7168, 18432, 128, 128, 128, 129280), "deepseek-ai/DeepSeek-V3",
         "deepseek-v3-0324", "deepseek-v3.1", "deepseek-r1", "deepseek-r1-0528", experts=256, experts_active=8,
         moe_intermediate=2048, shared_intermediate=2048, dense_layers=3, q_lora_rank=1536, kv_lora_rank=512,
         rope_dim=64, v_head_dim=128),
    _row("deepseek-r1-distill-qwen-1.5b", 1777, (28, 1536, 8960, 12, 2, 128, 151936),
         "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    _row("deepseek-r1-distill-qwen-7b", 7616, (28, 3584, 18944, 28, 4, 128, 152064),
         "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    _row("deepseek-r1-distill-llama-8b", 8030, (32, 4096, 14336, 32, 8, 128, 128256),
         "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
    _row("deepseek-r1-distill-qwen-14b", 14770, (48, 5120, 13824, 40, 8, 128, 152064),
         "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
    _row("deepseek-r1-distill-qwen-32b", 32764, (64, 5120, 27648, 40, 8, 128, 152064),
         "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"),
    _row("deepseek-r1-distill-llama-70b", 70554, (80, 8192, 28672, 64, 8, 128, 128256),
         "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"),
    _row("kimi-k2", 1026408, (61, 7168, 18432, 64, 64, 128, 163840), "moonshotai/Kimi-K2-Instruct",
         experts=384, experts_active=8, moe_intermediate=2048, shared_intermediate=2048, dense_layers=1,
         q_lora_rank=1536, kv_lora_rank=512, rope_dim=64, v_head_dim=128),
    # OpenAI open weights
    _row("gpt-oss-20b", 20914, (24, 2880, 2880, 64, 8, 64, 201088), "openai/gpt-oss-20b",
         experts=32, experts_active=4, window_tokens=128, global_every=2),
    _row("gpt-oss-120b", 116829, (36, 2880, 2880, 64, 8, 64, 201088), "openai/gpt-oss-120b",
         experts=128, experts_active=4, window_tokens=128, global_every=2),
    _row("gpt2", 124, (12, 768, 3072, 12, 12, 64, 50257), "openai-community/gpt2",
         gated=False, tied=True, positions=1024),
    _row("gpt2-medium", 355, (24, 1024, 4096, 16, 16, 64, 50257), "openai-community/gpt2-medium",
         gated=False, tied=True, positions=1024),
    _row("gpt2-large", 774, (36, 1280, 5120, 20, 20, 64, 50257), "openai-community/gpt2-large",
         gated=False, tied=True, positions=1024),
    _row("gpt2-xl", 1558, (48, 1600, 6400, 25, 25, 64, 50257), "openai-community/gpt2-xl",
         gated=False, tied=True, positions=1024),
    # 01.AI Yi
    _row("yi-6b", 6061, (32, 4096, 11008, 32, 4, 128, 64000), "01-ai/Yi-6B", "yi-1.5-6b"),
    _row("yi-9b", 8829, (48, 4096, 11008, 32, 4, 128, 64000), "01-ai/Yi-9B", "yi-1.5-9b"),
    _row("yi-34b", 34389, (60, 7168, 20480, 56, 8, 128, 64000), "01-ai/Yi-34B", "yi-1.5-34b"),
    # TII Falcon
    _row("falcon-7b", 6922, (32, 4544, 18176, 71, 1, 64, 65024), "tiiuae/falcon-7b", gated=False, tied=True),
    _row("falcon-40b", 41303, (60, 8192, 32768, 128, 8, 64, 65024), "tiiuae/falcon-40b", gated=False, tied=True),
    _row("falcon-180b", 179522, (80, 14848, 59392, 232, 8, 64, 65024), "tiiuae/falcon-180B",
         gated=False, tied=True),
    _row("falcon3-1b", 1669, (18, 2048, 8192, 8, 4, 256, 131072), "tiiuae/Falcon3-1B-Base"),
    _row("falcon3-3b", 3228, (22, 3072, 9216, 12, 4, 256, 131072), "tiiuae/Falcon3-3B-Base"),
    _row("falcon3-7b", 7456, (28, 3072, 23040, 12, 4, 256, 131072), "tiiuae/Falcon3-7B-Base"),
    _row("falcon3-10b", 10306, (40, 3072, 23040, 12, 4, 256, 131072), "tiiuae/Falcon3-10B-Base"),
    # EleutherAI
    _row("gpt-j-6b", 6051, (28, 4096, 16384, 16, 16, 256, 50400), "EleutherAI/gpt-j-6b", gated=False),
    _row("gpt-neox-20b", 20555, (44, 6144, 24576, 64, 64, 96, 50432), "EleutherAI/gpt-neox-20b", gated=False),
    _row("pythia-410m", 405, (24, 1024, 4096, 16, 16, 64, 50304), "EleutherAI/pythia-410m", gated=False),
    _row("pythia-1b", 1012, (16, 2048, 8192, 8, 8, 256, 50304), "EleutherAI/pythia-1b", gated=False),
    _row("pythia-1.4b", 1415, (24, 2048, 8192, 16, 16, 128, 50304), "EleutherAI/pythia-1.4b", gated=False),
    _row("pythia-2.8b", 2775, (32, 2560, 10240, 32, 32, 80, 50304), "EleutherAI/pythia-2.8b", gated=False),
    _row("pythia-6.9b", 6857, (32, 4096, 16384, 32, 32, 128, 50432), "EleutherAI/pythia-6.9b", gated=False),
    _row("pythia-12b", 11846, (36, 5120, 20480, 40, 40, 128, 50688), "EleutherAI/pythia-12b", gated=False),
    # Meta OPT: biases, learned positions
    _row("opt-125m", 125, (12, 768, 3072, 12, 12, 64, 50272), "facebook/opt-125m",
         gated=False, tied=True, positions=2050),
    _row("opt-1.3b", 1316, (24, 2048, 8192, 32, 32, 64, 50272), "facebook/opt-1.3b",
         gated=False, tied=True, positions=2050),
    _row("opt-2.7b", 2652, (32, 2560, 10240, 32, 32, 80, 50272), "facebook/opt-2.7b",
         gated=False, tied=True, positions=2050),
    _row("opt-6.7b", 6658, (32, 4096, 16384, 32, 32, 128, 50272), "facebook/opt-6.7b",
         gated=False, tied=True, positions=2050),
    _row("opt-13b", 12853, (40, 5120, 20480, 40, 40, 128, 50272), "facebook/opt-13b",
         gated=False, tied=True, positions=2050),
    _row("opt-30b", 29975, (48, 7168, 28672, 56, 56, 128, 50272), "facebook/opt-30b",
         gated=False, tied=True, positions=2050),
    _row("opt-66b", 65718, (64, 9216, 36864, 72, 72, 128, 50272), "facebook/opt-66b",
         gated=False, tied=True, positions=2050),
    # BigScience Bloom
    _row("bloom-560m", 559, (24, 1024, 4096, 16, 16, 64, 250880), "bigscience/bloom-560m", "bloomz-560m",
         gated=False, tied=True),
    _row("bloom-1b7", 1722, (24, 2048, 8192, 16, 16, 128, 250880), "bigscience/bloom-1b7", "bloomz-1b7",
         gated=False, tied=True),
    _row("bloom-3b", 3003, (30, 2560, 10240, 32, 32, 80, 250880), "bigscience/bloom-3b", "bloomz-3b",
         gated=False, tied=True),
    _row("bloom-7b1", 7069, (30, 4096, 16384, 32, 32, 128, 250880), "bigscience/bloom-7b1", "bloomz-7b1",
         gated=False, tied=True),
    _row("bloom-176b", 176247, (70, 14336, 57344, 112, 112, 128, 250880), "bigscience/bloom", "bloom", "bloomz",
         gated=False, tied=True),
    # BigCode, MosaicML, Databricks
    _row("starcoder-15b", 15518, (40, 6144, 24576, 48, 1, 128, 49152), "bigcode/starcoder", "starcoder",
         "starcoderbase", gated=False, tied=True, positions=8192),
    _row("starcoder2-3b", 3030, (30, 3072, 12288, 24, 2, 128, 49152), "bigcode/starcoder2-3b",
         gated=False, tied=True),
    _row("starcoder2-7b", 7174, (32, 4608, 18432, 36, 4, 128, 49152), "bigcode/starcoder2-7b",
         gated=False, tied=True),
    _row("starcoder2-15b", 15958, (40, 6144, 24576, 48, 4, 128, 49152), "bigcode/starcoder2-15b", gated=False),
    _row("mpt-7b", 6649, (32, 4096, 16384, 32, 32, 128, 50432), "mosaicml/mpt-7b", gated=False, tied=True),
    _row("mpt-30b", 29957, (48, 7168, 28672, 64, 64, 112, 50432), "mosaicml/mpt-30b", gated=False, tied=True),
    _row("dbrx", 131597, (40, 6144, 10752, 48, 8, 128, 100352), "databricks/dbrx-base",
         experts=16, experts_active=4),
    # Hugging Face SmolLM
    _row("smollm2-135m", 135, (30, 576, 1536, 9, 3, 64, 49152), "HuggingFaceTB/SmolLM2-135M", "smollm-135m", tied=True),
    _row("smollm2-360m", 362, (32, 960, 2560, 15, 5, 64, 49152), "HuggingFaceTB/SmolLM2-360M", "smollm-360m",
         tied=True),
    _row("smollm2-1.7b", 1711, (24, 2048, 8192, 32, 32, 64, 49152), "HuggingFaceTB/SmolLM2-1.7B", "smollm-1.7b",
         tied=True),
    _row("smollm3-3b", 3075, (36, 2048, 11008, 16, 4, 128, 128256), "HuggingFaceTB/SmolLM3-3B", tied=True),
    # AllenAI OLMo
    _row("olmo-1b", 1177, (16, 2048, 8192, 16, 16, 128, 50304), "allenai/OLMo-1B-hf", tied=True),
    _row("olmo-7b", 6888, (32, 4096, 11008, 32, 32, 128, 50304), "allenai/OLMo-7B-hf"),
    _row("olmo-2-7b", 7299, (32, 4096, 11008, 32, 32, 128, 100352), "allenai/OLMo-2-1124-7B", "olmo-2-1124-7b"),
    _row("olmo-2-13b", 13716, (40, 5120, 13824, 40, 40, 128, 100352), "allenai/OLMo-2-1124-13B", "olmo-2-1124-13b"),
    _row("olmoe-1b-7b", 6919, (16, 2048, 1024, 16, 16, 128, 50304), "allenai/OLMoE-1B-7B-0924",
         "olmoe-1b-7b-0924", experts=64, experts_active=8),
    # IBM Granite, Cohere, others
    _row("granite-3-2b", 2534, (40, 2048, 8192, 32, 8, 64, 49155), "ibm-granite/granite-3.1-2b-base",
         "granite-3.0-2b", "granite-3.1-2b", tied=True),
    _row("granite-3-8b", 8171, (40, 4096, 12800, 32, 8, 128, 49155), "ibm-granite/granite-3.0-8b-base",
         "granite-3.0-8b", "granite-3.1-8b", tied=True),
    _row("command-r", 34981, (40, 8192, 22528, 64, 64, 128, 256000), "CohereForAI/c4ai-command-r-v01",
         "c4ai-command-r-v01", "command-r-35b", tied=True),
    _row("command-r-plus", 103811, (64, 12288, 33792, 96, 8, 128, 256000), "CohereForAI/c4ai-command-r-plus",
         "c4ai-command-r-plus", tied=True),
    _row("aya-23-8b", 8028, (32, 4096, 14336, 32, 8, 128, 256000), "CohereForAI/aya-23-8B",
         "aya-expanse-8b", tied=True),
    _row("internlm2-7b", 7738, (32, 4096, 14336, 32, 8, 128, 92544), "internlm/internlm2-7b", "internlm2.5-7b",
         "internlm2-5-7b"),
    _row("internlm2-20b", 19861, (48, 6144, 16384, 48, 8, 128, 92544), "internlm/internlm2-20b", "internlm2.5-20b",
         "internlm2-5-20b"),
    _row("baichuan2-7b", 7506, (32, 4096, 11008, 32, 32, 128, 125696), "baichuan-inc/Baichuan2-7B-Base"),
    _row("baichuan2-13b", 13897, (40, 5120, 13696, 40, 40, 128, 125696), "baichuan-inc/Baichuan2-13B-Base"),
    _row("glm-4-9b", 9400, (40, 4096, 13696, 32, 2, 128, 151552), "THUDM/glm-4-9b"),
    # Without the layer that predicts further tokens, which engines leave out unless told
    _row("glm-4.5", 352797, (92, 5120, 12288, 96, 8, 128, 151552), "zai-org/GLM-4.5", "glm-4.5-355b-a32b", "glm-4.6",
         experts=160, experts_active=8, moe_intermediate=1536, shared_intermediate=1536, dense_layers=3),
    _row("glm-4.5-air", 106852, (46, 4096, 10944, 96, 8, 128, 151552), "zai-org/GLM-4.5-Air", "glm-4.5-air-106b-a12b",
         experts=128, experts_active=8, moe_intermediate=1408, shared_intermediate=1408, dense_layers=1),
    _row("minimax-m2", 228704, (62, 3072, 1536, 48, 8, 128, 200064), "MiniMaxAI/MiniMax-M2",
         experts=256, experts_active=8),
    _row("seed-oss-36b", 36151, (64, 5120, 27648, 80, 8, 128, 155136), "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    _row("chatglm3-6b", 6244, (28, 4096, 13696, 32, 2, 128, 65024), "THUDM/chatglm3-6b"),
    _row("solar-10.7b", 10732, (48, 4096, 14336, 32, 8, 128, 32000), "upstage/SOLAR-10.7B-v1.0"),
    _row("stablelm-alpha-3b", 3638, (16, 4096, 16384, 32, 32, 128, 50688), "stabilityai/stablelm-base-alpha-3b",
         "stablelm-base-alpha-3b", "stablelm-tuned-alpha-3b", gated=False),
    _row("stablelm-alpha-7b", 7869, (16, 6144, 24576, 48, 48, 128, 50432), "stabilityai/stablelm-base-alpha-7b",
         "stablelm-base-alpha-7b", "stablelm-tuned-alpha-7b", gated=False),
    _row("stablelm-3b-4e1t", 2795, (32, 2560, 6912, 32, 32, 80, 50304), "stabilityai/stablelm-3b-4e1t",
         "stablelm-zephyr-3b"),
    _row("stablelm-2-1.6b", 1645, (24, 2048, 5632, 32, 32, 64, 100352), "stabilityai/stablelm-2-1_6b"),
    # BERT family: learned positions and a pooler; a published size leaves out the masked-LM head
    _row("bert-base", 109, (12, 768, 3072, 12, 12, 64, 30522), "google-bert/bert-base-uncased",
         "bert-base-uncased", "bge-base-en-v1.5", "e5-base-v2", gated=False, positions=512, family=_ENCODER),
    _row("bert-large", 335, (24, 1024, 4096, 16, 16, 64, 30522), "google-bert/bert-large-uncased",
         "bert-large-uncased", "bge-large-en-v1.5", "e5-large-v2", gated=False, positions=512, family=_ENCODER),
    _row("distilbert-base", 66, (6, 768, 3072, 12, 12, 64, 30522), "distilbert/distilbert-base-uncased",
         "distilbert-base-uncased", gated=False, positions=512, family=_ENCODER),
    _row("roberta-base", 125, (12, 768, 3072, 12, 12, 64, 50265), "FacebookAI/roberta-base",
         gated=False, positions=514, family=_ENCODER),
    _row("roberta-large", 355, (24, 1024, 4096, 16, 16, 64, 50265), "FacebookAI/roberta-large",
         gated=False, positions=514, family=_ENCODER),
    _row("xlm-roberta-base", 278, (12, 768, 3072, 12, 12, 64, 250002), "FacebookAI/xlm-roberta-base",
         gated=False, positions=514, family=_ENCODER),
    _row("xlm-roberta-large", 560, (24, 1024, 4096, 16, 16, 64, 250002), "FacebookAI/xlm-roberta-large",
         gated=False, positions=514, family=_ENCODER),
    # T5 family: layers are both sides; v1.1 and later are gated with a head of their own
    _row("t5-small", 61, (12, 512, 2048, 8, 8, 64, 32128), "google-t5/t5-small",
         gated=False, tied=True, family=_ENCDEC),
    _row("t5-base", 223, (24, 768, 3072, 12, 12, 64, 32128), "google-t5/t5-base",
         gated=False, tied=True, family=_ENCDEC),
    _row("t5-large", 738, (48, 1024, 4096, 16, 16, 64, 32128), "google-t5/t5-large",
         gated=False, tied=True, family=_ENCDEC),
    _row("flan-t5-base", 248, (24, 768, 2048, 12, 12, 64, 32128), "google/flan-t5-base", family=_ENCDEC),
    _row("flan-t5-large", 783, (48, 1024, 2816, 16, 16, 64, 32128), "google/flan-t5-large", family=_ENCDEC),
    _row("flan-t5-xl", 2850, (48, 2048, 5120, 32, 32, 64, 32128), "google/flan-t5-xl", "t0-3b", family=_ENCDEC),
    _row("flan-t5-xxl", 11135, (48, 4096, 10240, 64, 64, 64, 32128), "google/flan-t5-xxl", family=_ENCDEC),
    _row("mt0-xxl", 12921, (48, 4096, 10240, 64, 64, 64, 250112), "bigscience/mt0-xxl", family=_ENCDEC),
    # Whisper: 30 s of sound are 1,500 positions of the encoder, whatever is said in them
    _row("whisper-tiny", 38, (8, 384, 1536, 6, 6, 64, 51865), "openai/whisper-tiny", "whisper-tiny.en",
         gated=False, tied=True, positions=448, source_tokens=1500, extra_millions=1, family=_ENCDEC),
    _row("whisper-base", 73, (12, 512, 2048, 8, 8, 64, 51865), "openai/whisper-base", "whisper-base.en",
         gated=False, tied=True, positions=448, source_tokens=1500, extra_millions=2, family=_ENCDEC),
    _row("whisper-small", 242, (24, 768, 3072, 12, 12, 64, 51865), "openai/whisper-small", "whisper-small.en",
         gated=False, tied=True, positions=448, source_tokens=1500, extra_millions=3, family=_ENCDEC),
    _row("whisper-medium", 764, (48, 1024, 4096, 16, 16, 64, 51865), "openai/whisper-medium", "whisper-medium.en",
         gated=False, tied=True, positions=448, source_tokens=1500, extra_millions=5, family=_ENCDEC),
    _row("whisper-large", 1543, (64, 1280, 5120, 20, 20, 64, 51866), "openai/whisper-large-v3", "whisper-large-v2",
         gated=False, tied=True, positions=448, source_tokens=1500, extra_millions=7, family=_ENCDEC),
    _row("whisper-large-v3-turbo", 809, (36, 1280, 5120, 20, 20, 64, 51866), "openai/whisper-large-v3-turbo",
         "whisper-turbo", gated=False, tied=True, positions=448, source_tokens=1500, decoder_layers=4, extra_millions=7,
         family=_ENCDEC),
    _row("distil-whisper-large", 756, (34, 1280, 5120, 20, 20, 64, 51866), "distil-whisper/distil-large-v3",
         "distil-whisper-large-v3", "distil-large-v2", gated=False, tied=True, positions=448, source_tokens=1500,
         decoder_layers=2, extra_millions=7, family=_ENCDEC),
    # Vision transformers: the vocabulary is the patch projection (3 x 16 x 16 inputs), positions the patches
    _row("vit-base", 86, (12, 768, 3072, 12, 12, 64, 768), "google/vit-base-patch16-224",
         "vit-base-patch16-224", gated=False, positions=197, family=_VISION),
    _row("vit-large", 304, (24, 1024, 4096, 16, 16, 64, 768), "google/vit-large-patch16-224",
         "vit-large-patch16-224", gated=False, positions=197, family=_VISION),
    _row("vit-huge", 632, (32, 1280, 5120, 16, 16, 80, 588), "google/vit-huge-patch14-224-in21k",
         "vit-huge-patch14-224", gated=False, positions=257, family=_VISION),
)  # fmt: skip

# What publishers add to a name without changing the architecture; at the end, or before a version.
_TUNING = re.compile(
    r"-(?:instruct|chat|hf|it|base|sft|dpo|thinking|python|gptq(?:-int[48])?|awq|int[48]|fp8|bf16|bnb-4bit|2507|v1\.0)"
    r"(?=-v\d|-\d{4}(?!\d)|$)"
)
_EDITION = re.compile(r"-(?:v\d+(?:\.\d+)*|\d{4})$")
"""A later edition of a model, which has the shape of the one before unless the table has a row for it."""
_JOINED = re.compile(r"^(llama|gemma|phi)(?=\d)")


def canonical_name(name: str) -> str:
    """The table's spelling of a model name: lower case, without organisation, "meta-" and tuning suffixes."""
    plain = re.sub(r"[_:\s]+", "-", name.strip().lower().rsplit("/", 1)[-1]).removeprefix("meta-")
    plain = _JOINED.sub(r"\1-", plain)
    while _TUNING.search(plain):
        plain = _TUNING.sub("", plain)
    return plain


def _index() -> dict[str, KnownModel]:
    index: dict[str, KnownModel] = {}
    for model in MODELS:
        source = model.source.removesuffix(" config.json")
        for spelling in (model.name, *model.aliases, source):
            index.setdefault(canonical_name(spelling), model)
    return index


_BY_NAME = _index()


def known_model(name: str) -> KnownModel | None:
    """The model of this name, however it is spelled (organisation, case and tuning suffix don't matter).

    An edition that isn't in the table (``-0905``, ``-v0.2``) is taken for the one that is.
    """
    plain = canonical_name(name)
    return _BY_NAME.get(plain) or _BY_NAME.get(_EDITION.sub("", plain))
