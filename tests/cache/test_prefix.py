"""PrefixCache: hits hold what they promise, nothing leaks, little memory is enough."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.prefix import PrefixCache, PrefixHit, block_keys

SIZE = 4


@dataclass
class Seq:
    """A sequence as the scheduler keeps it."""

    tokens: tuple[int, ...]
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    ends: tuple[int, ...]
    computed: int


@dataclass
class World:
    """Sequences over one cache, and what its bytes would hold: block or slot -> tokens."""

    cache: PrefixCache
    pool: BlockPool
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    live: list[Seq] = field(default_factory=list)

    def begin(self, tokens: tuple[int, ...], output: int = 0) -> Seq | None:
        """Admit a prompt if it fits."""
        keys = block_keys(tokens, SIZE)
        limit = len(tokens) - 1
        hit = self.cache.look(keys, limit)
        needed = -(-(len(tokens) + output) // SIZE)
        if not self.cache.fits(hit, needed):
            return None
        blocks, ends = self.cache.begin(keys, hit, limit, needed)
        start = 0
        if hit is not None:
            start = hit.num_tokens
            assert 0 < start <= limit and start % SIZE == 0
            assert self.slots[hit.checkpoint] == tokens[:start]
            for i, block in enumerate(hit.blocks):
                assert self.blocks[block] == tokens[: (i + 1) * SIZE]
        assert len(blocks) == needed and len(set(blocks)) == needed
        assert all(start < end <= limit and end % SIZE == 0 for end in ends)
        seq = Seq(tokens, keys, blocks, ends, start)
        self.live.append(seq)
        return seq

    def chunk(self, seq: Seq, count: int, lost: bool = False) -> None:
        """Compute some tokens of a prompt, saving on the way; `lost` = cancelled meanwhile."""
        start, end = seq.computed, min(seq.computed + count, len(seq.tokens))
        saves = []
        for at in seq.ends:
            if start < at <= end and (slot := self.cache.reserve(seq.keys, at)):
                saves.append((at, slot))
        for i in range(start // SIZE, -(-end // SIZE)):
            self.blocks[seq.blocks[i]] = seq.tokens[: min((i + 1) * SIZE, end)]
        for at, slot in saves:
            self.slots[slot] = seq.tokens[:at]
        if lost:
            for _, slot in saves:
                self.cache.drop(slot)
            self.end(seq)
            return
        seq.computed = end
        self.cache.learn(seq.keys, seq.blocks, end)
        for at, slot in saves:
            self.cache.keep(seq.keys, at, slot)

    def end(self, seq: Seq) -> None:
        """Let a sequence go."""
        self.live.remove(seq)
        self.cache.release(seq.blocks)

    def run(self, tokens: tuple[int, ...]) -> int:
        """Run a prompt to its end; returns the tokens that it did not compute."""
        seq = self.begin(tokens)
        assert seq is not None
        start = seq.computed
        self.chunk(seq, len(tokens))
        self.end(seq)
        return start


def world(num_blocks: int = 64, checkpoints: int = 8) -> World:
    pool = BlockPool(num_blocks)
    return World(PrefixCache(pool, SIZE, range(100, 100 + checkpoints)), pool)


def text(*parts: str) -> tuple[int, ...]:
    return tuple(ord(c) for c in "".join(parts))


def test_keys_cover_everything_before() -> None:
    one, other = text("abcdefgh"), text("abcXefgh")
    assert block_keys(one, 4)[0] != block_keys(other, 4)[0]
    assert block_keys(one, 4)[1] != block_keys(other, 4)[1]  # the same tokens behind another start
    assert block_keys(one[:7], 4) == block_keys(one, 4)[:1] == block_keys(one + text("zz"), 4)[:1]
    assert block_keys((), 4) == block_keys(text("abc"), 4) == ()


def test_the_same_prompt_again() -> None:
    w = world()
    prompt = text("abcdefghij")
    assert w.run(prompt) == 0
    assert w.run(prompt) == 8
    assert w.run(prompt[:8]) == 0  # one token at least is computed, and nothing was saved at 4
    assert w.run(prompt[:8]) == 4
    assert w.run(prompt + text("klmn")) == 8
    assert w.run(prompt + text("klmn")) == 12
    stats = w.cache.stats
    assert (stats.num_lookups, stats.num_hits, stats.num_hit_tokens) == (6, 4, 32)


def test_a_shared_beginning_is_found_by_the_third() -> None:
    """The second prompt saves where it parts from the first, the third goes on from there."""
    w = world()
    begin = "a system prompt!"
    assert [w.run(text(begin, q * 9)) for q in "123"] == [0, 0, 16]


def test_prompts_that_run_together_save_their_common_beginning() -> None:
    w = world()
    first, second = (w.begin(text("commonly", q * 7)) for q in "12")
    assert first is not None and second is not None
    assert (first.ends, second.ends) == ((12,), (8, 12))
    for seq in (first, second):
        w.chunk(seq, 100)
    assert w.run(text("commonly", "3333333")) == 8


def test_a_lost_chunk_leaves_nothing_behind() -> None:
    w = world(checkpoints=1)
    seq = w.begin(text("abcdefghij"))
    assert seq is not None
    w.chunk(seq, 10, lost=True)
    assert w.pool.num_free == w.pool.capacity
    w.cache.check()
    assert w.run(text("abcdefghij")) == 0 and w.run(text("abcdefghij")) == 8


def test_idle_blocks_make_room() -> None:
    """Oldest first, the end of a prompt before its beginning, and never one in use."""
    w = world(num_blocks=9)
    assert w.run(text("aaaabbbbccccd")) == 0
    assert w.run(text("xxxxyyyyzzzzw")) == 0
    assert w.pool.num_free == 2 and w.cache.num_available == 8
    seq = w.begin(text("1111222233334"))  # takes two free blocks and two idle ones
    assert seq is not None
    assert w.cache.stats.num_evicted == 2
    known = [len(w.cache.look(block_keys(text(t), SIZE), 99).blocks)  # type: ignore[union-attr]
             if w.cache.look(block_keys(text(t), SIZE), 99) else 0
             for t in ("aaaabbbbcccc", "xxxxyyyyzzzz")]  # fmt: skip
    assert known == [0, 3]
    assert w.begin(text("5" * 30)) is None
    w.end(seq)


def test_few_checkpoints_go_round() -> None:
    w = world(checkpoints=2)
    prompts = [text(c * 9) for c in "abc"]
    for prompt in prompts:
        w.run(prompt)
    assert [w.run(p) for p in prompts] == [0, 0, 0]  # each was the oldest when its turn came
    assert w.run(prompts[2]) == 8
    w.cache.check()


def test_no_checkpoints_no_hits() -> None:
    w = world(checkpoints=0)
    assert [w.run(text("abcdefghij")) for _ in range(3)] == [0, 0, 0]


def test_clear() -> None:
    w = world()
    for _ in range(2):
        w.run(text("abcdefghij"))
    w.cache.clear()
    assert w.pool.num_free == w.pool.capacity
    w.cache.check()
    assert w.run(text("abcdefghij")) == 0


def test_a_hit_that_fits_only_without_its_own_idle_blocks() -> None:
    w = world(num_blocks=5)
    assert w.run(text("aaaabbbbccccdd")) == 0
    keys = block_keys(text("aaaabbbbccccdd"), SIZE)
    hit = w.cache.look(keys, 13)
    assert isinstance(hit, PrefixHit) and len(hit.blocks) == 3
    assert w.cache.fits(hit, 4) and not w.cache.fits(hit, 5)
    assert w.cache.fits(None, 4)


PROMPTS = st.lists(st.sampled_from(["aaaa", "bbbb", "ab", "c"]), min_size=1, max_size=6)


@settings(max_examples=150)
@given(
    num_blocks=st.integers(3, 24),
    checkpoints=st.integers(0, 4),
    moves=st.lists(
        st.tuples(st.sampled_from(["begin", "chunk", "lose", "end", "evict"]), PROMPTS,
                  st.integers(1, 9), st.integers(0, 9)),
        max_size=40,
    ),
)  # fmt: skip
def test_any_use(
    num_blocks: int, checkpoints: int, moves: list[tuple[str, list[str], int, int]]
) -> None:
    """Whatever comes, hits hold the right bytes, and all blocks and slots come back."""
    w = world(num_blocks, checkpoints)
    for move, parts, count, which in moves:
        if move == "begin":
            w.begin(text(*parts), output=count)
        elif move == "evict":
            w.cache.evict(count)
        elif w.live:
            seq = w.live[which % len(w.live)]
            if move == "end":
                w.end(seq)
            elif seq.computed < len(seq.tokens):
                w.chunk(seq, count, lost=move == "lose")
        w.pool.check()
        w.cache.check()
        held = {block for seq in w.live for block in seq.blocks}
        assert w.cache.num_available == w.pool.capacity - len(held)
    for seq in list(w.live):
        w.end(seq)
    w.cache.clear()
    assert w.pool.num_free == w.pool.capacity


def test_no_torch() -> None:
    program = "import sys, deepinfer.cache.prefix; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
