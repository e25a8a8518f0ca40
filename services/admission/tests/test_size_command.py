"""`apportion size` on lines and on its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from apportion.admission.size_command import main, size_lines


def test_each_line_gets_one_answer_in_order() -> None:
    """Bad lines are answered too, and stop nobody else's."""
    lines: list[str | bytes] = [
        '{"name": "llama-3.1-8b", "dtype": "bf16", "batch": 8, "context_tokens": 8192}\n',
        "\n",
        '{"name": "llama-3.1-8b", "batch": "8"}\n',
        "{not json\n",
        b"\xff\xfe\n",
        '{"id": "job-7", "queue": "a", "model": {"params_millions": 13016, "dtype": "nf4"}}\n',
    ]
    answers = [json.loads(answer) for answer in size_lines(lines)]
    assert len(answers) == 5
    first, wrong_type, no_json, no_text, wrapped = answers
    assert first["memory_mib_p50"] == sum(first["parts"].values())
    assert wrong_type == {
        "line": 3, "error": {"code": "FieldInvalid", "path": "model.batch", "expected": "int", "found": "8"}
    }  # fmt: skip
    assert (no_json["line"], no_json["error"]["code"]) == (4, "NotJson")
    assert no_text["line"] == 5
    assert wrapped["id"] == "job-7"
    assert wrapped["parts"]["dequantisation"] > 0


def test_absurd_numbers_are_answered_and_not_summed() -> None:
    """A line that overflows whoever adds up would be worth sending."""
    lines = [
        '{"name": "llama-3.1-8b", "batch": 999999999, "context_tokens": 999999999}',
        '{"name": "llama-3.1-8b", "batch": 1' + "0" * 40 + "}",
        '{"name": {"a": [1' + "0" * 40 + "]}}",
        "[" * 2000,
        '"' + "x" * 5000 + '"',
    ]
    answers = [json.loads(answer) for answer in size_lines(lines)]
    assert [answer["line"] for answer in answers] == [1, 2, 3, 4, 5]
    assert answers[0]["error"]["path"] == "model"
    assert answers[1]["error"]["path"] == "model.batch"
    assert answers[2]["error"]["path"] == "model.name"
    assert all(len(str(answer["error"]["found"])) <= 200 for answer in answers)


def test_one_model_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that the documentation shows."""
    arguments = ["--model", "llama-3.1-8b", "--dtype", "bf16", "--batch", "8", "--context", "8192", "-o", "json"]
    assert main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parts"]["kv_cache"] == 8192
    assert answer["method"] == "analytic-v4/known/none"


def test_one_model_is_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """What was assumed is said as well."""
    assert main(["--model", "llama-2-7b", "--training", "qlora", "--rank", "16"]) == 0
    out = capsys.readouterr().out
    assert "dequantisation" in out
    assert "assumed: batch, context_tokens" in out


def test_a_file_of_requests_is_sized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 says that a line could not be."""
    path = tmp_path / "requests.jsonl"
    path.write_text('{"name": "qwen3-8b"}\n{"name": "no-such-model"}\n')
    assert main(["--file", str(path), "-o", "jsonl"]) == 2
    sized, refused = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert sized["memory_mib_p95"] > sized["memory_mib_p50"]
    assert refused["error"]["path"] == "model.name"
    assert main(["--file", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def test_a_wrong_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The same words as in a request's rejection."""
    assert main(["--model", "llama-2-7b", "--dtype", "bf17"]) == 2
    assert "model.dtype: expected one of fp32" in capsys.readouterr().err


def test_the_known_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A table that ships should be seen."""
    assert main(["--list"]) == 0
    assert "meta-llama/Llama-3.1-8B config.json" in capsys.readouterr().out


def test_the_known_models_are_listed_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """With all that is known of each, so that nobody has to parse columns."""
    assert main(["--list", "-o", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["schema"] == "apportion.models/1"
    assert len(listed["models"]) >= 60
    assert all(row["source"] and row["params_millions"] > 0 for row in listed["models"])
    assert main(["--list", "-o", "jsonl"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(listed["models"])


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"name": "qwen3-8b", "context": 4096}, {"name": "qwen3-8b", "context_tokens": 4096}),
        ({"parameters": 7_000_000_000, "batch_size": 2}, {"params_millions": 7000, "batch": 2}),
        (
            {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
            {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8},
        ),
        (
            {"name": "qwen3-8b", "training": {"method": "full", "fsdp": 8}},
            {"name": "qwen3-8b", "training": {"method": "full", "zero_stage": 3, "data_parallel": 8}},
        ),
    ],
)
def test_other_common_names_of_a_field_mean_the_same(said: dict[str, object], meant: dict[str, object]) -> None:
    """As a model's config.json, an engine's flags, or a person says it."""
    first, second = (json.loads(answer) for answer in size_lines([json.dumps(said), json.dumps(meant)]))
    assert "error" not in first
    assert first == second


@pytest.mark.parametrize(
    ("model", "code", "path", "expected"),
    [
        ({"name": "qwen3-8b", "optimiser": "sgd"}, "FieldUnknown", "model.optimiser", "it as training.optimiser"),
        ({"name": "qwen3-8b", "layer": 3}, "FieldUnknown", "model.layer", "a known field, as layers"),
        ({"batch": 3}, "FieldInvalid", "model", "a name, params_millions or an architecture"),
        ({"parameters": 7}, "FieldInvalid", "model.parameters", "parameters one by one, at least 100000, or"),
        (
            {"name": "qwen3-8b", "context": 1, "context_tokens": 2},
            "FieldInvalid",
            "model.context_tokens",
            "context_tok",
        ),
        (
            {"name": "qwen3-8b", "training": {"fsdp": 2, "zero_stage": 1}},
            "FieldInvalid",
            "model.training.fsdp",
            "nothing beside zero_stage",
        ),
    ],
)
def test_what_is_wrong_has_a_code_a_path_and_what_would_do(
    model: dict[str, object], code: str, path: str, expected: str
) -> None:
    """And the request's own id, so that whoever sent many knows which."""
    (line,) = size_lines([json.dumps({"id": "mine", "model": model})])
    answer = json.loads(line)
    assert (answer["line"], answer["id"], answer["error"]["code"], answer["error"]["path"]) == (1, "mine", code, path)
    assert answer["error"]["expected"].startswith(expected)


def test_it_runs_as_a_module() -> None:
    """The process itself, arguments to output."""
    done = subprocess.run(
        [sys.executable, "-m", "apportion.admission.size_command", "--file", "-", "-o", "jsonl"],
        input='{"name": "gemma-2-9b"}\n',
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["params_millions"] == 9242


def test_a_field_that_is_named_twice_is_no_answer() -> None:
    """One of the two values would be passed over, and nobody could say which was meant."""
    (line,) = size_lines(['{"model": {"name": "llama-3.1-8b", "batch": 2, "batch": 3}}'])
    assert json.loads(line) == {
        "line": 1,
        "error": {"code": "FieldInvalid", "path": "batch", "expected": "each field once", "found": "it twice"},
    }
