"""`apportion size`: how much memory a model will need, for one model or for one a line.

`size_lines` is the whole command on lines of text; `main` wraps it in arguments and files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

import msgspec

from apportion.admission.model_spec import ModelSpecInvalid, parse_model
from apportion.admission.models import MODELS
from apportion.admission.sizing import Sizing, estimate
from apportion.contracts.causes import Refusal


def size_lines(lines: Iterable[str | bytes]) -> Iterator[str]:
    """One JSON line for each line that isn't blank: the sizing of its `model` object, or what is wrong with it.

    A line is the object itself, or a job request that holds it in `model`. A line that can't be sized gives
    `{"line": 3, "error": {"code": "FieldInvalid", "path": "model.batch", "expected": "int", "found": "8"}}`, with its
    `id` where it has one; the others are sized all the same.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield msgspec.json.encode(_answer(line, number)).decode()


def size_one(data: object) -> Sizing:
    """The sizing of one `model` object as plain data. Raises ModelSpecInvalid."""
    return estimate(parse_model(data))


def _answer(line: str | bytes, number: int) -> object:
    try:
        data = msgspec.json.decode(line)
    # A line may be no UTF-8, or be nested without end; msgspec reports both with builtin errors.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        text = line.decode(errors="replace") if isinstance(line, bytes) else line
        return _error(
            number, ModelSpecInvalid(path="", expected=f"JSON ({err})", found=text.strip()[:200], code=Refusal.NOT_JSON)
        )
    # Whoever joins answers to requests finds their own key again.
    name = {"id": data["id"]} if isinstance(data, dict) and isinstance(data.get("id"), str) else {}
    if (twice := _named_twice(line)) is not None:
        return _error(number, ModelSpecInvalid(path=twice, expected="each field once", found="it twice"), name)
    model = data.get("model", data) if isinstance(data, dict) else data
    if model is data and name:
        model = {key: value for key, value in data.items() if key != "id"}
    try:
        return {**name, **msgspec.to_builtins(size_one(model))}
    except ModelSpecInvalid as err:
        return _error(number, err, name)


def _named_twice(line: str | bytes) -> str | None:
    """A field that an object of the line has more than once: one of its values would be passed over unseen."""
    found: list[str] = []

    def seen(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        found.extend(name for name in names if names.count(name) > 1)
        return dict(pairs)

    json.loads(line, object_pairs_hook=seen)
    return found[0] if found else None


def _error(number: int, err: ModelSpecInvalid, name: dict[str, str] | None = None) -> dict[str, object]:
    said = {"code": err.code.value, "path": err.path, "expected": err.expected, "found": _shown(err.found)}
    return {"line": number, **(name or {}), "error": said}


def _shown(found: object) -> object:
    """The value as it came, if that is short and can be written as JSON; else the start of how it looks."""
    if found is None or isinstance(found, bool | float):
        return found
    if isinstance(found, int) and abs(found) < 1 << 63:
        return found
    return (found if isinstance(found, str) else repr(found))[:200]


def _model_from(arguments: argparse.Namespace) -> dict[str, object]:
    fields: dict[str, object] = {
        "name": arguments.model,
        "dtype": arguments.dtype,
        "kv_dtype": arguments.kv_dtype,
        "batch": arguments.batch,
        "context_tokens": arguments.context,
        "params_millions": arguments.params_millions,
        "tensor_parallel": arguments.tensor_parallel,
        "engine": arguments.engine,
        "measure": arguments.measure,
    }
    training = {
        "method": arguments.training,
        "optimizer": arguments.optimizer,
        "rank": arguments.rank,
        "checkpointing": arguments.checkpointing or None,
        "zero_stage": arguments.zero_stage,
        "data_parallel": arguments.data_parallel,
    }
    said = {key: value for key, value in training.items() if value is not None}
    if said:
        fields["training"] = said
    return {key: value for key, value in fields.items() if value is not None}


def _table(sizing: Sizing) -> str:
    parts = msgspec.to_builtins(sizing.parts)
    rows = [
        ("p50", sizing.memory_mib_p50),
        ("p95", sizing.memory_mib_p95),
        ("device p50", sizing.memory_mib_device),
        ("device p95", sizing.memory_mib_p95_device),
        *((f"  {name}", mib) for name, mib in parts.items() if mib),
    ]
    lines = [f"{name:<18}{mib:>10} MiB" for name, mib in rows]
    if sizing.assumed:
        lines.append(f"assumed: {', '.join(sizing.assumed)}")
    lines.append(f"method: {sizing.method}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a known model's name, as in llama-3.1-8b")
    source.add_argument("--params-millions", type=float, help="a model known by its size alone")
    source.add_argument("--file", help="JSON lines, one model object or job request a line; - reads standard input")
    source.add_argument("--list", action="store_true", help="the known models with size and source")
    parser.add_argument("--dtype", help="fp32, bf16, fp16, fp8, int8, int4, gptq-int4, awq, nf4, nf4-dq, ...")
    parser.add_argument("--kv-dtype", help="auto, bf16, fp8, int8, int4")
    parser.add_argument("--batch", type=int, help="sequences at once on one device")
    parser.add_argument("--context", type=int, help="tokens of a sequence, prompt and output")
    parser.add_argument("--training", help="none, full, lora, qlora")
    parser.add_argument("--optimizer", help="adamw, adamw-8bit, lion, adafactor, sgd, sgd-momentum")
    parser.add_argument("--rank", type=int, help="LoRA rank")
    parser.add_argument("--checkpointing", action="store_true", help="activations are recomputed")
    parser.add_argument("--zero-stage", type=int, help="0 to 3; FSDP's full sharding is 3")
    parser.add_argument("--data-parallel", type=int, help="devices that share what the stage shards")
    parser.add_argument("--tensor-parallel", type=int, help="devices that share each matrix")
    parser.add_argument("--engine", help="transformers, vllm, litgpt, sglang, tgi, other")
    parser.add_argument("--measure", help="what p50 counts: allocator (tensors) or device (with the context)")
    parser.add_argument("-o", "--output", choices=("text", "table", "json", "jsonl"), default="text")


def run(arguments: argparse.Namespace, *, out: TextIO, err: TextIO, stdin: Iterable[str]) -> int:
    """The exit status: 0, or 2 where something couldn't be sized."""
    if arguments.list:
        rows = sorted(MODELS, key=lambda model: model.name)
        if arguments.output in {"text", "table"}:
            out.writelines(f"{row.name:<32}{row.params_millions:>9} M  {row.source}\n" for row in rows)
        elif arguments.output == "jsonl":
            out.writelines(msgspec.json.encode(row).decode() + "\n" for row in rows)
        else:
            out.write(msgspec.json.encode({"schema": "apportion.models/1", "models": rows}).decode() + "\n")
        return 0
    if arguments.file is not None:
        if arguments.file == "-":
            return _write_lines(size_lines(stdin), out)
        try:
            # Bytes: one line that isn't UTF-8 is one error, not the end of the file.
            with open(arguments.file, "rb") as lines:  # noqa: PTH123 # a name as the user typed it
                return _write_lines(size_lines(lines), out)
        except OSError as error:
            err.write(f"{arguments.file}: {error.strerror}\n")
            return 2
    try:
        sizing = size_one(_model_from(arguments))
    except ModelSpecInvalid as error:
        err.write(f"{error}\n")
        return 2
    out.write(_table(sizing) if arguments.output in {"text", "table"} else msgspec.json.encode(sizing).decode())
    out.write("\n")
    return 0


def _write_lines(answers: Iterator[str], out: TextIO) -> int:
    status = 0
    for answer in answers:
        out.write(answer + "\n")
        if answer.startswith('{"line":'):
            status = 2
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on these arguments."""
    parser = argparse.ArgumentParser(prog="apportion size", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv), out=sys.stdout, err=sys.stderr, stdin=sys.stdin)


if __name__ == "__main__":
    sys.exit(main())
