"""The serving loop: lossless, equal to itself without caches, and its rules at the end of an answer."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers_train import sees_block
from torch import Tensor

from draftsmith.drafter.model import DFlashDrafter, embed, to_logits
from draftsmith.evaluate import speculate
from draftsmith.evaluate.speculate import Drafts, Sampler, Verifier, decode_plain, decode_speculative
from draftsmith.records import Answer
from draftsmith.target.model import Target
from evaluate.conftest import GREEDY, KINDS, fresh, without_stop


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_lossless_with_a_random_drafter(target, tmp_path, prompts, kind):
    drafter = fresh(target, tmp_path, kind)
    for prompt in prompts[:4]:
        plain = decode_plain(target, prompt, 40, GREEDY)
        assert decode_speculative(target, drafter, prompt, 40, GREEDY).tokens == plain.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_lossless_with_a_drafter_that_is_often_right(target, half_trained, prompts, kind):
    """All ways of a round are taken: drafts accepted, some of them, and all taken back."""
    drafter = half_trained[kind]
    answers = []
    for prompt in prompts:
        plain = decode_plain(without_stop(target), prompt, 48, GREEDY)
        answers.append(decode_speculative(without_stop(target), drafter, prompt, 48, GREEDY))
        assert answers[-1].tokens == plain.tokens and len(plain.tokens) == 48
    accepted = [n for a in answers for n in a.accepted]
    assert {0, 3} <= set(accepted) and {1, 2} & set(accepted) and sum(accepted) / len(accepted) > 0.8


def features_of(target: Target, layers: tuple[int, ...], tokens: list[int]) -> Tensor:
    out = target.model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1][0] for i in layers], dim=-1)


def first_principles(target: Target, drafter: DFlashDrafter, prompt: Tensor, limit: int) -> SimpleNamespace:
    """The loop without a cache and without intervals: whole sequences again in every round."""
    spec, text = drafter.spec, prompt.tolist()
    out = [int(target.model(input_ids=prompt[None], use_cache=False).logits[0, -1].argmax())]
    rounds, drafted, accepted = [], [], []
    while out[-1] not in target.eos_token_ids and len(out) < limit:
        known = text + out[:-1]  # the last token has no feature yet: it is the anchor
        slots = min(spec.block_size, 1 + limit - len(out))
        masks = []
        for window in spec.windows():
            mask = torch.zeros(slots, len(known) + slots, dtype=torch.bool)
            for slot in range(slots):
                for key in range(len(known)):
                    mask[slot, key] = window is None or len(known) + slot - key <= window - 1
                for other in range(slots):
                    mask[slot, len(known) + other] = sees_block(0, slot, 0, other, window)
            masks.append(mask)
        x = embed(torch.tensor([out[-1]] + [spec.mask_token_id] * (slots - 1)), target.embedding, spec)
        positions = torch.arange(len(known) + slots)
        hidden = drafter(
            features_of(target, spec.feature_layers, known), positions[: len(known)], x, positions[len(known) :], masks
        )
        drafts = to_logits(hidden[1:] @ target.head.T, spec).argmax(-1).tolist()
        checked = target.model(input_ids=torch.tensor([known + out[-1:] + drafts]), use_cache=False).logits[0]
        says = checked[len(known) :].argmax(-1).tolist()
        agreed = 0
        while agreed < len(drafts) and drafts[agreed] == says[agreed]:
            agreed += 1
        new = [*drafts[:agreed], says[agreed]]
        stop = next((i + 1 for i, t in enumerate(new) if t in target.eos_token_ids), len(new))
        rounds.append(min(stop, limit - len(out)))
        out += new[: rounds[-1]]
        drafted.append(slots - 1)
        accepted.append(agreed)
    return SimpleNamespace(tokens=tuple(out), rounds=tuple(rounds), drafted=tuple(drafted), accepted=tuple(accepted))


@pytest.mark.parametrize("kind", KINDS)
def test_the_cached_loop_equals_one_without_caches_round_by_round(target, half_trained, prompts, kind):
    drafter = half_trained[kind]
    for who, prompt in zip((target, without_stop(target), without_stop(target)), prompts, strict=False):
        with torch.no_grad():
            slow = first_principles(who, drafter, prompt, 30)
        answer = decode_speculative(who, drafter, prompt, 30, GREEDY)
        assert answer.tokens == slow.tokens and answer.accepted == slow.accepted and answer.drafted == slow.drafted
        assert answer.rounds == slow.rounds and sum(answer.rounds) + 1 == len(answer.tokens)


def proposals(monkeypatch, continuation: tuple[int, ...], prompt: Tensor, right=lambda slot: True) -> list[int]:
    """Replace the drafter's logits: slot k says the target's own continuation where `right`, else another token.

    Returns the list that fills with the number of slots of each round."""
    asked: list[int] = []

    def propose(self, anchor: int, slots: int) -> Tensor:
        asked.append(slots)
        at = self.length - len(prompt)  # place of the anchor in the continuation
        assert continuation[at] == anchor
        logits = torch.zeros(slots - 1, self.head.shape[0])
        for k in range(1, slots):
            token = continuation[at + k] if at + k < len(continuation) else 5
            logits[k - 1, token if right(k) else (token + 1) % self.head.shape[0]] = 9.0
        return logits

    monkeypatch.setattr(Drafts, "propose", propose)
    return asked


@pytest.mark.parametrize(
    ("limit", "rounds", "slots"),
    [
        (1, [], []), (2, [1], [2]), (3, [2], [3]), (4, [3], [4]), (5, [4], [4]), (8, [4, 3], [4, 4]), (9, [4, 4], [4, 4]),
        (10, [4, 4, 1], [4, 4, 2]), (33, [4] * 8, [4] * 8),
    ],
)  # fmt: skip
def test_a_perfect_drafter_fills_blocks_and_the_last_one_is_as_long_as_what_is_wanted(
    target, tmp_path, prompts, monkeypatch, limit, rounds, slots
):
    """min(B, 1 + tokens still wanted) slots; only rounds that had a whole block to fill are full."""
    who = without_stop(target)
    plain = decode_plain(who, prompts[0], 60, GREEDY).tokens
    asked = proposals(monkeypatch, plain, prompts[0])
    answer = decode_speculative(who, fresh(target, tmp_path, "full"), prompts[0], limit, GREEDY)
    assert answer.tokens == plain[:limit]
    assert list(answer.rounds) == rounds and asked == slots and list(answer.drafted) == [s - 1 for s in slots]
    assert answer.full_rounds() == [4] * rounds.count(4)
    assert answer.accepted == tuple(s - 1 for s in slots)
    assert answer.slot_offered == answer.slot_accepted == tuple(sum(s > k for s in slots) for k in (1, 2, 3))


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_drafts_after_the_first_wrong_one_are_taken_back(target, tmp_path, prompts, monkeypatch, wrong):
    who = without_stop(target)
    plain = decode_plain(who, prompts[0], 60, GREEDY).tokens
    proposals(monkeypatch, plain, prompts[0], right=lambda slot: slot != wrong)
    answer = decode_speculative(who, fresh(target, tmp_path, "full"), prompts[0], 1 + 5 * wrong + 3, GREEDY)
    assert answer.tokens == plain[: 1 + 5 * wrong + 3]
    assert set(answer.rounds[:5]) == {wrong} and set(answer.accepted[:5]) == {wrong - 1}
    offered, agreed = answer.slot_offered, answer.slot_accepted
    assert agreed[wrong - 1] == 0 and agreed[: wrong - 1] == offered[: wrong - 1] and set(agreed[wrong:]) <= {0}


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 6, 8])
def test_a_stop_token_inside_a_block_ends_the_answer_there(target, tmp_path, prompts, monkeypatch, place):
    who = without_stop(target)
    plain = next(
        p for p in (decode_plain(who, prompt, 40, GREEDY).tokens for prompt in prompts) if p[place] not in p[:place]
    )
    prompt = next(p for p in prompts if decode_plain(who, p, 40, GREEDY).tokens == plain)
    who = dataclasses.replace(target, eos_token_ids=(plain[place],))
    proposals(monkeypatch, plain, prompt)
    answer = decode_speculative(who, fresh(target, tmp_path, "full"), prompt, 40, GREEDY)
    assert answer.tokens == plain[: place + 1] == decode_plain(who, prompt, 40, GREEDY).tokens
    whole, rest = divmod(place, 4)
    assert list(answer.rounds) == [4] * whole + ([rest] if rest else [])
    # the round that ended the answer could have been cut, so it says nothing about a whole block
    assert answer.full_rounds() == [4] * (whole if rest else max(0, whole - 1))


def test_a_block_leaves_nothing_in_the_drafters_cache(target, tmp_path, prompts):
    drafter = fresh(target, tmp_path, "mixed")
    with torch.inference_mode():
        features = features_of(target, drafter.spec.feature_layers, prompts[0].tolist())
        drafts = Drafts(drafter, target)
        drafts.extend(features)
        first = drafts.propose(7, 4)
        drafts.propose(9, 3)
        assert torch.equal(drafts.propose(7, 4), first)
        assert drafts.length == len(prompts[0]) == drafts.context[0][0].shape[1]


def test_the_verifier_forgets_what_was_not_accepted(target, prompts):
    ids = prompts[3]
    with torch.inference_mode():
        verifier = Verifier(target, (1, 3))
        verifier.feed(ids[:6])
        verifier.feed(torch.tensor([9, 9, 9, 9]))
        verifier.forget(4)
        logits, features = verifier.feed(ids[6:9])
        fresh_one = Verifier(target, (1, 3))
        fresh_one.feed(ids[:6])
        expected, same = fresh_one.feed(ids[6:9])
        assert torch.equal(logits, expected) and torch.equal(features, same)
        assert verifier.length == 9 and verifier.passes == 3
        whole = target.model(input_ids=ids[None, :9], use_cache=False).logits[0, 6:]
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)


def test_softcap_and_multiplier_reach_the_drafts(target, tmp_path, prompts):
    """Greedy drafts do not change under a monotone map; the probabilities of the reject rule do."""
    plain = fresh(target, tmp_path, "full")
    capped = fresh(target, tmp_path, "full", "drafter.final_logit_softcapping=2", "drafter.output_multiplier=0.5")
    with torch.inference_mode():
        features = features_of(target, plain.spec.feature_layers, prompts[0].tolist())
        out = []
        for drafter in (plain, capped):
            drafts = Drafts(drafter, target)
            drafts.extend(features)
            out.append(drafts.propose(7, 4))
    torch.testing.assert_close(out[1], 2 * torch.tanh(out[0] * 0.5 / 2))


# at a temperature: a world of five tokens whose distribution is known exactly

VOCAB, LENGTH, BLOCK, TEMPERATURE = 5, 4, 3, 0.7


class Chain:
    """A target whose next-token logits depend on the last two tokens, and a drafter that knows the anchor only."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.target = 2 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        self.drafter = 2 * torch.randn(VOCAB, BLOCK - 1, VOCAB, generator=generator)

    def exact(self, prompt: list[int]) -> Tensor:
        """Probability of every answer of LENGTH tokens, [VOCAB] * LENGTH."""
        p = torch.softmax(self.target.double() / TEMPERATURE, -1)
        out = torch.zeros([VOCAB] * LENGTH, dtype=torch.float64)
        for answer in itertools.product(range(VOCAB), repeat=LENGTH):
            line, chance = [*prompt, *answer], 1.0
            for i in range(LENGTH):
                chance *= float(p[line[i], line[i + 1], line[i + 2]])
            out[answer] = chance
        return out

    def install(self, monkeypatch) -> tuple[SimpleNamespace, SimpleNamespace]:
        chain = self

        class ChainVerifier:
            def __init__(self, target, layers) -> None:
                self.line: list[int] = []

            def feed(self, tokens: Tensor, *, last_logits_only: bool = False) -> tuple[Tensor, Tensor]:
                before = len(self.line)
                self.line += tokens.tolist()
                rows = [chain.target[self.line[max(0, i - 1)], self.line[i]] for i in range(before, len(self.line))]
                logits = torch.stack(rows)
                return logits[-1:] if last_logits_only else logits, torch.zeros(len(rows), 1)

            def forget(self, tokens: int) -> None:
                self.line = self.line[: len(self.line) - tokens]

        class ChainDrafts:
            def __init__(self, drafter, target) -> None:
                pass

            def extend(self, features: Tensor) -> None:
                pass

            def propose(self, anchor: int, slots: int) -> Tensor:
                return chain.drafter[anchor, : slots - 1]

        monkeypatch.setattr(speculate, "Verifier", ChainVerifier)
        monkeypatch.setattr(speculate, "Drafts", ChainDrafts)
        target = SimpleNamespace(device=torch.device("cpu"), eos_token_ids=())
        return target, SimpleNamespace(spec=SimpleNamespace(block_size=BLOCK, feature_layers=(0,)))


def distance(rule: str, monkeypatch, trials: int = 12_000) -> tuple[float, list[Answer]]:
    """(chi-square - degrees of freedom) / its standard deviation over answers of LENGTH tokens.

    Rare answers are put together until each cell expects at least 5."""
    chain, prompt = Chain(), [2, 0]
    target, drafter = chain.install(monkeypatch)
    sampler = Sampler(TEMPERATURE, rule, torch.Generator().manual_seed(11))
    counts, answers = torch.zeros([VOCAB] * LENGTH, dtype=torch.float64), []
    for _ in range(trials):
        answer = decode_speculative(target, drafter, torch.tensor(prompt), LENGTH, sampler)
        counts[answer.tokens] += 1
        answers.append(answer)
    expected, order = (chain.exact(prompt) * trials).flatten().sort()
    assert float(expected.sum()) == pytest.approx(trials)
    found = counts.flatten()[order]
    cells, e, f = [], 0.0, 0.0
    for more, seen in zip(expected.tolist(), found.tolist(), strict=True):
        e, f = e + more, f + seen
        if e >= 5:
            cells.append((e, f))
            e, f = 0.0, 0.0
    assert len(cells) > 50
    freedom = len(cells) - 1
    return (sum((f - e) ** 2 / e for e, f in cells) - freedom) / (2 * freedom) ** 0.5, answers


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_sampling_leaves_the_targets_distribution_as_it_is(monkeypatch, rule):
    """12,000 answers of four tokens against their exact probabilities: chi-square within 4 standard deviations."""
    off, answers = distance(rule, monkeypatch)
    assert abs(off) < 4, off
    accepted = [n for a in answers for n in a.accepted]
    assert {0, 1, 2} == set(accepted) and 0.2 < sum(accepted) / len(accepted) < 1.5


def test_the_distribution_test_notices_a_wrong_rule(monkeypatch):
    """Greedy drafts under the reject rule, and a residual that is not taken: both are far outside the bound."""
    with monkeypatch.context() as patch:
        real = speculate._reject

        def greedy(proposal, proposal_logits, logits, sampler):
            return real(proposal_logits.argmax(-1), proposal_logits, logits, sampler)

        patch.setattr(speculate, "_reject", greedy)
        assert abs(distance("reject", patch, 4000)[0]) > 20
    with monkeypatch.context() as patch:

        def no_residual(proposal, proposal_logits, logits, sampler):
            q, p = sampler.probabilities(proposal_logits), sampler.probabilities(logits)
            for i, token in enumerate(proposal.tolist()):
                if torch.rand((), generator=sampler.generator) * q[i, token] >= p[i, token]:
                    return i, int(torch.multinomial(p[i], 1, generator=sampler.generator))
            return len(proposal), int(torch.multinomial(p[-1], 1, generator=sampler.generator))

        patch.setattr(speculate, "_reject", no_residual)
        assert abs(distance("reject", patch, 4000)[0]) > 20


def test_rejection_of_equal_distributions_accepts_everything():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(0.9, "reject", torch.Generator().manual_seed(0))
    for _ in range(50):
        proposal = sampler.draw(logits[:3])
        assert speculate._reject(proposal, logits[:3], logits, sampler)[0] == 3


def test_the_sampler_draws_from_the_tempered_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert Sampler(0.0).draw(logits).tolist() == [2]
    sampler = Sampler(0.5, generator=torch.Generator().manual_seed(0))
    drawn = sampler.draw(logits.expand(20_000, 3)).bincount(minlength=3) / 20_000
    torch.testing.assert_close(drawn, torch.softmax(logits[0] / 0.5, -1), rtol=0, atol=0.01)


def test_plain_decoding_is_the_targets_argmax_one_token_a_pass(target, prompts):
    line = prompts[1].tolist()
    for _ in range(9):
        line.append(int(target.model(input_ids=torch.tensor([line]), use_cache=False).logits[0, -1].argmax()))
    answer = decode_plain(without_stop(target), prompts[1], 9, GREEDY)
    assert list(answer.tokens) == line[len(prompts[1]) :]
    assert answer.rounds == (1,) * 8 and answer.accepted == (0,) * 8


@pytest.mark.parametrize("rule", ["match", "reject"])
def test_sampling_with_a_seed_is_repeatable(target, half_trained, prompts, rule):
    drafter = half_trained["full"]

    def once(seed: int) -> tuple[int, ...]:
        sampler = Sampler(1.0, rule, torch.Generator().manual_seed(seed))
        return decode_speculative(target, drafter, prompts[0], 20, sampler).tokens

    assert once(1) == once(1) and once(1) != once(2)
