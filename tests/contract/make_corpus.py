"""Hostile messages with the answers that they must get; ``python -m tests.contract.make_corpus`` writes the files.

Answers are written here by hand, from the contract: none is copied from what the code says. The files are what tests
and other implementations read; this script keeps families of them in one line each.
"""

# ruff: noqa: RUF001 - look-alikes of other scripts are what some cases are about
import base64
import json
import zlib
from collections.abc import Iterator
from typing import Any

from tests.contract.judge import CORPUS

SUBJECT = "apportion.v1.main.wish.acme.JobRequested"
TYPE = "io.apportion.JobRequested.v1"
INLINE_MAX = 2048

FIELD_INVALID = "FieldInvalid"


def wish(kind: str, tenant: str = "acme") -> str:
    return f"apportion.v1.main.wish.{tenant}.{kind}"


def request(**changes: Any) -> dict[str, Any]:
    """A request that is admitted, changed at its top."""
    base: dict[str, Any] = {
        "queue": "main",
        "workload": {"command": ["/bin/true"]},
        "resources": {"gpu_milli": 250, "gpu_memory_mib": 4096},
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def at(path: str, value: Any) -> dict[str, Any]:
    """A request with one value set, however deep: ``workload.env.A``."""
    doc = json.loads(json.dumps(request()))
    *steps, last = path.split(".")
    node = doc
    for step in steps:
        node = node.setdefault(step, {})
    node[last] = value
    return doc  # type: ignore[no-any-return]


def raw(path: str, literal: str) -> str:
    """A request as text with one value written exactly so."""
    return text(at(path, "\u0001here\u0001")).replace('"\\u0001here\\u0001"', literal)


def text(doc: Any) -> str:
    return json.dumps(doc, ensure_ascii=False, separators=(",", ":"))


def binary(**changes: str | None) -> dict[str, str]:
    """Headers of binary mode; ``None`` leaves one out."""
    base: dict[str, str | None] = {
        "ce-specversion": "1.0",
        "ce-id": "e-1",
        "ce-source": "/acme/ci",
        "ce-type": TYPE,
    }
    changed = {f"ce-{name}": value for name, value in changes.items()}
    return {name: value for name, value in {**base, **changed}.items() if value is not None}


def event(data: Any = None, **changes: Any) -> dict[str, Any]:
    """A structured CloudEvent."""
    base = {"specversion": "1.0", "id": "e-1", "source": "/acme/ci", "type": TYPE, "data": data or request()}
    return {name: value for name, value in {**base, **changes}.items() if value is not ...}


STRUCTURED = {"Content-Type": "application/cloudevents+json"}

ADMITTED = {"verdict": "admitted"}
DUPLICATE = {"verdict": "duplicate"}
DONE = {"verdict": "done"}


def rejected(code: str, field: str = "") -> dict[str, str]:
    return {"verdict": "rejected", "code": code, **({"field": field} if field else {})}


Body = str | bytes | dict[str, Any] | list[Any] | None


def message(body: Body, headers: dict[str, str] | None = None, subject: str = SUBJECT) -> dict[str, Any]:
    data = body if isinstance(body, bytes) else (body if isinstance(body, str) else text(body)).encode("utf-8")
    sent: dict[str, Any] = {"subject": subject}
    if headers is None:
        headers = binary()
    if headers:
        sent["headers"] = headers
    if len(data) > INLINE_MAX:
        return {**sent, "body_zlib": base64.b64encode(zlib.compress(data, 9)).decode()}
    try:
        return {**sent, "body": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {**sent, "body_base64": base64.b64encode(data).decode()}


def case(
    name: str,
    body: Body,
    expected: dict[str, str],
    *,
    headers: dict[str, str] | None = None,
    subject: str = SUBJECT,
    before: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    made = {"name": name, **message(body, headers, subject), "expected": expected}
    return {**made, "before": list(before)} if before else made


# --------------------------------------------------------------------------------------------------------------------


def json_text() -> Iterator[dict[str, Any]]:
    """Bytes that are no JSON, or JSON that readers differ over."""
    good = text(request())
    not_json = rejected("NotJson")
    yield case("the request that the others are made from", good, ADMITTED)
    yield case("empty", b"", not_json)
    yield case("blank", b" \t\r\n ", not_json)
    for cut in (1, 2, 9, 15, 30, 45, 60, 90, len(good) - 1):
        yield case(f"truncated after {cut} bytes", good[:cut], not_json)
    yield case("byte order mark", b"\xef\xbb\xbf" + good.encode(), not_json)
    yield case("trailing word", good + " x", not_json)
    yield case("trailing object", good + "{}", not_json)
    yield case("trailing NUL", good + "\x00", not_json)
    yield case("trailing brace", good + "}", not_json)
    yield case("surrounding space is JSON", f" \r\n\t{good}\n\n", ADMITTED)
    yield case("form feed is no JSON space", "\f" + good, not_json)
    yield case("no-break space is no JSON space", "\u00a0" + good, not_json)
    yield case("trailing comma", good[:-1] + ",}", not_json)
    yield case("single quotes", good.replace('"', "'"), not_json)
    yield case("comment", "/* a job */" + good, not_json)
    yield case("unquoted name", good.replace('"queue"', "queue"), not_json)
    yield case("missing colon", good.replace(":", "", 1), not_json)
    for name, body in (
        ("array", "[]"),
        ("array around the request", f"[{good}]"),
        ("text", '"JobRequested"'),
        ("number", "7"),
        ("null", "null"),
        ("true", "true"),
        ("bare word", "submit"),
        ("XML", "<job/>"),
        ("YAML", "queue: main"),
        ("two lines of JSON", f"{good}\n{good}"),
    ):
        yield case(f"top level: {name}", body, not_json)
    for name, body_bytes in (
        ("UTF-16", good.encode("utf-16-le")),
        ("UTF-32", good.encode("utf-32-le")),
    ):
        yield case(name, body_bytes, not_json)
    yield case("UTF-16 with its mark", good.encode("utf-16"), rejected("NotUtf8"))
    for name, piece in (
        ("0xff", b"\xff"),
        ("overlong NUL", b"\xc0\x80"),
        ("overlong slash", b"\xe0\x80\xaf"),
        ("encoded surrogate", b"\xed\xa0\x80"),
        ("beyond Unicode", b"\xf4\x90\x80\x80"),
        ("half a character", b"\xe2\x82"),
        ("lone continuation", b"\x80"),
        ("Latin-1", b"\xe9"),
    ):
        inside = good.encode().replace(b"/bin/true", b"/bin/" + piece)
        yield case(f"invalid UTF-8: {name}", inside, rejected("NotUtf8"))
    yield case("invalid UTF-8 in a name", good.encode().replace(b"queue", b"que\xffue"), rejected("NotUtf8"))
    for name, escape in (
        ("high", "\\ud800"),
        ("low", "\\udc00"),
        ("reversed", "\\udc00\\ud800"),
        ("high twice", "\\ud800\\ud800"),
        ("upper case", "\\uD800x"),
    ):
        yield case(
            f"lone surrogate: {name}",
            raw("workload.command", f'["/bin/{escape}"]'),
            rejected("NotJson", "workload.command[0]"),
        )
    yield case("lone surrogate in a name", good[:-1] + ',"\\ud800":1}', not_json)
    yield case("a pair of surrogates is one character", raw("workload.command", '["/bin/\\ud83d\\ude00"]'), ADMITTED)
    for name, escape in (("x", "\\x41"), ("short", "\\u12"), ("no hex", "\\u00zz"), ("unknown", "\\q"), ("open", "\\")):
        yield case(f"invalid escape: {name}", raw("workload.command", f'["{escape}"]'), not_json)
    for name, char in (("newline", "\n"), ("tab", "\t"), ("NUL", "\x00"), ("escape", "\x1b")):
        yield case(f"unescaped {name} in text", raw("workload.command", f'["a{char}b"]'), not_json)


def repeated_names() -> Iterator[dict[str, Any]]:
    """A name that occurs twice: readers differ over which one counts, and so over what was asked."""
    good = text(request())
    twice = "FieldConflict"
    yield case("queue twice", good[:-1] + ',"queue":"theirs"}', rejected(twice, "queue"))
    yield case("queue twice, alike", good[:-1] + ',"queue":"main"}', rejected(twice, "queue"))
    yield case("resources twice", good[:-1] + ',"resources":{"gpu":8}}', rejected(twice, "resources"))
    yield case("spelled with an escape", good[:-1] + ',"\\u0071ueue":"theirs"}', rejected(twice, "queue"))
    yield case("type twice", '{"type":"JobRequested.v1","type":"JobRequested.v1",' + good[1:], rejected(twice, "type"))
    yield case("in an object within", raw("resources", '{"gpu":1,"gpu":8}'), rejected(twice, "resources.gpu"))
    yield case("variable twice", raw("workload.env", '{"A":"1","A":"2"}'), rejected(twice, "workload.env.A"))
    yield case("label twice", raw("labels", '{"a":"1","a":"1"}'), rejected(twice, "labels.a"))
    yield case("unknown field twice", good[:-1] + ',"x":1,"x":2}', rejected(twice, "x"))
    yield case(
        "in an array", raw("depends_on", '[{"job_id":"a","job_id":"b"}]'), rejected(twice, "depends_on[0].job_id")
    )
    yield case(
        "data twice in a structured event",
        text(event())[:-1] + f',"data":{text(request(queue="theirs"))}}}',
        rejected(twice, "data"),
        headers=STRUCTURED,
    )
    yield case(
        "id twice in a structured event",
        text(event())[:-1] + ',"id":"other"}',
        rejected(twice, "id"),
        headers=STRUCTURED,
    )
    yield case("the same name in different objects is no repeat", at("resources.memory_mib", 100), ADMITTED)


def sizes() -> Iterator[dict[str, Any]]:
    """Too much of something."""
    good = text(request())
    limit = 64 * 1024
    yield case("64 KiB", good.ljust(limit), ADMITTED)
    yield case("64 KiB and a byte", good.ljust(limit + 1), rejected("TooLarge"))
    yield case("256 KiB and a byte", good.ljust(256 * 1024 + 1), rejected("TooLarge"))
    yield case("200,000 arrays in each other", "[" * 200_000, rejected("TooLarge"))
    for name, body in (
        ("30,000 arrays", "[" * 30_000),
        ("30,000 closed arrays", "[" * 30_000 + "]" * 30_000),
        ("10,000 objects", '{"a":' * 10_000 + "1" + "}" * 10_000),
        ("33 levels", good[:-1] + ',"x":' + "[" * 32 + "]" * 32 + "}"),
        ("arrays behind brackets in text", '{"queue":"]]]]","x":' + "[" * 40 + "]" * 40 + "}"),
        ("arrays behind an open text", '{"a":"\\"' + "[" * 5 + '","x":' + "[" * 40),
    ):
        yield case(name, body, rejected("TooDeep"))
    yield case(
        "32 levels of an unknown field", good[:-1] + ',"x":' + "[" * 31 + "]" * 31 + "}", rejected("FieldUnknown", "x")
    )
    yield case("brackets in text are no levels", at("workload.command", ["/bin/echo", "[" * 100]), ADMITTED)
    yield case("1,000 brackets in text", at("workload.command", ["/bin/echo", "[{" * 500]), ADMITTED)
    for count, expected in ((256, ADMITTED), (257, rejected(FIELD_INVALID, "workload.command"))):
        yield case(f"{count} arguments", at("workload.command", ["a"] * count), expected)
    for count, expected in ((8192, ADMITTED), (8193, rejected(FIELD_INVALID, "workload.command[1]"))):
        yield case(f"argument of {count} characters", at("workload.command", ["a", "b" * count]), expected)
    for count, expected in (
        (128, ADMITTED),
        (129, rejected(FIELD_INVALID, "workload.env")),
        (4000, rejected(FIELD_INVALID, "workload.env")),
        (10_000, rejected("TooLarge")),
    ):
        yield case(f"{count} variables", at("workload.env", {f"V{i}": "x" for i in range(count)}), expected)
    for count, expected in ((32, ADMITTED), (33, rejected(FIELD_INVALID, "labels"))):
        yield case(f"{count} labels", at("labels", {f"l{i}": "x" for i in range(count)}), expected)
        yield case(
            f"{count} annotations",
            at("annotations", {f"l{i}": "x" for i in range(count)}),
            ADMITTED if expected is ADMITTED else rejected(FIELD_INVALID, "annotations"),
        )
    for count, expected in ((1024, ADMITTED), (1025, rejected(FIELD_INVALID, "labels.a"))):
        yield case(f"label of {count} characters", at("labels", {"a": "x" * count}), expected)
    for count, expected in ((63, ADMITTED), (64, rejected(FIELD_INVALID, "job_id"))):
        yield case(f"job id of {count} characters", request(job_id="a" * count), expected)
    yield case("queue of 60,000 characters", request(queue="a" * 60_000), rejected(FIELD_INVALID, "queue"))
    yield case(
        "33 device models",
        at("resources.device", {"models": [f"m{i}" for i in range(33)]}),
        rejected(FIELD_INVALID, "resources.device.models"),
    )
    yield case("unknown field with a long name", request(**{"x" * 5000: 1}), rejected("FieldUnknown", "x" * 128 + "…"))


INTS = {
    "priority": (0, 1000),
    "min_runtime_s": (0, 2_147_483_647),
    "time_limit_s": (1, 2_147_483_647),
    "max_wait_s": (0, 2_147_483_647),
    "grace_s": (0, 3600),
    "gang.size": (1, 1024),
    "retry.limit": (0, 100),
    "retry.backoff_s": (0, 86_400),
    "resources.gpu": (1, 1024),
    "resources.gpu_milli": (1, 1000),
    "resources.gpu_memory_mib": (1, 2_147_483_647),
    "resources.cpu_milli": (0, 2_147_483_647),
    "resources.memory_mib": (0, 2_147_483_647),
    "model.params_millions": (1, 2_147_483_647),
}


def numbers() -> Iterator[dict[str, Any]]:
    """Values that are no whole number, or one that is out of range."""
    for path, (low, high) in INTS.items():
        invalid = rejected(FIELD_INVALID, path)
        for literal in (str(low - 1), str(high + 1), "1.0", "true", '"1"'):
            yield case(f"{path}: {literal}", raw(path, literal), invalid)
    gpu = rejected(FIELD_INVALID, "resources.gpu")
    for literal in ("-1", "9223372036854775807", "9223372036854775808", "18446744073709551616", "-0", "-0 ", "-0.0"):
        yield case(f"resources.gpu: {literal}", raw("resources.gpu", literal), gpu)
    for literal in ("1e0", "1E3", "1e999", "-1e999", "0.5", "1e-400", "[1]", "{}", "[]", '""', '"NaN"', "false"):
        yield case(f"resources.gpu: {literal}", raw("resources.gpu", literal), gpu)
    yield case("resources.gpu: 5,000 digits", raw("resources.gpu", "9" * 5000), gpu)
    yield case(
        "priority: 5,000 digits behind a sign", raw("priority", "-" + "1" * 5000), rejected(FIELD_INVALID, "priority")
    )
    yield case("priority: -0, where 0 is a value", raw("priority", "-0"), rejected(FIELD_INVALID, "priority"))
    yield case("-0 in text is text", at("workload.command", ["/bin/echo", "-0,", "a -0 ]"]), ADMITTED)
    for literal in ("NaN", "Infinity", "-Infinity", "01", "+1", "0x10", "1.", ".5", "1_000", "--1", "1e", "\u0661"):
        yield case(f"resources.gpu: {literal}", raw("resources.gpu", literal), rejected("NotJson"))
    yield case("null is as good as nothing where that is allowed", at("priority", None), ADMITTED)
    yield case("null where something is needed", at("gang.size", None), rejected(FIELD_INVALID, "gang.size"))
    yield case("preemptible: 1", at("preemptible", 1), rejected(FIELD_INVALID, "preemptible"))
    yield case('preemptible: "true"', at("preemptible", "true"), rejected(FIELD_INVALID, "preemptible"))
    yield case("priority: 0", at("priority", 0), ADMITTED)


CONTROLS = {
    "NUL": "\x00",
    "newline": "\n",
    "carriage return": "\r",
    "ANSI colour": "\x1b[31m",
    "right-to-left override": "\u202e",
    "isolate": "\u2066",
    "line separator": "\u2028",
    "C1 control": "\x9b31m",
    "DEL": "\x7f",
}
TEXTS = {
    "queue": "main",
    "job_id": "train",
    "job_set": "set",
    "tenant": "acme",
    "idempotency_key": "key",
    "external_uri": "https://example.org/",
    "not_before": "2026-09-01T12:00:00Z",
    "deadline": "2027-09-01T12:00:00Z",
    "labels.team": "vision",
    "annotations.note": "a",
    "workload.image": "registry/image",
    "resources.mig_profile": "1g.10gb",
    "model.name": "llama",
    "placement.site": "north",
}


def controls() -> Iterator[dict[str, Any]]:
    """Characters that hide or change what a person reads, or end a line where no line ends."""
    for path, value in TEXTS.items():
        for name, char in CONTROLS.items():
            yield case(f"{path}: {name} at the end", at(path, value + char), rejected(FIELD_INVALID, path))
    for name, char in CONTROLS.items():
        is_refused = name == "NUL"
        yield case(
            f"argument: {name}",
            at("workload.command", ["/bin/echo", f"a{char}b"]),
            rejected(FIELD_INVALID, "workload.command[1]") if is_refused else ADMITTED,
        )
        yield case(
            f"variable's value: {name}",
            at("workload.env", {"FINE": "x", "BAD": f"a{char}b"}),
            rejected(FIELD_INVALID, "workload.env.BAD") if is_refused else ADMITTED,
        )
    yield case("mount: newline", at("workload.mounts", ["/a\n/b"]), rejected(FIELD_INVALID, "workload.mounts[0]"))
    yield case("label's key: NUL", at("labels", {"a\x00": "x"}), rejected(FIELD_INVALID, "labels.a\\u0000"))
    yield case("label's key: space", at("labels", {"a b": "x"}), rejected(FIELD_INVALID, "labels.a b"))
    yield case("label's key: empty", at("labels", {"": "x"}), rejected(FIELD_INVALID, "labels."))
    yield case("label's key: HTML", at("labels", {"<b>": "x"}), rejected(FIELD_INVALID, "labels.<b>"))
    yield case("unknown field: escape", request(**{"\x1b[2J": 1}), rejected("FieldUnknown", "\\u001b[2J"))
    yield case("unknown field: Cyrillic", {**request(), "queuе": "main"}, rejected("FieldUnknown", "queu\\u0435"))
    yield case(
        "variable's name: equals sign", at("workload.env", {"A=B": "x"}), rejected(FIELD_INVALID, "workload.env.A=B")
    )
    yield case("variable's name: empty", at("workload.env", {"": "x"}), rejected(FIELD_INVALID, "workload.env."))
    yield case(
        "variable's name: digit first", at("workload.env", {"1A": "x"}), rejected(FIELD_INVALID, "workload.env.1A")
    )
    yield case("HTML in a label is text", at("labels", {"a": "<script>alert(1)</script>"}), ADMITTED)
    yield case("a formula in a label is text", at("labels", {"a": "=cmd|' /C calc'!A0"}), ADMITTED)
    yield case("HTML in a queue", request(queue="<b>main</b>"), rejected(FIELD_INVALID, "queue"))
    yield case("a formula in a job's name", request(job_id="=1+1"), rejected(FIELD_INVALID, "job_id"))
    yield case("a formula in an idempotency key is text", request(idempotency_key="=1+1"), ADMITTED)
    yield case("other scripts are text", at("labels", {"a": "Проект 計画 مشروع 🚀"}), ADMITTED)


def subjects() -> Iterator[dict[str, Any]]:
    """Subjects that are none of ours, or name a tenant that is none."""
    good = request()
    unknown = rejected("TenantUnknown")
    for tenant in (
        "acme\n",
        "ACME",
        "аcme",
        "*",
        ">",
        "$JS",
        "nobody",
        "acme ",
        " acme",
        "acme/x",
        "a" * 10_000,
        "\x1b[2J",
        "acme\x00",
    ):
        name = tenant if len(tenant) < 100 else f"{len(tenant)} characters"
        yield case(f"tenant {name!a}", good, unknown, subject=wish("JobRequested", tenant))
    yield case("empty tenant", good, unknown, subject=wish("JobRequested", ""))
    yield case("the operator asks for a job", good, unknown, subject=wish("JobRequested", "_operator"))
    strange = rejected("TypeUnknown", "subject")
    for subject in (
        "",
        ".",
        "x",
        "apportion",
        "apportion.v1.main.wish",
        "apportion.v1.main.wish.acme",
        "apportion.v2.main.wish.acme.JobRequested",
        "apportion.v1.main.fact.acme.JobRequested",
        "$JS.API.STREAM.DELETE.APPORTION_MAIN_WISHES",
        "apportion.v1.main.wish...JobRequested",
        "apportion.v1.main.wish.acme.",
        "apportion.v1.main.wish.acme.JobRequested.extra",
        "apportion.v1.main.wish.acme.jobrequested",
        "apportion.v1.main.wish.acme.JobRequested\n",
        "apportion.v1.main.wish.acme.JobRequested.v1",
        "apportion.v1.main.wish.acme.JobAdmitted",
        "apportion.v1.main.wish.acme.*",
        "apportion.v1.main.wish.acme.>",
        "apportion.v1.main.wish.acme." + "x" * 10_000,
        "x" * 10_000,
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ):
        name = subject if len(subject) < 100 else f"{len(subject)} characters"
        yield case(f"subject {name!a}", good, strange, subject=subject)
    yield case("the body names another tenant", request(tenant="beta"), rejected("TenantMismatch", "tenant"))
    yield case("the body names the same tenant", request(tenant="acme"), ADMITTED)
    yield case("another tenant's queue", request(queue="theirs"), rejected("QueueNotFound", "queue"))
    yield case("a queue that isn't there", request(queue="gone"), rejected("QueueNotFound", "queue"))


def names() -> Iterator[dict[str, Any]]:
    """Ids that are paths, options, or look like other ids."""
    for name in (
        "../etc/passwd",
        "..",
        ".",
        "/etc/passwd",
        "-rf",
        "--help",
        "%2e%2e",
        "a/b",
        "a\\b",
        "a.b",
        "a b",
        "",
        "Train",
        "trаin",
        "a*",
        "a>",
        "$HOME",
        "`id`",
        "$(id)",
        "a;b",
        "a|b",
        "a\u200bb",
        "é",
        "_a",
        "a-",
        "a_",
        "NUL:",
        "~",
    ):
        yield case(f"job id {name!a}", request(job_id=name), rejected(FIELD_INVALID, "job_id"))
    yield case("job id con is a name", request(job_id="con"), ADMITTED)
    yield case("job id 0 is a name", request(job_id="0"), ADMITTED)
    yield case(
        "a job id that was used",
        request(job_id="train", priority=1),
        rejected("JobIdTaken", "job_id"),
        headers=binary(id="e-2"),
        before=(message(request(job_id="train")),),
    )
    yield case(
        "another tenant's job id is free",
        request(job_id="train", queue="theirs"),
        ADMITTED,
        subject=wish("JobRequested", "beta"),
        before=(message(request(job_id="train")),),
    )
    for image in (
        "-v /:/host image",
        "--privileged",
        "image --gpus all",
        "image;id",
        "image\n--rm",
        "",
        "Image",
        "../image",
    ):
        yield case(f"image {image!a}", at("workload.image", image), rejected(FIELD_INVALID, "workload.image"))
    yield case(
        "an image, which nobody can start yet",
        at("workload.image", "registry/a:1"),
        rejected("NotSupported", "workload.image"),
    )
    for link in (
        "javascript:alert(1)",
        "JavaScript:alert(1)",
        "data:text/html,x",
        "ftp://example.org/",
        "//example.org",
        "https://",
        "https://a b",
        'https://a"b',
        "https://a<b",
        "http:/a",
        "file:///etc/passwd",
        "https://пример.рф/",
        " https://a",
    ):
        yield case(f"link {link!a}", request(external_uri=link), rejected(FIELD_INVALID, "external_uri"))
    yield case("a link", request(external_uri="https://ci.example.org/jobs/7?a=b&c=%20#x"), ADMITTED)
    for profile in ("8g.10gb", "1g.10GB", "1g", "1g.10gb+gfx", "all"):
        yield case(
            f"MIG profile {profile}",
            at("resources.mig_profile", profile),
            rejected(FIELD_INVALID, "resources.mig_profile"),
        )


def envelopes() -> Iterator[dict[str, Any]]:
    """Envelopes in each mode, whole and broken."""
    good = request()

    def bad(field: str) -> dict[str, str]:
        return rejected("EnvelopeInvalid", field)

    yield case("binary", good, ADMITTED)
    yield case(
        "binary, with the content type",
        good,
        ADMITTED,
        headers={**binary(), "Content-Type": "application/json; charset=utf-8"},
    )
    yield case("headers in upper case", good, ADMITTED, headers={k.upper(): v for k, v in binary().items()})
    yield case("headers in title case", good, ADMITTED, headers={k.title(): v for k, v in binary().items()})
    yield case("structured", event(), ADMITTED, headers=STRUCTURED)
    yield case(
        "structured, in upper case with a parameter",
        event(),
        ADMITTED,
        headers={"CONTENT-TYPE": "Application/CloudEvents+JSON; charset=UTF-8"},
    )
    yield case("bare", event(), ADMITTED, headers={})
    yield case("the request alone", good, ADMITTED, headers={})
    yield case("the request alone, with foreign headers", good, ADMITTED, headers={"X-Trace": "1", "Nats-Msg-Id": "a"})
    yield case(
        "structured, data as base64",
        event(data=..., data_base64=base64.b64encode(text(good).encode()).decode()),
        ADMITTED,
        headers=STRUCTURED,
    )
    yield case(
        "structured, with extensions",
        event(correlationid="a", sequence="1", rank=1, ok=True),
        ADMITTED,
        headers=STRUCTURED,
    )
    yield case("structured, null attributes", event(subject=None, expirytime=None), ADMITTED, headers=STRUCTURED)
    yield case("structured, copied to headers", event(), ADMITTED, headers={**STRUCTURED, **binary()})
    for name in ("specversion", "id", "source", "type"):
        yield case(f"binary without {name}", good, bad(f"ce-{name}"), headers=binary(**{name: None}))
        yield case(f"binary with empty {name}", good, bad(f"ce-{name}"), headers=binary(**{name: ""}))
        yield case(f"structured with null {name}", event(**{name: None}), bad(name), headers=STRUCTURED)
        yield case(f"structured with numeric {name}", event(**{name: 1}), bad(name), headers=STRUCTURED)
        if name != "specversion":
            yield case(f"structured without {name}", event(**{name: ...}), bad(name), headers=STRUCTURED)
            yield case(f"bare without {name}", event(**{name: ...}), bad(name), headers={})
    yield case("structured without specversion", event(specversion=...), bad("specversion"), headers=STRUCTURED)
    for version in ("0.3", "1.1", "2.0", "1", "1.0 ", "１.０"):
        yield case(f"binary of version {version!a}", good, bad("ce-specversion"), headers=binary(specversion=version))
        yield case(
            f"structured of version {version!a}", event(specversion=version), bad("specversion"), headers=STRUCTURED
        )
    for name in ("id", "source", "type", "specversion"):
        twice = {**binary(), f"CE-{name.title()}": binary()[f"ce-{name}"]}
        yield case(f"two spellings of {name}", good, bad(f"ce-{name}"), headers=twice)
    yield case(
        "two spellings of an extension", good, bad("ce-team"), headers={**binary(), "ce-team": "a", "Ce-Team": "b"}
    )
    yield case(
        "two spellings of the content type",
        good,
        bad("content-type"),
        headers={**binary(), "Content-Type": "application/json", "content-type": "application/json"},
    )
    for kind in (
        "application/cloudevents-batch+json",
        "application/cloudevents+avro",
        "application/cloudevents",
        "application/cloudevents+xml",
    ):
        yield case(f"content type {kind}", event(), bad("content-type"), headers={"content-type": kind})
    for kind in ("text/plain", "application/xml", "application/octet-stream", "image/png"):
        yield case(f"binary of {kind}", good, bad("content-type"), headers={**binary(), "content-type": kind})
    yield case("the request alone, of text/plain", good, bad("content-type"), headers={"content-type": "text/plain"})
    yield case(
        "structured data of text/plain", event(datacontenttype="text/plain"), bad("datacontenttype"), headers=STRUCTURED
    )
    # Both modes at once.
    for name in ("id", "source", "type"):
        yield case(
            f"structured, and another {name} in headers",
            event(),
            bad(f"ce-{name}"),
            headers={**STRUCTURED, **binary(**{name: "other"})},
        )
    yield case(
        "structured, and an expiry in headers alone",
        event(),
        bad("ce-expirytime"),
        headers={**STRUCTURED, "ce-expirytime": "2020-01-01T00:00:00Z"},
    )
    yield case("binary headers around a structured body", event(), rejected("FieldUnknown", "specversion"))
    # Data.
    yield case("structured without data", event(data=...), bad("data"), headers=STRUCTURED)
    yield case(
        "structured with null data",
        event(data_base64=None, data=None) | {"data": None},
        bad("data"),
        headers=STRUCTURED,
    )
    yield case("structured with both kinds of data", event(data_base64="e30="), bad("data_base64"), headers=STRUCTURED)
    strange: tuple[Any, ...] = ("e30", "****", "e30=\n", 7, {}, "é")
    for encoded in strange:
        yield case(
            f"structured with base64 {encoded!a}",
            event(data=..., data_base64=encoded),
            bad("data_base64"),
            headers=STRUCTURED,
        )
    yield case("structured with data as text", event(data=text(good)), rejected("NotJson"), headers=STRUCTURED)
    yield case("structured with data as an array", event(data=[good]), rejected("NotJson"), headers=STRUCTURED)
    yield case("structured with an empty body", b"", rejected("NotJson"), headers=STRUCTURED)
    yield case("structured with an array of events", [event()], rejected("NotJson"), headers=STRUCTURED)
    yield case(
        "structured, with an unknown field in the data",
        event(data=request(gpus=1)),
        rejected("FieldUnknown", "gpus"),
        headers=STRUCTURED,
    )
    yield case(
        "structured, the request beside its attributes",
        {**event(data=...), **good},
        bad("workload"),
        headers=STRUCTURED,
    )
    yield case(
        "structured, attribute in camel case",
        event(expiryTime="2020-01-01T00:00:00Z"),
        bad("expiryTime"),
        headers=STRUCTURED,
    )
    yield case("structured, attribute with an object", event(team={"a": 1}), bad("team"), headers=STRUCTURED)
    yield case(
        "structured, attribute with 5,000 levels",
        text(event())[:-1] + ',"x":' + "[" * 5000 + "]" * 5000 + "}",
        rejected("TooDeep"),
        headers=STRUCTURED,
    )
    yield case("structured, NUL in the id", event(id="a\x00"), bad("id"), headers=STRUCTURED)
    yield case("structured, newline in the source", event(source="/a\n"), bad("source"), headers=STRUCTURED)
    yield case("structured, override in the type", event(type=TYPE + "\u202e"), bad("type"), headers=STRUCTURED)
    # By reference: nothing is ever fetched.
    bomb = "https://example.org/42.zip"
    yield case("data by reference, binary", good, rejected("NotSupported", "ce-dataref"), headers=binary(dataref=bomb))
    yield case(
        "data by reference, structured",
        event(data=..., dataref=bomb),
        rejected("NotSupported", "dataref"),
        headers=STRUCTURED,
    )


def header_values() -> Iterator[dict[str, Any]]:
    """What headers may hold: percent-encoding, quotes, and what would end a line."""
    good = request()
    for value in (
        "a%20b",
        "%C3%A9",
        "%E4%BD%A0",
        "%F0%9F%98%80",
        '"quoted"',
        '"a\\"b"',
        "100%25",
        "%",
        "a%zz",
        "é",
        "a%2Fb",
        "%22",
    ):
        yield case(f"id {value!a}", good, ADMITTED, headers=binary(id=value))
    for value in (
        "%C0%A0",
        "%FF",
        "%ED%A0%80",
        "%E4%BD",
        "%80",
        "%00",
        "a%0d%0aNats-Msg-Id: x",
        "a%0A",
        "a\r\nce-type: x",
        "a\nb",
        "a\x00b",
        "%1b[31m",
        "%E2%80%AE",
        "%EF%BF%BF",
        "a" * 1025,
        "\x7f",
        "%C2%85",
        '"a%0a"',
    ):
        name = value if len(value) < 100 else f"{len(value)} characters"
        yield case(f"id {name!a}", good, rejected("EnvelopeInvalid", "ce-id"), headers=binary(id=value))
    yield case(
        "percent-encoding is undone once",
        good,
        DUPLICATE,
        headers=binary(id="a%2520b"),
        before=(message(good, binary(id='"a%2520b"')),),
    )
    yield case(
        "one id in two encodings is one id",
        good,
        DUPLICATE,
        headers=binary(id="%61%20b"),
        before=(message(good, binary(id="a b")),),
    )
    for name in ("source", "type", "actor", "expirytime"):
        yield case(
            f"newline in {name}", good, rejected("EnvelopeInvalid", f"ce-{name}"), headers=binary(**{name: "a%0ab"})
        )
    yield case("newline in an attribute that means nothing here", good, ADMITTED, headers=binary(team="a%0ab"))
    yield case("a header's name with a line in it", good, ADMITTED, headers={**binary(), "ce-x\r\nce-id": "other"})
    yield case("an actor that claims to be the operator", good, ADMITTED, headers=binary(actor="operator"))
    yield case(
        "a broken trace context is as good as none", good, ADMITTED, headers={**binary(), "traceparent": "00-zz"}
    )
    yield case(
        "a trace context of 5,000 characters",
        good,
        rejected("EnvelopeInvalid", "traceparent"),
        headers={**binary(), "traceparent": "0" * 5000},
    )


def types() -> Iterator[dict[str, Any]]:
    """Types that don't exist, not yet, or not here."""
    good = request()
    for value, code in (
        ("io.apportion.JobRequested.v2", "TypeUnknown"),
        ("io.apportion.JobRequested.v0", "TypeUnknown"),
        ("io.apportion.JobRequested", "TypeUnknown"),
        ("io.apportion.JobRequested.v1.v1", "TypeUnknown"),
        ("io.apportion.jobrequested.v1", "TypeMismatch"),
        ("io.apportion.JobCancelRequested.v1", "TypeMismatch"),
        ("io.apportion.JobAdmitted.v1", "TypeMismatch"),
        ("com.example.JobRequested.v1", "TypeMismatch"),
        ("io.apportion.", "TypeMismatch"),
        ("x", "TypeMismatch"),
    ):
        expected = ADMITTED if value == "io.apportion." else rejected(code, "type")
        yield case(f"type {value}", good, expected, headers=binary(type=value))
        yield case(f"structured type {value}", event(type=value), expected, headers=STRUCTURED)
    yield case("type without its prefix", good, ADMITTED, headers=binary(type="JobRequested.v1"))
    yield case("the body says the same type", {"type": "JobRequested.v1", **good}, ADMITTED)
    yield case("the body says another version", {"type": "JobRequested.v2", **good}, rejected("TypeUnknown", "type"))
    yield case("the body says another type", {"type": "JobAdmitted.v1", **good}, rejected("TypeMismatch", "type"))
    yield case("the body's type is a number", {"type": 1, **good}, rejected("TypeMismatch", "type"))
    yield case("v1 with a field of a later version", request(tolerations=[]), rejected("FieldUnknown", "tolerations"))


def times() -> Iterator[dict[str, Any]]:
    """Instants: it is noon of 1 September 2026."""
    good = request()
    expired = rejected("Expired", "expirytime")
    yield case("expired a second ago", good, expired, headers=binary(expirytime="2026-09-01T11:59:59Z"))
    yield case("expires now", good, expired, headers=binary(expirytime="2026-09-01T12:00:00Z"))
    yield case("expires in a second", good, ADMITTED, headers=binary(expirytime="2026-09-01T12:00:01Z"))
    yield case("expired, in another zone", good, expired, headers=binary(expirytime="2026-09-01T13:59:59%2B02:00"))
    yield case("expired, structured", event(expirytime="2020-01-01T00:00:00Z"), expired, headers=STRUCTURED)
    yield case("expired before 1970", good, expired, headers=binary(expirytime="1969-01-01T00:00:00Z"))
    yield case("expires in the year 9999", good, ADMITTED, headers=binary(expirytime="9999-12-31T23:59:59Z"))
    for value in (
        "soon",
        "2026-09-01",
        "2026-09-01T12:00:00",
        "2026-02-31T00:00:00Z",
        "1788264000",
        "2026-W01-1T00:00:00Z",
        "2026-09-01T25:00:00Z",
        "2026-09-01t12:00:01z",
    ):
        yield case(f"expiry {value}", good, rejected("EnvelopeInvalid", "expirytime"), headers=binary(expirytime=value))
    yield case("sent in a year's time", good, ADMITTED, headers=binary(time="2027-09-01T12:00:00Z"))
    yield case("sent at no time at all", good, ADMITTED, headers=binary(time="never"))
    yield case("deadline that has passed", request(deadline="2026-09-01T11:00:00Z"), rejected("Expired", "deadline"))
    yield case("deadline to come", request(deadline="2026-09-01T12:00:00.000000001Z"), ADMITTED)
    yield case("deadline on 31 February", request(deadline="2027-02-31T00:00:00Z"), rejected(FIELD_INVALID, "deadline"))
    yield case(
        "deadline in the year 9999", request(deadline="9999-01-01T00:00:00Z"), rejected(FIELD_INVALID, "deadline")
    )
    yield case(
        "start after the deadline",
        request(not_before="2027-01-02T00:00:00Z", deadline="2027-01-01T00:00:00Z"),
        rejected("FieldConflict", "not_before"),
    )
    for value in (
        "tomorrow",
        "2027-01-01",
        "2027-01-01T00:00:00",
        "2027-01-01 00:00:00Z",
        "2027-01-01T00:00:00.Z",
        "2027-01-01T00:00:00.1234567890Z",
        "٢027-01-01T00:00:00Z",
    ):
        yield case(f"not before {value!a}", request(not_before=value), rejected(FIELD_INVALID, "not_before"))
    for value in (
        "2027-01-01T00:00:00+99:00",
        "2027-13-01T00:00:00Z",
        "2027-01-01T24:00:01Z",
        "0000-01-01T00:00:00Z",
        "1969-12-31T23:59:59Z",
    ):
        yield case(f"not before {value}", request(not_before=value), rejected(FIELD_INVALID, "not_before"))


def identity() -> Iterator[dict[str, Any]]:
    """The same again: by id, by key, in another mode, and with another body."""
    first = message(request())
    yield case("sent twice", request(), DUPLICATE, before=(first,))
    yield case("sent twice, written otherwise", json.dumps(request(), indent=2), DUPLICATE, before=(first,))
    yield case("sent again, structured", event(), DUPLICATE, headers=STRUCTURED, before=(first,))
    yield case("sent again, bare", event(), DUPLICATE, headers={}, before=(first,))
    yield case("same id, another body", request(priority=1), rejected("IdempotencyConflict", "id"), before=(first,))
    yield case("same id, another source", request(), ADMITTED, headers=binary(source="/other"), before=(first,))
    yield case("another id", request(), ADMITTED, headers=binary(id="e-2"), before=(first,))
    yield case("id in another case", request(), ADMITTED, headers=binary(id="E-1"), before=(first,))
    yield case(
        "parts that read the same when joined",
        request(),
        ADMITTED,
        headers=binary(source="/acme/cie", id="-1"),
        before=(first,),
    )
    keyed = message(request(idempotency_key="k"))
    yield case(
        "same key, another id", request(idempotency_key="k"), DUPLICATE, headers=binary(id="e-2"), before=(keyed,)
    )
    yield case(
        "same key, another body",
        request(idempotency_key="k", priority=1),
        rejected("IdempotencyConflict", "idempotency_key"),
        headers=binary(id="e-2"),
        before=(keyed,),
    )
    yield case(
        "another tenant's key",
        request(idempotency_key="k", queue="theirs"),
        ADMITTED,
        subject=wish("JobRequested", "beta"),
        before=(keyed,),
    )
    yield case("empty key", request(idempotency_key=""), rejected(FIELD_INVALID, "idempotency_key"))
    yield case("key of 129 characters", request(idempotency_key="k" * 129), rejected(FIELD_INVALID, "idempotency_key"))
    refused = message(request(queue="gone"))
    yield case("a refused one, again", request(queue="gone"), rejected("QueueNotFound", "queue"), before=(refused,))
    yield case(
        "the request alone, twice: nobody can tell", request(), ADMITTED, headers={}, before=(message(request(), {}),)
    )
    yield case(
        "an id that looks like ours", request(), ADMITTED, headers=binary(id="wish-1"), before=(message(request(), {}),)
    )


def workloads() -> Iterator[dict[str, Any]]:
    """Commands and variables."""
    for argument in (
        "$(reboot)",
        "`id`",
        "; rm -rf /",
        "&& true",
        "| tee /x",
        "> /dev/sda",
        "*",
        "~",
        "\\",
        '"',
        "'",
        "-",
        "--",
        "",
        "${IFS}",
        "%s%n",
        "../../x",
    ):
        yield case(f"argument {argument!a} is text", at("workload.command", ["/bin/echo", argument]), ADMITTED)
    yield case(
        "a shell is a program like others", at("workload.command", ["/bin/sh", "-c", 'echo "a\\b" && true']), ADMITTED
    )
    yield case("no command", at("workload.command", []), rejected("FieldMissing", "workload.command"))
    yield case("no workload", request(workload=...), rejected("FieldMissing", "workload"))
    yield case("no queue", request(queue=...), rejected("FieldMissing", "queue"))
    yield case("a dry run is answered, and makes no job", request(dry_run=True), DONE)
    yield case("an empty object", {}, rejected("FieldMissing", "queue"))
    yield case("an empty program", at("workload.command", ["", "a"]), rejected(FIELD_INVALID, "workload.command[0]"))
    yield case("a command line", at("workload.command", "/bin/true"), rejected(FIELD_INVALID, "workload.command"))
    yield case(
        "a number among arguments", at("workload.command", ["a", 1]), rejected(FIELD_INVALID, "workload.command[1]")
    )
    yield case(
        "an array among arguments", at("workload.command", ["a", ["b"]]), rejected(FIELD_INVALID, "workload.command[1]")
    )
    yield case("null among arguments", at("workload.command", [None]), rejected(FIELD_INVALID, "workload.command[0]"))
    for name in (
        "LD_PRELOAD",
        "LD_AUDIT",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "CUDA_MPS_PIPE_DIRECTORY",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        "APPORTION_RUN_ID",
        "APPORTION_",
    ):
        yield case(
            f"variable {name}", at("workload.env", {name: "all"}), rejected(FIELD_INVALID, f"workload.env.{name}")
        )
    for name in ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_CACHE_PATH", "_", "a"):
        yield case(f"variable {name}", at("workload.env", {name: "x"}), ADMITTED)
    yield case("a number as a variable", at("workload.env", {"A": 1}), rejected(FIELD_INVALID, "workload.env.A"))
    yield case("null as a variable", at("workload.env", {"A": None}), rejected(FIELD_INVALID, "workload.env.A"))
    yield case("variables as an array", at("workload.env", ["A=1"]), rejected(FIELD_INVALID, "workload.env"))
    yield case(
        "a secret, which nobody looks up yet",
        at("workload.env", {"A": {"secret": "hub"}}),
        rejected("NotSupported", "workload.env.A"),
    )
    yield case(
        "a secret with more to it",
        at("workload.env", {"A": {"secret": "hub", "key": "x"}}),
        rejected("FieldUnknown", "workload.env.A.key"),
    )
    for kind in ("Training", "train", "", "gpu", "training\n"):
        yield case(f"kind {kind!a}", at("workload.kind", kind), rejected(FIELD_INVALID, "workload.kind"))
    yield case("kind 1", at("workload.kind", 1), rejected(FIELD_INVALID, "workload.kind"))


def resources() -> Iterator[dict[str, Any]]:
    """How much is asked, and what can't be had."""

    def asking(**fields: Any) -> dict[str, Any]:
        return request(resources=fields)

    yield case("nothing", asking(), rejected("FieldMissing", "resources.gpu"))
    yield case("no resources", request(resources=...), rejected("FieldMissing", "resources.gpu"))
    yield case("resources as an array", request(resources=[1]), rejected(FIELD_INVALID, "resources"))
    yield case("resources as null", request(resources=None), rejected(FIELD_INVALID, "resources"))
    yield case("one device", asking(gpu=1), ADMITTED)
    yield case(
        "a share of several devices", asking(gpu=2, gpu_milli=500), rejected("FieldConflict", "resources.gpu_milli")
    )
    yield case(
        "an exclusive share", asking(gpu_milli=500, mode="exclusive"), rejected("FieldConflict", "resources.mode")
    )
    yield case(
        "a GPU on a CPU", asking(gpu=1, device={"kind": "cpu"}), rejected("FieldConflict", "resources.device.kind")
    )
    yield case("a CPU alone", asking(cpu_milli=1000, device={"kind": "cpu"}), ADMITTED)
    yield case(
        "a CPU alone, and none of it", asking(device={"kind": "cpu"}), rejected("FieldMissing", "resources.cpu_milli")
    )
    for mode in ("any", "MPS", "", "shared", "mps\n"):
        yield case(f"mode {mode!a}", asking(gpu=1, mode=mode), rejected(FIELD_INVALID, "resources.mode"))
    yield case(
        "more than the queue may hold", {**asking(gpu=1), "queue": "small"}, rejected("QuotaExceeded", "resources")
    )
    yield case(
        "more memory than the queue may hold",
        {**asking(gpu_milli=100, gpu_memory_mib=8193), "queue": "small"},
        rejected("QuotaExceeded", "resources.gpu_memory_mib"),
    )
    yield case(
        "a gang larger than the queue",
        {**asking(gpu_milli=100, gpu_memory_mib=1), "queue": "small", "gang": {"size": 6}},
        rejected("QuotaExceeded", "resources"),
    )
    yield case(
        "a gang's minimum above its size", request(gang={"size": 2, "min": 3}), rejected("FieldConflict", "gang.min")
    )
    unsupported: tuple[tuple[str, Any, str], ...] = (
        ("resources.disk_mib", 1, "resources.disk_mib"),
        ("job_set", "nightly", "job_set"),
        ("sla.rps", 50, "sla.rps"),
        ("checkpoint.interval_s", 60, "checkpoint.interval_s"),
        ("runtime.framework", "torch", "runtime.framework"),
        ("data.inputs", ["s3://bucket/x"], "data.inputs"),
        ("workload.mounts", ["/data"], "workload.mounts"),
    )
    for path, value, field in unsupported:
        yield case(f"not supported yet: {path}", at(path, value), rejected("NotSupported", field))
    for path, value in (
        ("isolation.level", "none"),
        ("resources.numa", "none"),
        ("elastic", {}),
        ("placement", {}),
        ("depends_on", []),
        ("dry_run", False),
    ):
        yield case(f"asks for nothing: {path}", at(path, value), ADMITTED)
    for path, value in (
        ("isolation.level", "fault"),
        ("isolation.level", "confidential"),
        ("retry.avoid_same_node", True),
        ("retry.memory_factor_pct", 150),
        ("sla.latency_ms", 50),
        ("bid.max_price_micro_per_gpu_hour", 1),
        ("checkpoint.uri", "s3://bucket/x"),
        ("checkpoint.signal", "SIGUSR2"),
    ):
        yield case(f"honoured: {path} {value}", at(path, value), ADMITTED)
    for name in ("SIGKILL", "SIGSTOP", "10", "usr1"):
        told = rejected(FIELD_INVALID, "checkpoint.signal")
        yield case(f"checkpoint by {name}", at("checkpoint.signal", name), told)
    unknown = rejected("JobNotFound", "depends_on[0].job_id")
    yield case("follows a job that nobody asked for", at("depends_on", [{"job_id": "other"}]), unknown)
    for cause in ("Success", "Cancelled"):
        yield case(f"retry on {cause}", at("retry.on", [cause]), rejected(FIELD_INVALID, "retry.on[0]"))
    yield case("retry on nonsense", at("retry.on", ["OutOfMemory", "Bad"]), rejected(FIELD_INVALID, "retry.on[1]"))
    yield case(
        "checkpoint to a script", at("checkpoint.uri", "javascript:x"), rejected(FIELD_INVALID, "checkpoint.uri")
    )
    yield case("input from a path", at("data.inputs", ["../secret"]), rejected(FIELD_INVALID, "data.inputs[0]"))
    yield case(
        "a model in place of sizes", {**asking(), "model": {"params_millions": 7000, "precision": "bf16"}}, ADMITTED
    )
    yield case("a model of nothing", {**asking(), "model": {}}, rejected(FIELD_INVALID, "model"))
    yield case(
        "a model of unknown precision",
        {**asking(), "model": {"params_millions": 1, "precision": "bf17"}},
        rejected(FIELD_INVALID, "model.dtype"),
    )
    yield case(
        "a model with a fraction", raw("model.params_millions", "6.7"), rejected(FIELD_INVALID, "model.params_millions")
    )
    yield case(
        "a model beyond any machine",
        {**asking(), "model": {"params_millions": 2_147_483_647}},
        rejected(FIELD_INVALID, "model.params_millions"),
    )


def misspelled() -> Iterator[dict[str, Any]]:
    """Fields that the contract doesn't have: passed over, they would change what was asked."""
    for name in (
        "gpus",
        "Queue",
        "queue ",
        "priorty",
        "resource",
        "image",
        "gpu",
        "replicas",
        "user",
        "__proto__",
        "constructor",
        "",
        "queue\x00",
        "a.b",
        "[0]",
        "` - at `$.queue`",
        "$ref",
        "type_",
    ):
        path = "queue\\u0000" if name == "queue\x00" else name
        yield case(f"field {name!a}", request(**{name: 1}), rejected("FieldUnknown", path))
    for path in (
        "resources.gpus",
        "resources.gpu_mib",
        "resources.nvidia.com/gpu",
        "workload.cmd",
        "workload.args",
        "gang.count",
        "retry.max",
        "model.params",
        "resources.device.model",
    ):
        outer, _, last = path.rpartition(".") if "nvidia" not in path else ("resources", "", "nvidia.com/gpu")
        doc = at(f"{outer}.x", 1)
        node = doc
        for step in outer.split("."):
            node = node[step]
        node[last] = node.pop("x")
        yield case(f"field {path}", doc, rejected("FieldUnknown", path))


def other_wishes() -> Iterator[dict[str, Any]]:
    """Wishes beside job requests."""

    def of(kind: str) -> dict[str, str]:
        return binary(type=f"io.apportion.{kind}.v1", id="w-1")

    cancel: dict[str, Any] = {"headers": of("JobCancelRequested"), "subject": wish("JobCancelRequested")}
    yield case("cancel a job", {"job_id": "train"}, DONE, **cancel, before=(message(request(job_id="train")),))
    yield case("cancel a job that isn't there", {"job_id": "train"}, rejected("JobNotFound", "job_id"), **cancel)
    yield case("cancel another tenant's job", {"job_id": "beta/train"}, rejected("JobNotFound", "job_id"), **cancel)
    for name in ("../x", "*", "a b", "", "a/b/c", "a\n", "A"):
        yield case(f"cancel {name!a}", {"job_id": name}, rejected(FIELD_INVALID, "job_id"), **cancel)
    yield case("cancel nothing", {}, rejected("FieldMissing", "job_id"), **cancel)
    yield case(
        "cancel with an unknown field", {"job_id": "a", "jobid": "b"}, rejected("FieldUnknown", "jobid"), **cancel
    )
    yield case(
        "cancel, with escapes in the reason",
        {"job_id": "a", "reason": "\x1b[2J"},
        rejected(FIELD_INVALID, "reason"),
        **cancel,
    )
    yield case("cancel, twice named", '{"job_id":"a","job_id":"b"}', rejected("FieldConflict", "job_id"), **cancel)
    policy: dict[str, Any] = {"headers": of("PolicyUpsertRequested")}
    theirs, ours = wish("PolicyUpsertRequested"), wish("PolicyUpsertRequested", "_operator")
    wanted: dict[str, Any] = {"for_tenant": "acme", "rate_per_min": 60, "reason": "too fast"}
    yield case("a policy, by a tenant", wanted, rejected("NotPermitted"), **policy, subject=theirs)
    yield case("a policy, by the operator", wanted, DONE, **policy, subject=ours)
    for name, change, at_fault in (
        ("without a reason", {"reason": ""}, "reason"),
        ("with a rate of nothing", {"rate_per_min": 0}, "rate_per_min"),
        ("with a limit below zero", {"limit_memory_mib": -1}, "limit_memory_mib"),
        ("that does something else when lowered", {"on_lowered": "kill"}, "on_lowered"),
        ("with a buffer that is none", {"for_tenant": None, "buffer_pct": 9}, "buffer_pct"),
        ("for a kind that is none", {"for_tenant": None, "defaults": {"x": {}}}, "defaults.x"),
    ):
        expected = rejected(FIELD_INVALID, at_fault)
        yield case(f"a policy {name}", {**wanted, **change}, expected, **policy, subject=ours)
    pools = {"limit_jobs": 3, "reason": "r"}
    yield case("a limit of the pool's", pools, rejected("FieldConflict", "limit_jobs"), **policy, subject=ours)
    queue: dict[str, Any] = {"headers": of("QueueUpsertRequested")}
    theirs, ours = wish("QueueUpsertRequested"), wish("QueueUpsertRequested", "_operator")
    wanted = {"queue": "new", "tenants": ["acme"]}
    yield case("a queue, by a tenant", wanted, rejected("NotPermitted"), **queue, subject=theirs)
    yield case("a queue, by the operator", wanted, DONE, **queue, subject=ours)
    yield case(
        "a queue for nobody", {"queue": "new", "tenants": []}, rejected(FIELD_INVALID, "tenants"), **queue, subject=ours
    )
    yield case(
        "a queue with a limit below zero",
        {**wanted, "limit_jobs": -1},
        rejected(FIELD_INVALID, "limit_jobs"),
        **queue,
        subject=ours,
    )
    changes: tuple[tuple[str, dict[str, Any], str, str], ...] = (
        ("below one that isn't there", {"parent": "nowhere"}, "QueueNotFound", "parent"),
        ("below itself", {"parent": "new"}, "FieldInvalid", "parent"),
        (
            "with a guarantee above its limit",
            {"guaranteed_compute_milli": 2, "limit_compute_milli": 1},
            "FieldConflict",
            "guaranteed_compute_milli",
        ),
        (
            "with a guarantee of a model above its limit",
            {"guaranteed_model_milli": {"b200": 2}, "limit_model_milli": {"b200": 1}},
            "FieldConflict",
            "guaranteed_model_milli.b200",
        ),
        ("with a weight of nothing", {"weight": 0}, FIELD_INVALID, "weight"),
        ("with too much weight of memory", {"weights": {"memory_mib": 1001}}, FIELD_INVALID, "weights.memory_mib"),
        ("with a weight of no name", {"weights": {"Memory!": 1}}, FIELD_INVALID, "weights.Memory!"),
        ("with a limit of half a job", {"limit_jobs": 0.5}, FIELD_INVALID, "limit_jobs"),
        ("with limits as a list", {"limit_model_milli": ["b200"]}, FIELD_INVALID, "limit_model_milli"),
        ("that does something else when lowered", {"on_lowered": "kill"}, FIELD_INVALID, "on_lowered"),
        ("with an order that is none", {"order": "fifo"}, FIELD_INVALID, "order"),
        ("with an unknown field", {"limit_gpu": 1}, "FieldUnknown", "limit_gpu"),
    )
    for name, change, code, at_fault in changes:
        yield case(f"a queue {name}", {**wanted, **change}, rejected(code, at_fault), **queue, subject=ours)
    yield case(
        "a queue with all that can be said of one",
        {
            **wanted,
            "limit_compute_milli": 8000,
            "limit_memory_mib": 600_000,
            "limit_cpu_milli": 64_000,
            "limit_jobs": 9,
            "limit_model_milli": {"b200": 4000},
            "guaranteed_compute_milli": 2000,
            "guaranteed_memory_mib": 100_000,
            "guaranteed_cpu_milli": 8000,
            "guaranteed_jobs": 2,
            "guaranteed_model_milli": {"b200": 1000},
            "weight": 3,
            "weights": {"memory_mib": 2, "b200": 5},
            "order": "seed",
            "is_fair": False,
            "reclaim": False,
            "on_lowered": "reclaim",
            "reason": "quarter 3",
        },
        DONE,
        **queue,
        subject=ours,
    )
    yield case(
        "a queue for a pattern",
        {**wanted, "tenants": ["*"]},
        rejected(FIELD_INVALID, "tenants[0]"),
        **queue,
        subject=ours,
    )
    for kind in ("NodeDrainRequested", "NodeCordonRequested"):
        asked = {"node_id": "node-1", "reason": "fan"}
        by_operator: dict[str, Any] = {"headers": of(kind), "subject": wish(kind, "_operator")}
        yield case(f"{kind}, by a tenant", asked, rejected("NotPermitted"), headers=of(kind), subject=wish(kind))
        yield case(f"{kind}, by the operator", asked, DONE, **by_operator)
        yield case(
            f"{kind} of nobody", {**asked, "node_id": "node-9"}, rejected("NodeNotFound", "node_id"), **by_operator
        )
        yield case(f"{kind} of a pattern", {**asked, "node_id": "*"}, rejected(FIELD_INVALID, "node_id"), **by_operator)
        yield case(f"{kind} without a reason", {"node_id": "node-1"}, rejected("FieldMissing", "reason"), **by_operator)
        yield case(
            f"{kind} with a newline in its reason",
            {**asked, "reason": "a\nb"},
            rejected(FIELD_INVALID, "reason"),
            **by_operator,
        )
        yield case(f"{kind} of no JSON", "drain it", rejected("NotJson"), **by_operator)


GROUPS = (
    json_text,
    repeated_names,
    sizes,
    numbers,
    controls,
    subjects,
    names,
    envelopes,
    header_values,
    types,
    times,
    identity,
    workloads,
    resources,
    misspelled,
    other_wishes,
)


def main() -> None:
    """Write every group; what is no longer made goes."""
    CORPUS.mkdir(exist_ok=True)
    for path in CORPUS.glob("*.json"):
        path.unlink()
    total = 0
    for make in GROUPS:
        cases = list(make())
        total += len(cases)
        group = {"group": make.__name__, "about": (make.__doc__ or "").strip(), "cases": cases}
        (CORPUS / f"{make.__name__}.json").write_text(json.dumps(group, indent=1) + "\n", "ascii")
    print(f"{total} messages in {len(GROUPS)} files")


if __name__ == "__main__":
    main()
