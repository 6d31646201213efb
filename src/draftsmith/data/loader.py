"""The loader: which documents share a row, and which positions are anchors.  Pure functions of (seed, epoch, row).

Every row has exactly T tokens and A anchor slots.  Whole documents are packed, the tail is padding.  The state of the
loader is three integers: seed, epoch, row.  Needs no torch.
"""

from __future__ import annotations

import bisect
import heapq
from dataclasses import dataclass

import numpy as np

from draftsmith.data.store import Store
from draftsmith.errors import InputError
from draftsmith.records import PackedRow

GROUP = 4096
"""Documents packed together: more fills rows better, fewer mixes them better."""
BLUR = 0.1
"""How far from its length a document may be sorted."""
FULL = 0.99
"""A row less full than this waits for the documents of the next group."""
ORDER, ANCHORS = 1, 2
"""What a random stream is for, so that no two streams coincide."""


@dataclass(frozen=True)
class EpochPlan:
    """Rows of one epoch: row r holds the documents flat[first[r]:first[r + 1]]."""

    flat: np.ndarray  # int64 [documents]
    first: np.ndarray  # int64 [rows + 1]

    def __len__(self) -> int:
        return len(self.first) - 1

    def row(self, index: int) -> np.ndarray:
        return self.flat[self.first[index] : self.first[index + 1]]


def pack(numbers: np.ndarray, lengths: np.ndarray, row_tokens: int) -> list[list[int]]:
    """Best fit of `numbers` (documents, with their `lengths`) into rows of `row_tokens`, in the order given: each into
    the row that it leaves least room in, of several the first.

    The rows with r tokens left are a heap, and bit r of one long integer says whether it has any: so the fullest row
    that has room is the lowest bit from `length` on, found in C.
    """
    rows: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(row_tokens + 1)]
    some = 0
    for number, length in zip(numbers.tolist(), lengths.tolist(), strict=True):
        from_here = some >> length
        if from_here:
            left = length + (from_here & -from_here).bit_length() - 1
            row = heapq.heappop(room[left])
            if not room[left]:
                some ^= 1 << left
        else:
            left, row = row_tokens, len(rows)
            rows.append([])
        rows[row].append(number)
        left -= length
        if left:
            heapq.heappush(room[left], row)
            some |= 1 << left
    return rows


def plan_epoch(numbers: np.ndarray, lengths: np.ndarray, row_tokens: int, seed: int, epoch: int) -> EpochPlan:
    """The rows of an epoch.  numbers, lengths: int64 [documents].

    Packed group by group; the documents of a group's emptiest rows join the next group, so that only the last group
    ends in rows that are not full.
    """
    rng = np.random.default_rng([ORDER, seed, epoch])
    order = rng.permutation(len(numbers))
    flat: list[np.ndarray] = []
    counts: list[np.ndarray] = []  # documents in each row
    over = np.zeros(0, dtype=np.int64)
    for start in range(0, len(order), GROUP):
        group = np.concatenate([over, order[start : start + GROUP]])
        # about the longest first, which fills rows well; exactly so would put the same documents together every epoch
        blurred = lengths[group] * rng.uniform(1 - BLUR, 1 + BLUR, len(group))
        group = group[np.argsort(-blurred, kind="stable")]
        rows = pack(group, lengths[group], row_tokens)
        over = np.zeros(0, dtype=np.int64)
        if start + GROUP < len(order):
            rows, over = _set_aside(rows, lengths, row_tokens)
        flat.append(np.array([n for row in rows for n in row], dtype=np.int64))
        counts.append(np.array([len(row) for row in rows], dtype=np.int64))
    members, sizes = np.concatenate(flat), np.concatenate(counts)
    first = np.concatenate([[0], np.cumsum(sizes)])
    mixed = rng.permutation(len(sizes))  # rows of one group are not neighbours
    ends = np.cumsum(sizes[mixed])
    begins = ends - sizes[mixed]
    gather = np.arange(len(members)) - np.repeat(begins, sizes[mixed]) + np.repeat(first[mixed], sizes[mixed])
    return EpochPlan(flat=numbers[members[gather]], first=np.concatenate([[0], ends]))


def _set_aside(rows: list[list[int]], lengths: np.ndarray, row_tokens: int) -> tuple[list[list[int]], np.ndarray]:
    """(rows that stay, documents of the rows that are less than FULL full): at most half a group, emptiest first."""
    sizes = np.array([len(row) for row in rows])
    members = np.array([n for row in rows for n in row], dtype=np.int64)
    used = np.add.reduceat(lengths[members], np.cumsum(sizes) - sizes)
    emptiest = np.argsort(used, kind="stable")
    aside = (used[emptiest] < FULL * row_tokens) & (np.cumsum(sizes[emptiest]) <= GROUP // 2)
    stays = np.ones(len(rows), dtype=bool)
    stays[emptiest[aside]] = False
    return [row for row, stay in zip(rows, stays.tolist(), strict=True) if stay], members[np.repeat(~stays, sizes)]


def eligible_anchors(supervised: np.ndarray, document: np.ndarray) -> np.ndarray:
    """int64: positions a with a and a + 1 supervised, both in one document: at serving the anchor is a token that
    the target generated, and the first slot after it must have a label."""
    both = supervised[:-1] & supervised[1:] & (document[:-1] == document[1:]) & (document[:-1] >= 0)
    return np.flatnonzero(both)


def draw_anchors(eligible: np.ndarray, slots: int, stream: list[int]) -> tuple[np.ndarray, int]:
    """Draw without replacement, ascending, padded with 0 to `slots`; and how many count."""
    count = min(slots, len(eligible))
    anchors = np.zeros(slots, dtype=np.int64)
    rng = np.random.default_rng(stream)
    anchors[:count] = np.sort(rng.choice(eligible, size=count, replace=False))
    return anchors, count


class Loader:
    """Row g of a run, for any g, without reading the others.

    heldout: False for the documents trained on, True for the others.  Documents without an eligible anchor are left
    out and counted in `left_out`.  Raises InputError if nothing can be trained on, or no training answer is as long as
    a block.
    """

    def __init__(
        self, store: Store, *, row_tokens: int, anchors: int, block_size: int, seed: int, heldout: bool = False
    ) -> None:
        self.store, self.row_tokens, self.anchors, self.seed, self.heldout = store, row_tokens, anchors, seed, heldout
        chosen = store.heldout == heldout
        usable = chosen & (store.eligible > 0)
        self.left_out = int(chosen.sum() - usable.sum())
        self.numbers = np.flatnonzero(usable)
        self.lengths = store.lengths[self.numbers]
        which = "held-out" if heldout else "training"
        if len(self.numbers) == 0:
            raise InputError(
                f"{store.path}: no {which} document has two supervised tokens in a row, so nothing can be trained "
                f"({self.left_out} left out; see tokenize.heldout_fraction and the chat template)"
            )
        if int(self.lengths.max()) > row_tokens:
            raise InputError(
                f"{store.path}: a document has {int(self.lengths.max())} tokens, a row holds {row_tokens}: raise "
                f"train.row_tokens, or tokenize again with tokenize.max_tokens={row_tokens}"
            )
        longest = int(store.longest_span[self.numbers].max())
        if longest < block_size and not heldout:
            raise InputError(
                f"drafter.block_size {block_size} is larger than any training answer in {store.path} (longest: "
                f"{longest} tokens): lower it, or generate longer answers (generate.max_new_tokens)"
            )
        self.plans: dict[int, EpochPlan] = {}
        self.ends: list[int] = []  # rows up to and including epoch e

    def plan(self, epoch: int) -> EpochPlan:
        if epoch not in self.plans:
            if len(self.plans) >= 2:
                self.plans.pop(min(self.plans))
            self.plans[epoch] = plan_epoch(self.numbers, self.lengths, self.row_tokens, self.seed, epoch)
        return self.plans[epoch]

    def locate(self, g: int) -> tuple[int, int]:
        """(epoch, row within it) of row g of the run."""
        while not self.ends or self.ends[-1] <= g:
            self.ends.append((self.ends[-1] if self.ends else 0) + len(self.plan(len(self.ends))))
        epoch = bisect.bisect_right(self.ends, g)
        return epoch, g - (self.ends[epoch - 1] if epoch else 0)

    def row(self, g: int) -> PackedRow:
        epoch, index = self.locate(g)
        numbers = self.plan(epoch).row(index)
        t = self.row_tokens
        tokens, positions = np.zeros(t, dtype=np.int64), np.zeros(t, dtype=np.int64)
        document, supervised = np.full(t, -1, dtype=np.int32), np.zeros(t, dtype=bool)
        starts = [0]
        for i, number in enumerate(numbers):
            sample = self.store.document(int(number))
            s, e = starts[-1], starts[-1] + len(sample.tokens)
            tokens[s:e], positions[s:e], document[s:e] = sample.tokens, np.arange(e - s), i
            supervised[s:e] = sample.supervised()
            starts.append(e)
        positions[starts[-1] :] = np.arange(t - starts[-1])
        stream = [ANCHORS, self.seed, epoch, index, int(self.heldout)]
        anchors, count = draw_anchors(eligible_anchors(supervised, document), self.anchors, stream)
        return PackedRow(
            epoch=epoch,
            index=index,
            tokens=tokens,
            positions=positions,
            document=document,
            supervised=supervised,
            samples=tuple(int(n) for n in numbers),
            starts=tuple(starts),
            anchors=anchors,
            anchor_count=count,
        )
