"""Words, the kind of a step, and the placement of requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.parallel.place import Placer
from deepinfer.parallel.votes import WORD_SIZE, Flag, Word, agree

COUNTS = st.integers(0, 2**62)


@given(
    st.builds(
        Word,
        flags=st.integers(0, 31).map(Flag),
        **dict.fromkeys(
            ("waited", "sequences", "room", "blocks", "message", "generated", "digest"), COUNTS
        ),
    )
)
def test_word_travels(word: Word) -> None:
    packed = word.pack()
    assert packed.shape == (WORD_SIZE,)
    assert Word.unpack(packed) == word


def words(*flags: Flag, waited: int = 0) -> list[Word]:
    return [Word(flags=flag, waited=waited) for flag in flags]


PREFILL, DECODE, BOTH, IDLE = Flag.PREFILL, Flag.DECODE, Flag.PREFILL | Flag.DECODE, Flag(0)


def test_kind() -> None:
    assert agree(words(IDLE, IDLE)) is None
    assert agree(words(IDLE, DECODE)) == "decode"
    assert agree(words(PREFILL, IDLE)) == "prefill"  # nothing else to do
    assert agree(words(BOTH, DECODE)) == "prefill"  # half of them
    assert agree(words(PREFILL, DECODE, DECODE)) == "decode"  # one waits for others to join
    assert agree(words(PREFILL, DECODE, DECODE, waited=16)) == "prefill"  # but not for ever
    assert agree(words(PREFILL, IDLE, DECODE, IDLE)) == "prefill"  # idle ranks have no say


@given(st.lists(st.sampled_from([IDLE, PREFILL, DECODE, BOTH]), min_size=1, max_size=9))
def test_kind_moves(flags: list[Flag]) -> None:
    """There is a step exactly when somebody has work, and of a kind that somebody can run."""
    kind = agree(words(*flags))
    assert (kind is None) == (not any(flags))
    if kind == "prefill":
        assert any(Flag.PREFILL in flag for flag in flags)
    if kind == "decode":
        assert any(Flag.DECODE in flag for flag in flags)


def test_least_loaded_replica() -> None:
    """The largest first, each to the replica with the least work: 9, 8 | 7, 6 | 5, 4 meet."""
    placer = Placer(2)
    for key, most in enumerate([4, 9, 6, 7, 8, 5]):
        placer.add(key, 0, most)
    placed = dict(placer.place([3, 3]))
    assert placed == {1: 0, 4: 1, 3: 1, 2: 0, 5: 0, 0: 1}
    assert placer.loads == [20.0, 19.0] and placer.num_waiting == 0


def test_room_and_order() -> None:
    placer = Placer(2)
    for key in range(5):
        placer.add(key, 10, 10)
    assert [key for key, _ in placer.place([1, 1])] == [0, 1]  # first come, first served
    assert placer.place([0, 0]) == []
    assert placer.drop(3) and not placer.drop(0)
    assert [key for key, _ in placer.place([0, 9])] == [2, 4]
    placer.finish(0, 2)
    assert placer.cost(10, 10) == 3.0  # outputs are expected to be as long as those before
    placer.finish("unknown", 2)


def test_in_turn() -> None:
    placer = Placer(3, in_turn=True)
    for key in range(5):
        placer.add(key, 0, 100 - key)
    assert placer.place([2, 1, 2]) == [(0, 0), (1, 1), (2, 2), (3, 0)]
    assert placer.place([1, 1, 1]) == [(4, 1)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=30),
       st.lists(st.integers(0, 4), min_size=1, max_size=4))  # fmt: skip
def test_everyone_once(requests: list[tuple[int, int]], room: list[int]) -> None:
    placer = Placer(len(room))
    for key, (prompt, most) in enumerate(requests):
        placer.add(key, prompt, most)
    placed = placer.place(room)
    assert len(placed) == min(len(requests), sum(room))
    assert len({key for key, _ in placed}) == len(placed)
    for replica, count in enumerate(room):
        assert sum(found == replica for _, found in placed) <= count
