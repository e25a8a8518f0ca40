"""The estimator against measured memory, and what must hold for every request."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion.admission.architecture import (
    Architecture,
    Family,
    kv_elements_per_token,
    total_params,
)
from apportion.admission.model_spec import ModelSpec, ModelSpecInvalid, architecture_of, family_key, parse_model
from apportion.admission.models import MODELS, canonical_name, known_model
from apportion.admission.sizing import Sizing, estimate, fits

DATA = Path(__file__).parent / "data"
CARD_MIB = {"A100-40GB": 40 * 1024, "A100-80GB": 80 * 1024, "16 GB card": 16 * 1024}
GIB = 1024


def ground_truth() -> list[dict[str, str]]:
    with (DATA / "vram_ground_truth.csv").open(newline="") as rows:
        return list(csv.DictReader(rows))


def engine_of(row: dict[str, str]) -> str:
    if "litgpt" in row["source"]:
        return "litgpt"
    return "vllm" if "vLLM" in row["source"] else "transformers"


def request_of(row: dict[str, str], *, by: str) -> dict[str, Any]:
    """The `model` object that a user would write for this row: by name, or by architecture."""
    fields: dict[str, Any] = {"name": row["model"]} if by == "name" else {}
    if by == "architecture":
        fields["params_millions"] = float(row["params"]) / 1e6
        for column in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
            fields[column] = int(row[column])
        fields["mlp"] = row["mlp"]
        if "bert" in row["model"]:
            fields["family"] = "encoder"
    # "fp32/bf16 as in the example" were loaded at 32 bits: PEFT's example passes no dtype.
    fields["dtype"] = "fp32" if row["dtype"].startswith("fp32") else row["dtype"]
    if row["batch"]:
        fields["batch"] = int(row["batch"])
    prompt, output = int(row["input_len"] or 0), int(row["gen_len"].lstrip("<=") or 0)
    if prompt + output:
        fields["context_tokens"] = prompt + output
    if prompt and output:
        fields["prompt_tokens"] = prompt
    if row["kind"].startswith("train"):
        fields["training"] = {"method": row["kind"].removeprefix("train-")}
    fields["engine"] = engine_of(row)
    if row.get("metric", "").startswith("device-wide"):
        fields["measure"] = "device"
    return fields


def predicted_mib(row: dict[str, str], sizing: Sizing) -> int:
    """What the row measured: all of it, or the one part that an engine reports."""
    match row["kind"]:
        case "inference-weights":
            return sizing.parts.weights
        case "inference-kv":
            return sizing.parts.kv_cache
        case _:
            return sizing.memory_mib_p50


@pytest.mark.parametrize("by", ["name", "architecture"])
def test_measured_points_are_met(by: str) -> None:
    """The targets: half of all rows within 5 %, at most one in twenty above p95, p95 no more than a quarter above."""
    errors, ratios, above = [], [], []
    for row in ground_truth():
        if row["metric"] == "OOM":
            continue
        sizing = estimate(parse_model(request_of(row, by=by)))
        measured = int(row["measured_mib"])
        errors.append(abs(predicted_mib(row, sizing) / measured - 1))
        ratios.append(sizing.memory_mib_p95 / measured)
        if measured > sizing.memory_mib_p95:
            above.append(row["id"])
    assert len(errors) == 28
    assert statistics.median(errors) <= 0.05
    # Tighter than the target, so that a change which doubles the error doesn't pass unseen.
    assert statistics.median(errors) <= 0.015
    assert max(errors) <= 0.06
    assert len(above) <= len(errors) * 0.05, above
    assert statistics.median(ratios) <= 1.25


@pytest.mark.parametrize("by", ["name", "architecture"])
def test_jobs_that_ran_out_of_memory_do_not_fit_their_card(by: str) -> None:
    """A job that is known to fail there must not be sent there."""
    rows = [row for row in ground_truth() if row["metric"] == "OOM"]
    assert len(rows) == 3
    for row in rows:
        sizing = estimate(parse_model(request_of(row, by=by)))
        assert not fits(sizing, CARD_MIB[row["gpu"]]), row["id"]
        # Not for the margin's sake: the expected peak is already too much.
        assert sizing.memory_mib_p50 > CARD_MIB[row["gpu"]], row["id"]


def test_four_bit_rows_are_not_under_estimated() -> None:
    """Where everyone errs: buffers, scales and unquantised modules are 14 to 17 % of a 4-bit model."""
    rows = [row for row in ground_truth() if "4" in row["dtype"]]
    assert len(rows) == 6
    for row in rows:
        sizing = estimate(parse_model(request_of(row, by="name")))
        measured = int(row["measured_mib"])
        assert sizing.memory_mib_p50 >= measured * 0.95, row["id"]
        assert sizing.memory_mib_p95 >= measured, row["id"]


def test_points_that_nothing_was_fitted_to_are_met() -> None:
    """Another model, library and quantiser settings than any fitted row, and another kind of model."""
    with (DATA / "independent_points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row in rows:
        fields = {"name": row["model"], "dtype": row["dtype"], "engine": row["engine"]}
        if row["metric"].startswith("device-wide"):
            fields["measure"] = "device"
        fields_with_counts = {**fields, "batch": int(row["batch"]), "context_tokens": int(row["context_tokens"])}
        sizing = estimate(parse_model(fields_with_counts))
        measured = int(row["measured_mib"])
        assert abs(sizing.memory_mib_p50 / measured - 1) <= 0.05, (row["id"], sizing.memory_mib_p50)
        assert measured <= sizing.memory_mib_p95


def test_rows_held_out_of_the_fits_are_met() -> None:
    """55 more rows of the same documents; p50's terms but for the copy of AWQ's heads come from others: the targets."""
    with (DATA / "held_out_points.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    errors, ratios, above = [], [], []
    for row in rows:
        sizing = estimate(parse_model(request_of(row, by="name")))
        if not row["measured_mib"]:
            assert not fits(sizing, CARD_MIB[row["gpu"]]), row["id"]
            continue
        measured = int(row["measured_mib"])
        errors.append(abs(sizing.memory_mib_p50 / measured - 1))
        ratios.append(sizing.memory_mib_p95 / measured)
        above += [row["id"]] if measured > sizing.memory_mib_p95 else []
    assert len(errors) == 48
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.06
    assert above == []
    assert statistics.median(ratios) <= 1.2


def test_a_cached_token_of_llama_3_1_8b_takes_131072_bytes() -> None:
    """VLLM's log agrees within 3 bytes: 19.28 GiB for 157,936 tokens."""
    sizing = estimate(parse_model({"name": "llama-3.1-8b", "context_tokens": 8192, "batch": 1}))
    assert sizing.parts.kv_cache == 8192 * 131072 // 2**20


# ---- the table ---------------------------------------------------------------------------------------------------


def test_the_table_knows_sixty_models_and_more() -> None:
    """Names are unique, each with its source."""
    assert len(MODELS) >= 60
    assert len({model.name for model in MODELS}) == len(MODELS)
    assert all(model.source.endswith("config.json") for model in MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_published_sizes_follow_from_the_columns(model: Any) -> None:
    """A slip in a column changes the count; 2 % is more than biases and norms make."""
    assert total_params(model.architecture) / 1e6 == pytest.approx(model.params_millions, rel=0.02)
    assert known_model(model.name) is model


def test_every_spelling_leads_to_one_model() -> None:
    """An alias that two rows claim would resolve by their order."""
    owners: dict[str, str] = {}
    for model in MODELS:
        for spelling in {canonical_name(word) for word in (model.name, *model.aliases)}:
            assert owners.setdefault(spelling, model.name) == model.name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-14B-Instruct-GPTQ-Int8", "qwen2.5-14b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("google-bert/bert-large-uncased", "bert-large"),
        ("bigscience/T0_3B", "t0-3b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("mistralai/Mistral-Small-Instruct-2409", "mistral-small-22b"),
        ("mistralai/Mistral-Large-Instruct-2411", "mistral-large-123b"),
        ("mistralai/Codestral-22B-v0.1", "mistral-small-22b"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("llama3.1:8b", "llama-3.1-8b"),
        ("Llama 3.1 8B", "llama-3.1-8b"),
    ],
)
def test_names_are_known_as_people_write_them(spelling: str, name: str) -> None:
    """Requests carry what a model hub calls it."""
    found, wanted = known_model(spelling), known_model(name)
    assert wanted is not None
    assert found is wanted


def test_latent_attention_caches_far_less() -> None:
    """DeepSeek V3 caches 576 values a token and layer, where its 128 heads would have made it 32,768."""
    model = known_model("deepseek-v3")
    assert model is not None
    assert kv_elements_per_token(model.architecture) == 576


def test_an_encoder_of_sound_reads_all_its_frames_whatever_is_said() -> None:
    """1,500 positions for 30 s: the turbo has four decoders, each with those keys and the text's."""

    def cached_mib(name: str, tokens: int) -> int:
        return estimate(parse_model({"name": name, "batch": 8, "context_tokens": tokens})).parts.kv_cache

    for tokens in (8, 448):
        assert cached_mib("whisper-large-v3-turbo", tokens) == -(-8 * 4 * (1500 + tokens) * 2 * 1280 * 2 // 2**20)
    assert cached_mib("whisper-large-v3", 448) == pytest.approx(8 * cached_mib("whisper-large-v3-turbo", 448), rel=0.01)
    trained = [
        estimate(parse_model({"name": "whisper-small", "training": "full", "context_tokens": tokens, "batch": 8}))
        for tokens in (100, 200)
    ]
    assert 0 < trained[1].parts.activations - trained[0].parts.activations < trained[0].parts.activations // 10


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8", "llama-4-maverick"),
        ("zai-org/GLM-4.5-Air-FP8", "glm-4.5-air"),
        ("zai-org/GLM-4.6", "glm-4.5"),
        ("openai/whisper-large-v3", "whisper-large"),
        ("openai/whisper-large-v3-turbo", "whisper-large-v3-turbo"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.1-24b"),
        ("mistralai/Devstral-Small-2507", "mistral-small-24b"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3-coder-480b-a35b"),
    ],
)
def test_models_of_this_year_are_known(spelling: str, name: str) -> None:
    """Under the names of their repositories."""
    found = known_model(spelling)
    assert found is not None
    assert found.name == name


def test_a_sliding_window_bounds_the_cache() -> None:
    """Beyond its window only the global layers grow."""
    plain = Architecture(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=32000)
    assert plain.family is Family.DECODER
    by_context = [
        estimate(parse_model({"name": "mistral-7b-v0.1", "context_tokens": tokens})).parts.kv_cache
        for tokens in (4096, 32768)
    ]
    assert by_context[0] == by_context[1] == 4096 * 131072 // 2**20
    gemma = [
        estimate(parse_model({"name": "gemma-2-9b", "context_tokens": tokens})).parts.kv_cache
        for tokens in (4096, 8192)
    ]
    assert gemma[1] == gemma[0] * 3 // 2


# ---- what is read from a request ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "path", "expected"),
    [
        ({"name": "llama-3.1-8b", "batch": "8"}, "model.batch", "int"),
        ({"name": "llama-3.1-8b", "batch": 0}, "model.batch", "a number from 1"),
        ({"name": "llama-3.1-8b", "batch": 10**12}, "model.batch", "a number from 1"),
        ({"name": "llama-3.1-8b", "dtype": "bf17"}, "model.dtype", "one of fp32, bf16"),
        ({"name": "llama-3.1-8b", "colour": 1}, "model.colour", "one of name, "),
        ({"name": "llama-3.1-8b", "training": {"method": "magic"}}, "model.training.method", "one of none, full"),
        ({"name": "llama-3.1-8b", "training": {"zero_stage": 4}}, "model.training.zero_stage", "0 to 3"),
        ({"name": "llama-3.1-8b", "training": "full", "dtype": "nf4"}, "model.dtype", "with training.method full"),
        ({"name": "llama-3.1-8b", "context_tokens": 8, "prompt_tokens": 9}, "model.prompt_tokens", "at most"),
        ({"name": "llama-3.1-8b", "tensor_parallel": 64}, "model.tensor_parallel", "at most heads (32)"),
        ({"name": "llama-3.1-8b", "dtype": "bf16", "precision": "fp32"}, "model.precision", "said once"),
        ({"name": "llama-9-8b"}, "model.name", "a known model"),
        ({}, "model", "a name, params_millions or an architecture"),
        ([], "model", "an object"),
        ({"params_millions": float("nan")}, "model.params_millions", "a number from"),
        ({"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 4}, "model.kv_heads", "at most heads (2)"),
    ],
)
def test_a_bad_value_is_named_with_its_path(fields: Any, path: str, expected: str) -> None:
    """Whoever filled the form must learn which line to mend."""
    with pytest.raises(ModelSpecInvalid) as caught:
        parse_model(fields)
    assert caught.value.path == path
    assert expected in caught.value.expected


def test_other_spellings_of_fields_and_formats_are_understood() -> None:
    """Formats have as many names as libraries."""
    ours = parse_model(
        {"name": "llama-2-7b", "dtype": "nf4", "training": {"method": "lora", "optimizer": "adamw-8bit"}}
    )
    theirs = parse_model(
        {"name": "llama-2-7b", "quantization": "bnb.nf4", "training": {"method": "lora", "optimiser": "adamw_8bit"}}
    )
    assert ours == theirs
    assert parse_model({"name": "llama-2-7b", "training": "qlora"}).dtype.value == "nf4"


def test_a_spec_survives_the_wire() -> None:
    """Services pass it on as JSON."""
    spec = parse_model({"name": "llama-3.1-8b", "batch": 8, "training": "lora"})
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec
    assert parse_model(msgspec.to_builtins(spec)) == spec


def test_a_size_alone_is_enough_and_says_what_was_assumed() -> None:
    """`params_millions` is all that many people know; the answer admits the guess."""
    sizing = estimate(parse_model({"params_millions": 7000}))
    assert sizing.assumed == ("batch", "context_tokens", "architecture")
    assert sizing.method == "analytic-v4/size-only/none"
    assert sizing.parts.weights == 14_000_000_000 // 2**20 + 1


def test_whether_the_head_is_tied_is_read_off_the_count() -> None:
    """Sources count tied heads once or twice; the parameters given decide."""
    shape = {"layers": 24, "hidden": 896, "intermediate": 4864, "heads": 14, "kv_heads": 2, "head_dim": 64,
             "vocab": 151936}  # fmt: skip
    assert architecture_of(parse_model({**shape, "params_millions": 494})).tied
    assert not architecture_of(parse_model({**shape, "params_millions": 630})).tied


def test_a_default_context_is_no_longer_than_the_model_reads() -> None:
    """BERT has 512 positions, whatever the default for decoders is."""
    unsaid, said = (estimate(parse_model({"name": "bert-base", **more})) for more in ({}, {"context_tokens": 512}))
    assert unsaid.memory_mib_p50 == said.memory_mib_p50
    assert unsaid.assumed == ("batch", "context_tokens")


def test_a_family_is_a_plain_word() -> None:
    """It becomes a key: no dots, no spaces, whatever the name was."""
    spec = parse_model({"name": "My Model.v2 * >", "params_millions": 1})
    assert family_key(spec) == "my-model-v2/bf16/other/none"


# ---- what holds for every request --------------------------------------------------------------------------------


TRAININGS: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "full"},
    {"method": "full", "checkpointing": True, "zero_stage": 3, "data_parallel": 8},
    {"method": "lora", "rank": 16, "target_modules": "all"},
    {"method": "qlora"},
]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    training = draw(st.sampled_from(TRAININGS))
    dtypes = ["fp32", "bf16"] if training["method"] == "full" else ["fp32", "bf16", "int8", "gptq-int4", "nf4", "fp8"]
    fields: dict[str, Any] = {
        "training": training,
        "dtype": draw(st.sampled_from(dtypes)),
        "batch": draw(st.integers(1, 64)),
        "context_tokens": draw(st.integers(1, 131072)),
        "engine": draw(st.sampled_from(["transformers", "vllm", "litgpt", "other"])),
        "measure": draw(st.sampled_from(["allocator", "device"])),
        "attention": draw(st.sampled_from(["auto", "eager", "flash"])),
    }
    if draw(st.booleans()):
        fields["name"] = draw(st.sampled_from(MODELS)).name
    else:
        fields["params_millions"] = draw(st.integers(1, 500_000))
    return fields


def total_of_parts(sizing: Sizing) -> int:
    return sum(msgspec.to_builtins(sizing.parts).values())


@settings(deadline=None)
@given(requests())
def test_parts_add_up_and_p95_is_never_below_p50(fields: dict[str, Any]) -> None:
    """A bill whose lines don't add up convinces nobody."""
    sizing = estimate(parse_model(fields))
    assert total_of_parts(sizing) == sizing.memory_mib_p50
    assert 0 < sizing.memory_mib_p50 <= sizing.memory_mib_device <= sizing.memory_mib_p95_device
    assert sizing.memory_mib_p95 - sizing.memory_mib_p50 == sizing.memory_mib_p95_device - sizing.memory_mib_device
    assert all(isinstance(mib, int) and mib >= 0 for mib in msgspec.to_builtins(sizing.parts).values())


@settings(deadline=None)
@given(requests(), st.integers(1, 64), st.integers(1, 65536))
def test_more_work_never_needs_less_memory(fields: dict[str, Any], more_batch: int, more_tokens: int) -> None:
    """Otherwise a user could game the estimate by asking for more."""
    before = estimate(parse_model(fields))
    for change in (
        {"batch": fields["batch"] + more_batch},
        {"context_tokens": fields["context_tokens"] + more_tokens},
    ):
        after = estimate(parse_model({**fields, **change}))
        assert after.memory_mib_p50 >= before.memory_mib_p50
        assert after.memory_mib_p95 >= before.memory_mib_p95


@settings(deadline=None)
@given(requests(), st.integers(1, 400_000))
def test_more_parameters_never_need_less_memory(fields: dict[str, Any], more: int) -> None:
    """With the shape held still, weights and states grow with the count."""
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 32000, "tied_embeddings": False}
    plain = {key: value for key, value in fields.items() if key != "name"} | shape
    small = estimate(parse_model(plain | {"params_millions": 7000}))
    large = estimate(parse_model(plain | {"params_millions": 7000 + more}))
    assert large.memory_mib_p50 >= small.memory_mib_p50
    assert large.memory_mib_p95 >= small.memory_mib_p95


@settings(deadline=None)
@given(requests(), st.sampled_from([2, 4, 8]))
def test_tensor_parallel_devices_share_the_weights(fields: dict[str, Any], ways: int) -> None:
    """Each holds its part and no more, to a MiB of rounding; nothing grows but the buffers that talk."""
    shape = {"params_millions": 70_000, "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8}
    plain = {key: value for key, value in fields.items() if key != "name"} | shape
    one = estimate(parse_model(plain))
    many = estimate(parse_model(plain | {"tensor_parallel": ways}))
    assert abs(many.parts.weights * ways - one.parts.weights) <= 2 * ways
    assert many.parts.kv_cache <= one.parts.kv_cache // ways + ways
    assert many.parts.activations <= one.parts.activations
    assert many.memory_mib_p50 - many.parts.framework < one.memory_mib_p50


@settings(deadline=None)
@given(requests())
def test_what_isnt_measured_is_booked_all_the_same(fields: dict[str, Any]) -> None:
    """What is booked covers the device, whichever measure p50 and p95 are asked in."""
    allocator = estimate(parse_model({**fields, "measure": "allocator"}))
    device = estimate(parse_model({**fields, "measure": "device"}))
    assert allocator.memory_mib_p95_device == device.memory_mib_p95_device == device.memory_mib_p95
    assert device.memory_mib_p50 == device.memory_mib_device == allocator.memory_mib_device


def test_adam_states_are_sixteen_bytes_a_parameter_and_zero_shares_them() -> None:
    """ZeRO's own table: 16, then 4 + 12/N, 2 + 14/N, 16/N bytes a parameter."""

    def states_mib(stage: int) -> int:
        parts = estimate(
            parse_model({"name": "llama-2-7b", "training": {"method": "full", "zero_stage": stage, "data_parallel": 4}})
        ).parts
        return parts.weights + parts.gradients + parts.optimizer

    millions = 6738
    for stage, bytes_each in ((0, 16), (1, 4 + 12 / 4), (2, 2 + 14 / 4), (3, 16 / 4)):
        assert states_mib(stage) == pytest.approx(millions * 1e6 * bytes_each / 2**20, rel=0.001)


def test_checkpointing_trades_activations_away() -> None:
    """It is the first advice to whoever doesn't fit."""
    kept, recomputed = (
        estimate(
            parse_model(
                {"name": "llama-2-7b", "batch": 4, "training": {"method": "full", "checkpointing": checkpointing}}
            )
        )
        for checkpointing in (False, True)
    )
    assert recomputed.parts.activations * 5 < kept.parts.activations
    assert recomputed.parts.weights == kept.parts.weights


def test_a_fixed_kv_pool_replaces_the_cache() -> None:
    """VLLM takes what it is told, not what the model needs."""
    sizing = estimate(parse_model({"name": "llama-3.1-8b", "engine": "vllm", "kv_pool_mib": 20 * GIB}))
    assert sizing.parts.kv_cache == 20 * GIB


def test_loading_an_awq_model_with_a_tied_head_takes_the_head_twice() -> None:
    """Until the run itself needs as much; other formats and untied heads load without."""
    tied = {
        "name": "qwen2.5-0.5b",
        "dtype": "awq",
        "engine": "transformers",
        "prompt_tokens": 1,
        "context_tokens": 2049,
    }
    short, long = (
        estimate(parse_model({**tied, **more})) for more in ({}, {"prompt_tokens": 6144, "context_tokens": 8192})
    )
    head_mib = 151_936 * 896 * 2 // 2**20
    assert abs(short.memory_mib_p50 - short.parts.weights - head_mib) <= 2
    assert long.parts.dequantisation == 0
    assert estimate(parse_model({**tied, "dtype": "gptq-int4"})).parts.dequantisation == 0
    assert estimate(parse_model({**tied, "name": "llama-2-7b"})).parts.dequantisation == 0
