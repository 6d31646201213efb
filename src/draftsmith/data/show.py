"""`draftsmith data show | stats | verify`: what is in a store, for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.config import Config
from draftsmith.data.loader import plan_epoch
from draftsmith.data.store import BESIDE, Document, Store, describe, verify
from draftsmith.errors import InputError

BARS = 24
MARKS = ("⟦", "⟧")


def show(config: Config, number: int | None = None, wanted: str | None = None, tokens: bool = False) -> Iterator[str]:
    """One sample with its supervised tokens between marks; tokens: one token a line instead."""
    from draftsmith.target.model import load_tokenizer

    store = Store(config.store)
    if wanted is not None:
        number = next((n for n in range(len(store)) if store.identity(n) == wanted), None)
        if number is None:
            raise InputError(f"{store.path} has no document with the id {wanted!r}")
    number = number or 0
    if not -len(store) <= number < len(store):
        raise InputError(f"{store.path} has {len(store)} documents: there is no number {number}")
    number %= len(store)
    document, tokenizer = store.document(number), load_tokenizer(config.target)
    mask = document.supervised()
    yield f"{store.path}: {describe(store.manifest)}"
    yield (
        f"document {number} of {len(store)}: id {document.id}, category {document.category}, {len(mask)} tokens, "
        f"{int(mask.sum())} supervised (between {MARKS[0]} and {MARKS[1]})" + (", held out" if document.heldout else "")
    )
    yield ""
    if tokens:
        for i, token in enumerate(document.tokens.tolist()):
            yield f"{i:6d} {token:7d} {'#' if mask[i] else ' '} {tokenizer.decode([token])!r}"
    else:
        yield marked(document, tokenizer)


def marked(document: Document, tokenizer: Any) -> str:
    """The document's text, each supervised span between marks."""
    out, at = [], 0
    for start, end in document.spans:
        out.append(tokenizer.decode(document.tokens[at:start].tolist()))
        out.append(MARKS[0] + tokenizer.decode(document.tokens[start:end].tolist()) + MARKS[1])
        at = end
    return "".join([*out, tokenizer.decode(document.tokens[at:].tolist())])


def stats(config: Config, plot: Path | None = None) -> Iterator[str]:
    """Counts, shares, lengths; and the histogram as PNG."""
    store = Store(config.store)
    manifest, lengths = store.manifest, store.lengths
    tokens, supervised = int(lengths.sum()), sum(s.supervised for s in manifest.shards)
    counts = {k: v for k, v in manifest.counts.items() if v}
    yield f"{store.path}: generation {manifest.generation}, {len(manifest.shards)} shards, {manifest.fingerprint[:12]}"
    yield f"{'documents':28}{len(store):>14,}"
    yield f"{'tokens':28}{tokens:>14,}   {tokens / len(store):.1f} a document"
    yield f"{'supervised':28}{supervised:>14,}   {supervised / tokens:.1%} of the tokens"
    yield f"{'held out':28}{int(store.heldout.sum()):>14,}   {store.heldout.mean():.1%} of the documents"
    yield f"{'without an anchor':28}{int((store.eligible == 0).sum()):>14,}"
    yield "conversations"
    for key in (k for k in counts if k in BESIDE):
        yield f"  {key.replace('_', ' '):26}{counts[key]:>14,}"
    yield "left out"
    for key in (k for k in counts if k not in BESIDE):
        yield f"  {key.replace('_', ' '):26}{counts[key]:>14,}"
    yield "sources"
    for name, digest in manifest.sources.items():
        yield f"  {name}  {digest[:12]}"
    yield f"lengths in tokens (median {int(np.median(lengths))}, longest {int(lengths.max())})"
    yield from histogram(lengths)
    row_tokens, usable = config.train.row_tokens, ~store.heldout & (store.eligible > 0)
    if usable.any() and int(lengths[usable].max()) <= row_tokens:
        chosen = lengths[usable]
        rows = len(plan_epoch(np.flatnonzero(usable), chosen, row_tokens, config.train.seed, 0))
        # two documents of more than half a row never share one
        least = max(-(-int(chosen.sum()) // row_tokens), int((chosen > row_tokens // 2).sum()))
        yield (
            f"{'rows of ' + str(row_tokens):28}{rows:>14,}   {chosen.sum() / (rows * row_tokens):.2%} full "
            f"(at best {min(1.0, chosen.sum() / (least * row_tokens)):.2%})"
        )
    path = plot or config.data / "lengths.png"
    _plot(lengths, path)
    yield f"plot: {path}"


def histogram(lengths: np.ndarray) -> Iterator[str]:
    """A bar a line."""
    counts, edges = np.histogram(lengths, bins=min(BARS, max(1, int(np.ptp(lengths)))))
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        yield f"  {int(low):>8} - {int(high):<8}{int(count):>10,} {'#' * round(50 * count / counts.max())}"


def _plot(lengths: np.ndarray, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="tokens in a document", ylabel="documents")
    axes.hist(lengths, bins=60)
    axes.grid(alpha=0.3)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write the plot {path} ({error})") from error


def check(config: Config) -> str:
    """Raises InputError that names what is not as it was written."""
    wrong = verify(config.store)
    if wrong:
        raise InputError(f"{'; '.join(wrong)}: restore it from a copy, or remove {config.store} and tokenize again")
    manifest = Store(config.store).manifest
    return f"{config.store}: every shard of {manifest.generation} generation(s) is as it was written"


def data(config: Config, command: str, arguments: dict[str, Any]) -> None:
    """What the command line calls."""
    if command == "verify":
        print(check(config))
    elif command == "append":
        from draftsmith.data.store import read_manifest
        from draftsmith.data.tokenize import append, counts_since

        before = read_manifest(config.store)
        after = append(config, arguments["sources"] or ())
        print(f"{config.store}: {describe(after)}")
        new = {k: v for k, v in counts_since(before, after).items() if v}
        word = "nothing new" if after.generation == before.generation else f"generation {after.generation}"
        print(f"{word}: {new}")
    else:
        lines = (
            stats(config, arguments["plot"])
            if command == "stats"
            else show(config, arguments["sample"], arguments["id"], arguments["tokens"])
        )
        for line in lines:
            sys.stdout.write(line + "\n")
