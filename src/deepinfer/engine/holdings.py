"""Holdings: which blocks, slots and cached prefixes sequences hold, and whether more would fit.

Pure bookkeeping over the pools it is given. When anything is taken or given back is the scheduler's
matter. What a step names may go to others as soon as its sequence has let go of it, because steps
run in the order they are planned.
"""

from __future__ import annotations

from collections.abc import Iterable

from deepinfer.cache.blocks import BlockPool
from deepinfer.cache.prefix import PrefixCache, PrefixHit, block_keys
from deepinfer.cache.slots import SlotPool
from deepinfer.engine.limits import Limits
from deepinfer.engine.plan import RowPlan, StateLoad
from deepinfer.engine.replay import replay_floor
from deepinfer.engine.request import Request
from deepinfer.engine.sequence import Sequence

__all__ = ["Holdings"]


class Holdings:
    """Gives sequences a slot and blocks, those of a cached prefix first, and takes them back."""

    def __init__(
        self,
        limits: Limits,
        blocks: BlockPool,
        slots: SlotPool,
        tokens_per_block: int,
        prefix: PrefixCache | None,
    ) -> None:
        self._limits = limits
        self._blocks = blocks
        self._slots = slots
        self._tokens_per_block = tokens_per_block
        self._prefix = prefix

    @property
    def num_blocks(self) -> int:
        """Blocks that can ever be in use at once."""
        return self._blocks.capacity

    @property
    def num_blocks_used(self) -> int:
        """Blocks held by sequences or by the prefix cache."""
        return self._blocks.capacity - self._blocks.num_free

    def prefix_counts(self) -> dict[str, int] | None:
        """Return what the reuse of prefixes has brought, None without it."""
        return None if self._prefix is None else self._prefix.counts()

    def never_fits(self, request: Request) -> str | None:
        """Return why a request can never run, None when it can."""
        length, limit = len(request.prompt_token_ids), self._limits.max_model_len
        if length > limit:
            return (
                f"the prompt has {length} tokens, the limit is {limit}: "
                "shorten it, or raise scheduling.max_model_len, or the cache.num_blocks that it "
                "follows"
            )
        needed = self.blocks_of(self._most_length(request))
        if needed > self._blocks.capacity:
            room = self._blocks.capacity * self._tokens_per_block
            return (
                "prompt and max_tokens together need room for "
                f"{needed * self._tokens_per_block} tokens, the caches hold {room}: "
                "lower max_tokens or raise cache.memory_bytes"
            )
        return None

    def blocks_of(self, length: int) -> int:
        """Return how many blocks so many positions take."""
        return -(-length // self._tokens_per_block)

    def floor(self, sequence: Sequence) -> int:
        """Return the first position that the decoder half computes."""
        return replay_floor(sequence.num_prompt_tokens, self._limits.keep_tokens)

    def can_admit(self, sequence: Sequence, others: Iterable[Sequence], num_others: int) -> bool:
        """Whether a waiting sequence can have a slot and its blocks beside the admitted `others`.

        Also no while one of them is about to leave a prefix that is worth waiting for.
        """
        if num_others >= self._limits.max_num_seqs or self._slots.num_free == 0:
            return False
        needed = self._blocks_to_admit(sequence)
        if not self._limits.reserve and num_others:
            # Leave room for those that grow, so that admitting one does not put back another.
            needed += min(num_others, self._blocks.capacity // 10)
        if self._prefix is None:
            return self._blocks.num_free >= needed
        hit = self.look(sequence)
        return self._prefix.fits(hit, needed) and not self._comes_soon(sequence, hit, others)

    def look(self, sequence: Sequence) -> PrefixHit | None:
        """Find a cached prefix that a waiting sequence can go on from."""
        if self._prefix is None or sequence.saved is not None:
            return None
        return self._prefix.look(self._keys(sequence), self._prefix_limit(sequence))

    def admit(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        """Give a sequence its slot and blocks, those of the hit first; see `can_admit`."""
        count = self._blocks_to_admit(sequence)
        if self._prefix is None or sequence.saved is not None:
            self._free_blocks(count)
            sequence.blocks = tuple(self._blocks.allocate(count))
        else:
            sequence.blocks, sequence.save_ends = self._prefix.begin(
                self._keys(sequence), hit, self._prefix_limit(sequence), count
            )
        sequence.slot = self._slots.acquire()

    def grow(self, sequences: list[Sequence], num_rows: int) -> bool:
        """Add the blocks that `num_rows` more positions of each may need; False when short, and
        then nothing is taken.
        """
        needs = []
        for sequence in sequences:
            most = self._most_length(sequence.request)
            end = min(sequence.num_scheduled + num_rows, most)
            needs.append(max(0, self.blocks_of(end) - len(sequence.blocks)))
        if not self._free_blocks(sum(needs)):
            return False
        for sequence, need in zip(sequences, needs, strict=True):
            if need:
                sequence.blocks = (*sequence.blocks, *self._blocks.allocate(need))
        return True

    def give_back(self, sequence: Sequence) -> None:
        """Take back what a sequence holds, if anything."""
        if self._prefix is not None:
            self._prefix.release(sequence.blocks)
        else:
            self._blocks.release(sequence.blocks)
        if sequence.slot:
            self._slots.release(sequence.slot)
        sequence.blocks, sequence.slot, sequence.save_ends = (), 0, ()

    def load(self, sequence: Sequence) -> StateLoad:
        """Say where the caches of a saved request go; it is then no longer kept."""
        state = sequence.saved
        assert state is not None, sequence.request.request_id
        sequence.saved = None
        held = self.blocks_of(state.num_computed)
        return StateLoad(sequence.slot, sequence.blocks[:held], state.num_computed, state.parts)

    def reserve_saves(
        self, sequence: Sequence, begin: int, end: int
    ) -> tuple[tuple[int, int], ...]:
        """Return where a chunk leaves checkpoints of the sequence's state."""
        if self._prefix is None or not sequence.save_ends:
            return ()
        found = [
            (at, self._prefix.reserve(self._keys(sequence), at))
            for at in sequence.save_ends
            if begin < at <= end
        ]
        needless = {at for at, checkpoint in found if not checkpoint}
        sequence.save_ends = tuple(at for at in sequence.save_ends if at not in needless)
        return tuple((at, checkpoint) for at, checkpoint in found if checkpoint)

    def learn(self, sequence: Sequence, row: RowPlan) -> None:
        """Let later sequences find what a chunk has computed."""
        if self._prefix is None:
            return
        keys = self._keys(sequence)
        self._prefix.learn(keys, sequence.blocks, sequence.num_computed)
        for at, checkpoint in row.saves:
            self._prefix.keep(keys, at, checkpoint)
        if row.saves:
            done = {at for at, _ in row.saves}
            sequence.save_ends = tuple(at for at in sequence.save_ends if at not in done)

    def drop_saves(self, row: RowPlan) -> None:
        """Take back the checkpoints of a row whose outcome does not count."""
        if self._prefix is not None:
            for _, checkpoint in row.saves:
                self._prefix.drop(checkpoint)

    def _most_length(self, request: Request) -> int:
        most = len(request.prompt_token_ids) + request.params.max_tokens
        return min(most, self._limits.max_model_len)

    def _blocks_to_admit(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence gets when it is admitted."""
        most = self._most_length(sequence.request)
        if self._limits.reserve:
            return self.blocks_of(most)
        return self.blocks_of(min(len(sequence.token_ids) + 1, most))

    def _free_blocks(self, needed: int) -> bool:
        """Return whether so many blocks are free, letting go of cached prefixes first."""
        missing = needed - self._blocks.num_free
        if missing > 0 and self._prefix is not None:
            self._prefix.evict(missing)
        return self._blocks.num_free >= needed

    def _prefix_limit(self, sequence: Sequence) -> int:
        """Return how long a cached prefix may be: at least one token is computed, prompt tokens
        that are scored are, and those that the decoder half keeps are.
        """
        if sequence.request.params.prompt_logprobs:
            return 0
        limit = len(sequence.token_ids) - 1
        return limit if self._limits.keep_tokens is None else min(limit, self.floor(sequence))

    def _comes_soon(
        self, sequence: Sequence, hit: PrefixHit | None, others: Iterable[Sequence]
    ) -> bool:
        """Whether another sequence is about to leave a longer prefix to go on from: then a waiting
        one lets it, for a few steps, rather than computing the same again beside it.
        """
        if sequence.saved is not None:
            return False
        keys, limit = self._keys(sequence), self._prefix_limit(sequence)
        least = 0 if hit is None else hit.num_tokens
        return any(
            least < end <= limit
            and end <= len(keys) * self._tokens_per_block
            and self._keys(other)[end // self._tokens_per_block - 1]
            == keys[end // self._tokens_per_block - 1]
            for other in others
            for end in other.save_ends
        )

    def _keys(self, sequence: Sequence) -> tuple[bytes, ...]:
        if sequence.keys is None:
            prompt = sequence.request.prompt_token_ids
            sequence.keys = block_keys(prompt, self._tokens_per_block)
        return sequence.keys
