"""Which sources a caller may name: spellings of one thing are one source, and what is unclear is none."""

import pytest

from kvbus.errors import ConfigError
from kvbus.gateway.sources import SOURCE_LENGTH_MAX, Allowlist, BaseUrl, InstanceName, source_of

LISTED = "http://10.0.0.5:8000, a ,https://source.example/llm"


def allows(text: str, listed: str = LISTED) -> bool:
    try:
        return not Allowlist.parsed(listed).refusal(source_of(text))
    except ValueError:
        return False


# H5, H23, H38
@pytest.mark.parametrize(
    "text",
    [
        "http://10.0.0.5:8000",
        "http://10.0.0.5:8000/",
        "HTTP://10.0.0.5:8000",
        "http://[::ffff:10.0.0.5]:8000",
        "http://[::ffff:a00:5]:8000/",
        "https://source.example/llm",
        "https://SOURCE.example.:443/llm/",
        "a",
    ],
)
def test_a_listed_source_is_allowed_in_every_spelling_that_means_the_same_place(text: str) -> None:
    assert allows(text)


# H5, H23, H38
@pytest.mark.parametrize(
    "text",
    [
        "http://10.0.0.5:8001",
        "http://10.0.0.5",
        "https://10.0.0.5:8000",
        "http://10.0.0.6:8000",
        "http://10.0.0.5:8000/other",
        "http://user@10.0.0.5:8000",
        "http://10.0.0.5:8000@evil.example",
        "http://evil.example#@10.0.0.5:8000",
        "http://10.0.0.5:8000?to=http://evil.example",
        "http://10.0.0.5:8000;10.0.0.6:8000",
        "http://10.0.0.5:8000\n",
        " http://10.0.0.5:8000",
        "http://10.0.0.5:8000\\evil.example",
        "http://10.0.0.5%3A8000",
        "http://167772165:8000",
        "http://0x0a000005:8000",
        "http://[::ffff:10.0.0.5%251]:8000",
        "http://10.0.0.5:8000/../",
        "http://10.0.0.5:08000x",
        "http://10.0.0.5:99999",
        "http://10.0.0.5:0",
        "http://10.0.0.5:",
        "http://",
        "ftp://10.0.0.5:8000",
        "https://source.example./llm.",
        "https://source.example.evil.example/llm",
        "https://\u0455ource.example/llm",
        "//10.0.0.5:8000",
        "10.0.0.5:8000",
        "A",
        "a\n",
        "a ",
        "*",
        "http://" + "a" * SOURCE_LENGTH_MAX,
        "x" * 65,
    ],
)
def test_what_only_looks_like_a_listed_source_is_not_allowed(text: str) -> None:
    assert not allows(text)


# H4
@pytest.mark.parametrize("listed", ["", "   ", ",", " , ,"])
def test_an_empty_list_allows_nothing(listed: str) -> None:
    allowlist = Allowlist.parsed(listed)
    assert not allowlist.sources
    for text in ("a", "http://10.0.0.5:8000"):
        assert "no source is allowed" in allowlist.refusal(source_of(text), {"a"})


# H38
@pytest.mark.parametrize(
    "entry",
    [
        "10.0.0.0/8",
        "10.0.0.5/0",
        "10.0.0.5",
        "::1",
        "*",
        "http://*.example",
        "http://u@h",
        "http://h;i",
        "ftp://h",
        "a b",
    ],
)
def test_an_entry_that_cannot_be_compared_stops_the_start_each_time(entry: str) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="KV_TRANSFER_SOURCE_ALLOW"):
            Allowlist.parsed(f"a,{entry}")


# H23
def test_a_url_is_allowed_where_the_one_instance_that_it_stands_for_is_listed() -> None:
    allowlist = Allowlist.parsed("a")
    url = source_of("http://10.0.0.5:8000")

    assert not allowlist.refusal(url, {"a"})
    assert allowlist.refusal(url, {"b"})
    assert allowlist.refusal(url, {"a", "b"})  # two claim it: it is not clear whom it means
    assert allowlist.refusal(url)


def test_a_name_is_not_allowed_because_its_url_is() -> None:
    assert Allowlist.parsed("http://10.0.0.5:8000").refusal(InstanceName("a"), {"a"})


def test_a_base_url_is_known_by_its_parts() -> None:
    assert source_of("https://H.example/x/") == BaseUrl("https", "h.example", 443, "/x")
    assert source_of("http://[2001:DB8::1]") == BaseUrl("http", "2001:db8::1", 80)
    assert source_of("llama/1") == InstanceName("llama/1")
