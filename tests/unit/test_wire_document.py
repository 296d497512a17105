"""docs/asyncapi.yaml and docs/wire.md say what the code says, and AsyncAPI's own schema takes the first."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from kvbus.channels import CHANNELS, Channel, channel_of
from kvbus.codec import unpack
from kvbus.events import KINDS, Header
from kvbus.topics import Command, Query, Topics
from scripts import wire_document, wire_schemas
from scripts.wire_schemas import BYTES, Document

ROOT = Path(__file__).resolve().parents[2]
MAKE = ROOT / "scripts" / "make_asyncapi"
SCHEMA = ROOT / "tests" / "data" / "asyncapi-3.0.0.schema.json"
SCHEMA_SHA256 = "abe96881dbfaad495ccbb6bd8d3fb43ca18a13b9d7564849ccb66f39d5e5b20f"
TOPICS = Topics()

UNANSWERED = {Query.REPLAY}
"""Verbs of the grammar for which nobody listens in this version."""


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MAKE), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def document() -> Document:
    found = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


def part(document: Document, *names: str) -> Document:
    found: object = document
    for name in names:
        assert isinstance(found, dict)
        found = found[name]
    assert isinstance(found, dict)
    return found


def validator(document: Document, schema: object) -> Draft7Validator:
    """A validator of one schema of the document, which may name others in it."""
    return Draft7Validator({"components": document["components"], "allOf": [schema]})


# --------------------------------------------------------------------------------------------------------- the files


def test_the_files_are_not_stale() -> None:
    result = make("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_file_that_was_changed_or_is_missing_is_stale(tmp_path: Path) -> None:
    assert make("--folder", str(tmp_path)).returncode == 0
    assert make("--folder", str(tmp_path), "--check").returncode == 0
    page = tmp_path / "wire.md"
    page.write_text(page.read_text("utf-8").replace("requester", "somebody"), encoding="utf-8")
    (tmp_path / "asyncapi.yaml").unlink()

    result = make("--folder", str(tmp_path), "--check")

    assert result.returncode == 1
    assert result.stdout.count("is stale") == 2


# ----------------------------------------------------------------------------------------------- AsyncAPI's own words


def test_asyncapis_own_schema_takes_the_document(document: Document) -> None:
    data = SCHEMA.read_bytes()
    assert hashlib.sha256(data).hexdigest() == SCHEMA_SHA256
    schema = json.loads(data)
    Draft7Validator.check_schema(schema)
    errors = [f"{error.json_path}: {error.message[:200]}" for error in Draft7Validator(schema).iter_errors(document)]
    assert errors == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("asyncapi",), "2.6.0"),
        (("info", "version"), 1),
        (("servers", "nats", "port"), 4222),
        (("channels", "facts", "address"), 7),
        (("operations", "send_facts", "action"), "publish"),
        (("operations", "receive_transfer", "bindings", "nats", "stream"), "KVB_TRANSFER"),
        (("components", "schemas", "Header", "type"), "map"),
    ],
)
def test_the_schema_would_refuse_what_is_no_asyncapi(document: Document, path: tuple[str, ...], value: object) -> None:
    changed = json.loads(json.dumps(document))
    part(changed, *path[:-1])[path[-1]] = value
    assert not Draft7Validator(json.loads(SCHEMA.read_bytes())).is_valid(changed)


def test_every_reference_leads_somewhere(document: Document) -> None:
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert len(references) > len(KINDS)
    for reference in references:
        assert part(document, *reference.removeprefix("#/").split("/"))


def test_an_operation_speaks_only_of_messages_of_its_channel(document: Document) -> None:
    # AsyncAPI says so in prose; its schema cannot
    for name, operation in part(document, "operations").items():
        assert isinstance(operation, dict)
        for one in (operation, operation.get("reply")):
            if one is not None:
                head = one["channel"]["$ref"] + "/messages/"
                assert all(message["$ref"].startswith(head) for message in one["messages"]), name


# ------------------------------------------------------------------------------------------------- schemas and examples


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_golden_examples_of_a_kind_fit_its_schema_and_no_others(document: Document, kind: str) -> None:
    messages = part(document, "components", "messages")
    golden = sorted((ROOT / "tests" / "golden").glob(f"v1_{kind}.bin")) + sorted(
        (ROOT / "tests" / "golden").glob(f"v1_{kind}.*.bin")
    )
    examples = part(messages, kind)["examples"]
    assert isinstance(examples, list)
    assert [example["payload"] for example in examples] == [in_json(unpack(path.read_bytes())) for path in golden]
    for example in examples:
        fits = [
            name for name in KINDS if validator(document, part(messages, name)["payload"]).is_valid(example["payload"])
        ]
        assert fits == [kind]


def in_json(value: object) -> object:
    """A message as JSON has it: bytes are hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: in_json(item) for key, item in value.items()}
    return [in_json(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_schema_has_the_fields_of_its_model_and_asks_for_those_that_the_model_asks_for(
    document: Document, kind: str
) -> None:
    for model in (KINDS[kind], Header):
        schema = part(document, "components", "schemas", model.__name__)
        assert schema.get("properties", {}).keys() == model.model_fields.keys()  # type: ignore[attr-defined]
        assert schema.get("required", []) == [name for name, one in model.model_fields.items() if one.is_required()]


def test_later_fields_fit_every_schema(document: Document) -> None:
    for kind in KINDS:
        message = part(document, "components", "messages", kind)
        for example in message["examples"]:  # type: ignore[attr-defined]
            later = {**example["payload"], "zz": 1, "b": {**example["payload"]["b"], "later": [1]}}
            assert validator(document, message["payload"]).is_valid(later)


def test_columns_are_described_by_the_width_that_they_have(document: Document) -> None:
    # the golden files hold columns of known widths: two facts, three pages, and so on
    schemas = part(document, "components", "schemas")
    widths = {
        (name, field): schema["x-width-bytes"]
        for name, one in schemas.items()
        for field, schema in part(schemas, name).get("properties", {}).items()  # type: ignore[attr-defined]
        if "x-width-bytes" in schema
    }
    assert widths == {key: one.width_bytes for key, one in BYTES.items() if one.width_bytes > 1}
    facts = in_golden("facts")
    for field in ("ticket", "rank", "bits", "lo", "hi"):
        assert len(facts[field]) == facts["n"] * widths["FactsSeen", field]  # type: ignore[arg-type]
    granted = in_golden("lease_granted")
    assert len(granted["pages"]) // widths["LeaseGranted", "pages"] == 3  # type: ignore[arg-type]
    assert len(granted["counters"]) // widths["LeaseGranted", "counters"] == 3  # type: ignore[arg-type]


def in_golden(name: str) -> Document:
    body = unpack((ROOT / "tests" / "golden" / f"v1_{name}.bin").read_bytes())["b"]
    assert isinstance(body, dict)
    return body


def test_bytes_without_words_and_words_without_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delitem(BYTES, ("LendAnswered", "grant"))
        with pytest.raises(KeyError, match=r"LendAnswered\.grant holds bytes"):
            wire_schemas.schemas()
    monkeypatch.setitem(BYTES, ("LendAnswered", "gone"), wire_schemas.Bytes("nothing"))
    with pytest.raises(KeyError, match="no such fields of bytes"):
        wire_schemas.schemas()


# --------------------------------------------------------------------------------------------------------- the table


def filled(channel: Channel) -> str:
    """A subject of a channel, as the document writes it, with examples for its parameters."""
    return wire_document.address(channel).format(**wire_document.EXAMPLES)


@pytest.mark.parametrize("channel", [one for one in CHANNELS if one.family], ids=lambda channel: channel.name)
def test_an_address_is_a_subject_of_the_grammar_and_leads_back_to_its_channel(channel: Channel) -> None:
    assert channel_of(TOPICS.parse(filled(channel))) is channel


def test_every_builder_of_subjects_has_a_channel_and_so_has_every_verb_that_is_answered() -> None:
    members = {"": "", "m0": "m0"}
    subjects = [TOPICS.transfer("b", "0" * 32), TOPICS.facts("b"), TOPICS.settle("b"), TOPICS.live_facts("b")]
    subjects += [TOPICS.live_settle("b"), TOPICS.result("r"), TOPICS.heartbeat("b"), TOPICS.shares("b")]
    subjects += [TOPICS.blocks("b"), TOPICS.live_blocks("b")]
    subjects += [TOPICS.command("b", verb, member) for verb in Command for member in members]
    subjects += [TOPICS.query("b", verb) for verb in Query]
    subjects += [TOPICS.query("b", verb, "m0") for verb in (Query.SNAPSHOT, Query.STATS)]

    found = {subject: channel_of(TOPICS.parse(subject)) for subject in subjects}

    assert {channel.name for channel in found.values() if channel} == {one.name for one in CHANNELS if one.family}
    without = {subject.split(".")[3] for subject, channel in found.items() if channel is None}
    assert without >= UNANSWERED
    for verb in (*Command, *Query):
        answered = any(channel for subject, channel in found.items() if subject.split(".")[3:4] == [verb])
        assert answered is (verb not in UNANSWERED), verb


def test_every_kind_is_on_some_channel_or_answers_there() -> None:
    carried = {one.body for channel in CHANNELS for one in channel.carries}
    answers = {one.answer for channel in CHANNELS for one in channel.carries if one.answer}
    assert {body.KIND for body in carried | answers} == set(KINDS)


@pytest.mark.parametrize("channel", [one for one in CHANNELS if one.family], ids=lambda channel: channel.name)
def test_the_stream_that_a_channel_names_is_the_one_that_stores_its_subjects(channel: Channel) -> None:
    stream = wire_document.STREAMS.get(channel.stored)
    if stream is None:
        with pytest.raises(ValueError, match="history holds"):
            wire_document.ASSETS.stream_of(filled(channel))
    else:
        assert wire_document.ASSETS.stream_of(filled(channel)) == stream


def test_the_bucket_that_a_channel_names_is_the_one_that_holds_its_keys() -> None:
    (channel,) = (one for one in CHANNELS if one.family is None)
    bucket = next(one for one in wire_document.ASSETS.buckets() if one["name"] == wire_document.STREAMS[channel.stored])
    subjects = bucket["subjects"]
    assert isinstance(subjects, list)
    assert filled(channel).startswith(subjects[0].removesuffix(">"))
