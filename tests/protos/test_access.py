from pathlib import Path

import pytest

from protos.access import Access, AccessError, read_tokens
from protos.errors import ResourceExhausted, Unauthenticated

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# clients\n\nalice {ALICE}\nbob {BOB}\n")
    return path


def test_a_known_token_names_its_client(tokens: Path) -> None:
    access = Access(tokens)
    with access.call(bearer(ALICE)) as name:
        assert name == "alice"
    with access.call(bearer(BOB)) as name:
        assert name == "bob"


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", ALICE)],
        [("authorization", f"Basic {ALICE}")],
        [("authorization", b"Bearer x")],
        bearer(""),
        bearer(ALICE[:-1]),
        bearer(ALICE + "x"),
        bearer("alice"),
    ],
    ids=range(8),
)
def test_anything_else_gets_nowhere(tokens: Path, metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unauthenticated) as caught, Access(tokens).call(metadata):
        pytest.fail("admitted")
    assert ALICE not in str(caught.value)


def test_calls_under_way_are_bounded_for_each_token(tokens: Path) -> None:
    access = Access(tokens, max_calls=2)
    with access.call(bearer(ALICE)), access.call(bearer(ALICE)):
        with pytest.raises(ResourceExhausted) as caught, access.call(bearer(ALICE)):
            pytest.fail("admitted")
        assert caught.value.retry_after_s is not None
        with access.call(bearer(BOB)):
            pass
    with access.call(bearer(ALICE)):
        pass


def test_a_changed_file_is_read_again_and_an_unusable_one_is_not(tokens: Path) -> None:
    access = Access(tokens)
    tokens.write_text(f"bob {BOB}\ncarol carol-0123456789abcdef\n")
    with pytest.raises(Unauthenticated), access.call(bearer(ALICE)):
        pytest.fail("admitted")
    tokens.write_text("nonsense\n")
    with access.call(bearer(BOB)) as name:
        assert name == "bob"
    tokens.unlink()
    with access.call(bearer(BOB)) as name:
        assert name == "bob"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", "has no token"),
        ("alice", "line 1"),
        (f"alice {ALICE} extra", "line 1"),
        ("alice short", "line 1"),
        (f"alice {ALICE}\nalice {BOB}", "line 2"),
        (f"alice {ALICE}\nbob {ALICE}", "line 2"),
    ],
)
def test_an_unusable_file_is_refused_without_its_content(
    tmp_path: Path, content: str, line: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)
    with pytest.raises(AccessError, match=line) as caught:
        read_tokens(path)
    assert ALICE not in str(caught.value)
