"""How well memory is estimated: on the rows that coefficients were fitted to, and on those that nothing was fitted to.

By source: the median and largest error of p50, the share of rows above p95, and how far p95 lies above the measured in
the median; of rows that ran out of memory, how many are said not to fit their card. "fitted" rows are what the terms in
`sizing.py` name as measured; "held out" are other rows of the same documents; "independent" another model, library and
quantiser. ``python -m bench.sizing [--rows]``.
"""

import argparse
import csv
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from apportion.admission.model_spec import parse_model
from apportion.admission.sizing import Sizing, estimate, fits

DATA: Final = Path(__file__).parents[1] / "services/admission/tests/data"
CARD_MIB: Final = {"A100-40GB": 40 * 1024, "A100-80GB": 80 * 1024, "16 GB card": 16 * 1024}


def request_of(row: dict[str, str]) -> dict[str, Any]:
    """The `model` object that a user would write for the row."""
    # "fp32/bf16 as in the example" were loaded at 32 bits: PEFT's example passes no dtype.
    dtype = "fp32" if row["dtype"].startswith("fp32") else row["dtype"]
    fields: dict[str, Any] = {"name": row["model"], "dtype": dtype, "engine": engine_of(row)}
    if row["batch"]:
        fields["batch"] = int(row["batch"])
    prompt, output = int(row.get("input_len") or 0), int((row.get("gen_len") or "0").lstrip("<="))
    if tokens := prompt + output or int(row.get("context_tokens") or 0):
        fields["context_tokens"] = tokens
    if prompt and output:
        fields["prompt_tokens"] = prompt
    if row.get("kind", "").startswith("train"):
        fields["training"] = {"method": row["kind"].removeprefix("train-")}
    if row.get("metric", "").startswith("device-wide"):
        fields["measure"] = "device"
    return fields


def engine_of(row: dict[str, str]) -> str:
    """What ran it."""
    if named := row.get("engine"):
        return named
    if "litgpt" in row["source"]:
        return "litgpt"
    return "vllm" if "vLLM" in row["source"] else "transformers"


def predicted_mib(row: dict[str, str], sizing: Sizing) -> int:
    """What the row measured: all of it, or the one part that an engine reports."""
    match row.get("kind", ""):
        case "inference-weights":
            return sizing.parts.weights
        case "inference-kv":
            return sizing.parts.kv_cache
        case _:
            return sizing.memory_mib_p50


def figures(rows: list[dict[str, str]]) -> dict[str, Any]:
    """What the rows say together."""
    errors, ratios, above, refused, out = [], [], [], 0, 0
    for row in rows:
        sizing = estimate(parse_model(request_of(row)))
        if not row["measured_mib"]:
            out += 1
            refused += not fits(sizing, CARD_MIB[row["gpu"]])
            continue
        measured = int(row["measured_mib"])
        errors.append(abs(predicted_mib(row, sizing) / measured - 1))
        ratios.append(sizing.memory_mib_p95 / measured)
        if measured > sizing.memory_mib_p95:
            above.append(row["id"])
    found: dict[str, Any] = {"rows": len(errors)}
    if errors:
        found |= {
            "p50_error_median_pct": round(100 * statistics.median(errors), 1),
            "p50_error_max_pct": round(100 * max(errors), 1),
            "above_p95_pct": round(100 * len(above) / len(errors), 1),
            "above_p95": above,
            "p95_over_measured_median": round(statistics.median(ratios), 2),
        }
    return found | ({"out_of_memory": out, "said_not_to_fit": refused} if out else {})


def measure() -> dict[str, Any]:
    """By set and source, and over each set."""
    found: dict[str, Any] = {}
    for name, file in (
        ("fitted", "vram_ground_truth.csv"),
        ("held_out", "held_out_points.csv"),
        ("independent", "independent_points.csv"),
    ):
        with (DATA / file).open(newline="") as opened:
            rows = list(csv.DictReader(opened))
        by_source: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        for row in rows:
            by_source[row["source"]].append(row)
        found[name] = {"all": figures(rows)} | {source: figures(mine) for source, mine in sorted(by_source.items())}
    return found


def main() -> None:
    """Print the figures; with ``--rows``, each held-out row beside."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="store_true")
    asked, _ = parser.parse_known_args()
    sys.stdout.write(json.dumps(measure(), indent=1) + "\n")
    if asked.rows:
        with (DATA / "held_out_points.csv").open(newline="") as opened:
            for row in csv.DictReader(opened):
                sizing = estimate(parse_model(request_of(row)))
                said = f"{row['measured_mib'] or 'OOM':>8} {sizing.memory_mib_p50:>8} {sizing.memory_mib_p95:>8}"
                sys.stdout.write(
                    f"{row['id']} {row['kind']:<11} {row['model']:<36} {row['dtype']:<9} {row['batch']} {said}\n"
                )


if __name__ == "__main__":
    main()
