"""PrefixCache: which prompts' beginnings are computed already, block by block. Pure bookkeeping.

Each full block of a prompt has a digest that covers all tokens up to its end. The index keeps a
reference to the blocks it knows; those that only it holds are given up, least recently used first,
when the pool runs short. Blocks hold compressed entries only: to go on behind a prefix a sequence
also needs window rings and tails as they stood there. These are kept as checkpoints, one slot each,
at few boundaries, so a hit ends at a checkpoint; nothing is ever recomputed over less than all
tokens behind it. The bytes of blocks and slots are the runner's matter.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from deepinfer.cache.blocks import BlockPool

__all__ = ["PrefixCache", "PrefixHit", "PrefixStats", "block_keys"]


def block_keys(token_ids: Sequence[int], tokens_per_block: int) -> tuple[bytes, ...]:
    """Return the digest of every full block, chained: equal digests mean equal tokens from 0 on."""
    tokens = np.asarray(token_ids, dtype="<i8")
    digest = b""
    keys: list[bytes] = []
    for start in range(0, len(tokens) - tokens_per_block + 1, tokens_per_block):
        data = tokens[start : start + tokens_per_block].tobytes()
        digest = hashlib.blake2b(digest + data, digest_size=16).digest()
        keys.append(digest)
    return tuple(keys)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What a prompt can go on from.

    num_tokens  tokens that need no computing, a multiple of the block size, at least one block
    blocks      those that hold them
    checkpoint  slot with the rings and tails after them
    """

    num_tokens: int
    blocks: tuple[int, ...]
    checkpoint: int


@dataclass(slots=True)
class PrefixStats:
    """Counts since the start.

    num_lookups, num_hits   sequences admitted, and those that began behind a prefix
    num_hit_tokens          tokens that were not computed again
    num_evicted             blocks given up for others
    """

    num_lookups: int = 0
    num_hits: int = 0
    num_hit_tokens: int = 0
    num_evicted: int = 0


@dataclass(slots=True)
class _Node:
    """A block that the index knows; `checkpoint` 0 means none ends with it."""

    block: int
    checkpoint: int = 0


class PrefixCache:
    """Finds, keeps and gives up computed prefixes.

    blocks       the pool that sequences allocate from; use `allocate` and `release` of this object
                 instead of the pool's
    checkpoints  slots for checkpoints, none 0
    """

    def __init__(
        self, blocks: BlockPool, tokens_per_block: int, checkpoints: Iterable[int]
    ) -> None:
        self._blocks = blocks
        self.tokens_per_block = tokens_per_block
        self._nodes: dict[bytes, _Node] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # nobody else holds them; oldest first
        self._free = list(checkpoints)
        assert all(slot > 0 for slot in self._free), self._free
        self.num_checkpoints = len(self._free)
        self._saved: OrderedDict[bytes, None] = OrderedDict()  # with a checkpoint; oldest first
        self._pending: set[int] = set()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.stats = PrefixStats()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return self._blocks.num_free + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks that only the index holds."""
        return len(self._idle)

    def counts(self) -> dict[str, int]:
        """Return the counts since the start, and how many blocks and checkpoints are kept now."""
        return {
            **asdict(self.stats),
            "num_known_blocks": len(self._nodes),
            "num_idle_blocks": len(self._idle),
            "num_checkpoints": len(self._saved),
        }

    def look(self, keys: Sequence[bytes], limit: int) -> PrefixHit | None:
        """Find the longest prefix to go on from, of at most `limit` tokens; changes nothing."""
        found = 0
        blocks: list[int] = []
        for key in keys[: limit // self.tokens_per_block]:
            node = self._nodes.get(key)
            if node is None:
                break
            blocks.append(node.block)
            if node.checkpoint:
                found = len(blocks)
        if not found:
            return None
        checkpoint = self._nodes[keys[found - 1]].checkpoint
        return PrefixHit(found * self.tokens_per_block, tuple(blocks[:found]), checkpoint)

    def fits(self, hit: PrefixHit | None, num_blocks: int) -> bool:
        """Tell whether a sequence can have `num_blocks` blocks, those of its hit among them."""
        if hit is None:
            return self.num_available >= num_blocks
        idle = sum(self._key_of[block] in self._idle for block in hit.blocks)
        return self.num_available - idle >= num_blocks - len(hit.blocks)

    def begin(
        self, keys: Sequence[bytes], hit: PrefixHit | None, limit: int, num_blocks: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Give a sequence its blocks, those of the hit first; the caller has asked `fits`.

        Returns the blocks and the lengths at which a checkpoint is worth saving, ascending: the
        last boundary within `limit`, and the one where the prompt parts from others.
        """
        size = self.tokens_per_block
        start = 0
        held: tuple[int, ...] = ()
        self.stats.num_lookups += 1
        if hit is not None:
            start, held = hit.num_tokens, hit.blocks
            self.stats.num_hits += 1
            self.stats.num_hit_tokens += start
            self._blocks.retain(held)
            for block in held:
                self._idle.pop(self._key_of[block], None)
            self._saved.move_to_end(keys[start // size - 1])
        known = 0
        while known < len(keys) and (keys[known] in self._nodes or keys[known] in self._seen):
            known += 1
        self._note(keys)
        blocks = held + tuple(self.allocate(num_blocks - len(held)))
        wanted = {min(limit, len(keys) * size) // size, min(known, limit // size)}
        ends = tuple(sorted(i * size for i in wanted if i * size > start))
        return blocks, ends if self.num_checkpoints else ()

    def allocate(self, count: int) -> list[int]:
        """Return blocks, giving up idle ones when the pool runs short; see `num_available`."""
        short = count - self._blocks.num_free
        if short > 0:
            self.evict(short)
        return self._blocks.allocate(count)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks; those the index knows stay, the deepest to go first."""
        self._blocks.release(blocks)
        for block in reversed(blocks):
            key = self._key_of.get(block)
            if key is not None and self._blocks.count(block) == 1:
                self._idle[key] = None

    def reserve(self, keys: Sequence[bytes], end: int) -> int:
        """Return a slot to save the state after `end` tokens in, 0 when that is not needed.

        The oldest checkpoint makes room when all are in use. Hand the slot to `keep` or `drop`.
        """
        node = self._nodes.get(keys[end // self.tokens_per_block - 1])
        if node is not None and node.checkpoint:
            return 0
        if not self._free and self._saved:
            self._forget_checkpoint(next(iter(self._saved)))
        if not self._free:
            return 0
        slot = self._free.pop()
        self._pending.add(slot)
        return slot

    def keep(self, keys: Sequence[bytes], end: int, slot: int) -> None:
        """Take a slot that holds the state after `end` tokens; their blocks are known by now."""
        self._pending.remove(slot)
        key = keys[end // self.tokens_per_block - 1]
        node = self._nodes.get(key)
        if node is None or node.checkpoint:
            self._free.append(slot)
            return
        node.checkpoint = slot
        self._saved[key] = None

    def drop(self, slot: int) -> None:
        """Take back a reserved slot whose save did not happen."""
        self._pending.remove(slot)
        self._free.append(slot)

    def learn(self, keys: Sequence[bytes], blocks: Sequence[int], num_computed: int) -> None:
        """Enter the full blocks of a sequence whose first `num_computed` tokens are computed."""
        count = min(num_computed // self.tokens_per_block, len(keys))
        for key, block in zip(keys[:count], blocks[:count], strict=True):
            if key not in self._nodes and block not in self._key_of:
                self._blocks.retain([block])
                self._nodes[key] = _Node(block)
                self._key_of[block] = key

    def evict(self, count: int) -> int:
        """Give up at most `count` idle blocks, oldest first; returns how many."""
        num = 0
        while num < count and self._idle:
            key, _ = self._idle.popitem(last=False)
            node = self._nodes[key]
            if node.checkpoint:
                self._forget_checkpoint(key)
            del self._nodes[key], self._key_of[node.block]
            self._blocks.release([node.block])
            num += 1
        self.stats.num_evicted += num
        return num

    def clear(self) -> None:
        """Give up everything that no sequence holds, and all checkpoints."""
        for key in list(self._saved):
            self._forget_checkpoint(key)
        self.evict(len(self._idle))
        self._seen.clear()

    def check(self) -> None:
        """Assert that index, pool and checkpoints agree."""
        assert {node.block: key for key, node in self._nodes.items()} == self._key_of
        for key, node in self._nodes.items():
            count = self._blocks.count(node.block)
            assert count >= 1, (node, count)
            assert (count == 1) == (key in self._idle), (node, count)
            assert bool(node.checkpoint) == (key in self._saved), node
        used = [node.checkpoint for node in self._nodes.values() if node.checkpoint]
        slots = [*used, *self._free, *self._pending]
        assert len(slots) == len(set(slots)) == self.num_checkpoints, slots

    def _forget_checkpoint(self, key: bytes) -> None:
        del self._saved[key]
        node = self._nodes[key]
        self._free.append(node.checkpoint)
        node.checkpoint = 0

    def _note(self, keys: Sequence[bytes]) -> None:
        """Remember prompts that have begun, before their blocks are known."""
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > 4 * self._blocks.num_blocks:
            self._seen.popitem(last=False)
