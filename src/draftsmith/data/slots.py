"""Many answers at a time by the target itself: a fixed number of slots, on a GPU one CUDA graph a step.

    free slots <- prompts (one pass over several) | STEPS steps, nothing read back | answers that ended -> the host

What the host does with answers and prompts, it does while the device steps.  Transformers' continuous batching needs
flash attention to be quick: without, each token scores the keys of all sequences, and no graph is used.

Shapes: S slots, C tokens a slot holds, N query heads, M key heads, W tokens of a prompt, D head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftsmith.config import GenerateConfig
from draftsmith.drafter.attention import any_shape
from draftsmith.errors import InputError
from draftsmith.records import GenerationSpeed
from draftsmith.target.model import Target

NAME = "draftsmith-slots"
STEPS = 16
"""Between two looks at what has ended: a slot is idle for half of them, and a pass over prompts costs about two."""
BUCKET = 128
"""Slots grow by so many tokens: a new graph each time."""
PREFILL_TOKENS = 1 << 15


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **settings: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """A step: query [S, N, 1, D], key and value [S, M, C, D], mask [S, 1, 1, C], added to the scores.  A prompt: query
    [n, N, W, D], key and value [n, M, W, D], no mask, causal.  -> [n, W, N, D].

    Raises NotImplementedError for attention sinks, capped scores and position bias.
    """
    for name in ("s_aux", "softcap", "position_bias"):
        if settings.get(name) is not None:
            raise NotImplementedError(f"{name} in attention over slots")
    window, mask, width = settings.get("sliding_window"), attention_mask, query.shape[2]
    if mask is None:
        if window is not None and window < width:
            at = torch.arange(width, device=query.device)
            mask = (at <= at[:, None]) & (at > at[:, None] - window)
        out = scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        if window is not None:
            at = torch.arange(key.shape[2], device=query.device)
            last = (mask == 0).sum(-1, keepdim=True) - 1
            mask = mask.masked_fill(at <= last - window, float("-inf"))
        # query heads that share a key head become queries of it: keys are read once and not repeated
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        out = scaled_dot_product_attention(grouped, key, value, mask, scale=scaling).reshape(query.shape)
    return out.transpose(1, 2).contiguous(), None


class SlotCache:
    """Keys and values of all layers, [S, M, C, D] each.  Has of transformers' Cache what a model calls, `update`."""

    def __init__(self, slots: Tensor, position: Tensor) -> None:
        self.slots, self.position, self.capacity = slots, position, 0
        self.filling: Tensor | None = None
        """Slots whose prompts pass through the model now; None during a step."""
        self.layers: list[list[Tensor]] = []

    def grow(self, capacity: int) -> None:
        for pair in self.layers:
            for i, old in enumerate(pair):
                pair[i] = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                pair[i][:, :, : self.capacity] = old
        self.capacity = capacity

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keep [n, M, W, D]; returns what the queries attend to."""
        while len(self.layers) <= layer:
            shape = (len(self.slots), key.shape[1], self.capacity)
            self.layers.append([x.new_zeros(*shape, x.shape[-1]) for x in (key, value)])
        keys, values = self.layers[layer]
        if self.filling is not None:
            keys[self.filling, :, : key.shape[2]] = key
            values[self.filling, :, : key.shape[2]] = value
            return key, value
        keys[self.slots, :, self.position] = key[:, :, 0]
        values[self.slots, :, self.position] = value[:, :, 0]
        return keys, values

    @property
    def token_bytes(self) -> int:
        """Of one token of one slot."""
        return sum(x.shape[1] * x.shape[3] * x.element_size() for pair in self.layers for x in pair)


class Slots:
    """Prompts in, token ids out.  `fill` free slots, `advance`, `take` what has ended."""

    def __init__(self, target: Target, settings: GenerateConfig, stream: int) -> None:
        self.target, self.settings = target, settings
        size, device = settings.batch_size, target.device
        self.token = torch.full((size,), target.pad_token_id, device=device)
        self.position, self.count = torch.zeros_like(self.token), torch.zeros_like(self.token)
        self.live = torch.zeros(size, dtype=torch.bool, device=device)
        self.answer = torch.zeros(size, settings.max_new_tokens + 1, dtype=torch.int64, device=device)
        """The last column takes what idle slots write."""
        self.stops = torch.tensor(target.eos_token_ids, device=device)
        self.cache = SlotCache(torch.arange(size, device=device), self.position)
        self.graph: Any = None
        self.free = list(range(size))
        self.prompt_length: dict[int, int] = {}
        self.steps = self.tokens = self.prompt_tokens = self.keys_read = 0
        self.begin = time.perf_counter()
        torch.manual_seed(settings.seed * 1_000_003 + stream)

    def fill(self, prompts: Sequence[list[int]]) -> list[int]:
        """The slots that took the prompts, token ids each; not more of them than are free."""
        slots = [self.free.pop() for _ in prompts]
        longest = max(map(len, prompts))
        if longest + self.settings.max_new_tokens > self.cache.capacity:
            self.graph = None
            self.cache.grow(-(-(longest + self.settings.max_new_tokens) // BUCKET) * BUCKET)
        each = max(1, PREFILL_TOKENS // longest)
        for i in range(0, len(prompts), each):
            self._prefill(slots[i : i + each], prompts[i : i + each])
        return slots

    def _prefill(self, slots: list[int], prompts: Sequence[list[int]]) -> None:
        """All but the last token of each, whose turn is the next step.  What the padding leaves behind a prompt is
        written over before it is seen."""
        device, width = self.target.device, max(1, max(map(len, prompts)) - 1)
        padded = [(p[:-1] + [self.target.pad_token_id] * width)[:width] for p in prompts]
        self.cache.filling = rows = torch.tensor(slots, device=device)
        self.target.trunk(
            input_ids=torch.tensor(padded, device=device),
            position_ids=torch.arange(width, device=device).expand(len(slots), -1),
            past_key_values=self.cache,
        )
        self.cache.filling = None
        self.token[rows] = torch.tensor([p[-1] for p in prompts], device=device)
        self.position[rows] = torch.tensor([len(p) - 1 for p in prompts], device=device)
        self.count[rows] = 0
        self.live[rows] = True
        self.prompt_length |= {slot: len(p) for slot, p in zip(slots, prompts, strict=True)}

    def _step(self) -> None:
        """One token for each slot.  All shapes fixed, nothing read back."""
        at = torch.arange(self.cache.capacity, device=self.target.device)
        hidden = (at > self.position[:, None])[:, None, None]
        mask = torch.zeros_like(hidden, dtype=self.target.dtype).masked_fill(hidden, float("-inf"))
        logits = self.target.model(
            input_ids=self.token[:, None], position_ids=self.position[:, None], attention_mask=mask,
            past_key_values=self.cache, logits_to_keep=1,
        ).logits[:, -1].float()  # fmt: skip
        new = self._choose(logits)
        self.answer.scatter_(1, self.count[:, None], new[:, None])
        self.token.copy_(new)
        self.count += self.live
        self.position += self.live
        self.live &= (new[:, None] != self.stops).all(-1) & (self.count < self.settings.max_new_tokens)

    def _choose(self, logits: Tensor) -> Tensor:
        """[S, V] -> [S].  As torch.multinomial draws, which would read the probabilities back to check them."""
        from transformers import TopPLogitsWarper

        if self.settings.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.settings.temperature
        if self.settings.top_p < 1:
            logits = TopPLogitsWarper(self.settings.top_p)(None, logits)
        return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)

    def advance(self) -> None:
        """STEPS steps; on a GPU they are only asked for."""
        self.steps += STEPS
        for i in range(STEPS):
            if self.target.device.type != "cuda" or (self.graph is None and i < 2):  # libraries set themselves up
                self._step()
                continue
            if self.graph is None:
                self.graph = self._captured()
            self.graph.replay()

    def _captured(self) -> Any:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise InputError(
                f"a step of this target does not go into a CUDA graph ({str(error).splitlines()[0]}): set "
                f"generate.engine=static, and data_dir to a new folder"
            ) from error
        return graph

    def take(self) -> list[tuple[int, list[int]]]:
        """(slot, token ids) of the answers that have ended; waits for the device."""
        live = self.live.tolist()
        ended = [slot for slot in self.prompt_length if not live[slot]]
        if not ended:
            return []
        rows = torch.tensor(ended, device=self.target.device)
        found = zip(ended, self.count[rows].tolist(), self.answer[rows].tolist(), strict=True)
        answers = [(slot, tokens[:count]) for slot, count, tokens in found]
        for slot, tokens in answers:
            prompt, n = self.prompt_length.pop(slot), len(tokens)
            self.tokens, self.prompt_tokens = self.tokens + n, self.prompt_tokens + prompt
            self.keys_read += n * prompt + n * (n - 1) // 2
            self.free.append(slot)
        return answers

    def speed(self) -> GenerationSpeed:
        """Measured until now, and what this device could do: the weights read once for S tokens, each token's keys and
        values once, at the rate of a copy; or the products, where they take longer.  The cache is given up."""
        from draftsmith.bench import roofline

        seconds, model = time.perf_counter() - self.begin, self.target.model
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        traffic = weights * self.tokens / len(self.token) + self.cache.token_bytes * self.keys_read
        heads = self.target.text_config.num_attention_heads
        scores = sum(4 * heads * pair[0].shape[3] for pair in self.cache.layers) * self.keys_read
        flops = 2 * sum(p.numel() for p in model.parameters()) * (self.tokens + self.prompt_tokens) + scores
        self.graph, self.cache.layers = None, []
        ceilings = roofline(self.target.device, self.target.dtype)
        floor = max(traffic / ceilings["copy_tb_per_s"], flops / ceilings["gemm_tflops"]) / 1e12
        return GenerationSpeed(
            self.tokens, self.prompt_tokens, round(seconds, 3), round(self.tokens / seconds, 1), self.steps,
            len(self.token), self.cache.capacity, int(traffic), int(flops), round(ceilings["copy_tb_per_s"], 4),
            round(ceilings["gemm_tflops"], 3), round(self.tokens / floor, 1), round(floor / seconds, 4),
        )  # fmt: skip


@contextlib.contextmanager
def attending(target: Target) -> Iterator[None]:
    """The model attends over slots inside the block."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, slot_attention)
    before = target.text_config._attn_implementation
    target.model.set_attn_implementation(NAME)
    try:
        with any_shape(target.device):  # each pass over prompts has another
            yield
    except torch.OutOfMemoryError as error:
        raise InputError("the GPU's memory does not hold the answers in flight: lower generate.batch_size") from error
    except NotImplementedError as error:
        raise InputError(f"{error}: set generate.engine=static, and data_dir to a new folder") from error
    finally:
        target.model.set_attn_implementation(before)
