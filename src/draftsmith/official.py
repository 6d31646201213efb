"""The official package's side of `gate parity`.  Runs under another environment's python and imports nothing of ours.

    OFFICIAL_PYTHON official.py WORK      reads WORK/job.json, in.safetensors; writes out.json, out.safetensors

Facts used (dflash 0.1.0): `DFlashDraftModel` takes the features of the whole context and one block a call; its
generation loop synchronises CUDA when asked for statistics, which is replaced by a plain clock.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path


def main(work: Path) -> None:
    import torch
    from dflash import model as official  # type: ignore[import-not-found]
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    official._cuda_time = time.perf_counter
    job = json.loads((work / "job.json").read_text())
    given = load_file(work / "in.safetensors")
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    drafter, info = official.DFlashDraftModel.from_pretrained(
        job["drafter"], dtype=torch.float32, output_loading_info=True
    )
    drafter.eval()
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], f"{kind}: {info[kind]}"

    tokens, accepted = [], []
    for prompt in job["prompts"]:
        out = official.dflash_generate(
            drafter, target, torch.tensor([prompt]), job["max_new_tokens"], job["eos"], return_stats=True
        )
        tokens.append(out.output_ids[0, len(prompt) :].tolist())
        accepted.append(list(out.acceptance_lengths))

    with torch.inference_mode():
        sequence = given["tokens"][None]
        states = target(sequence, output_hidden_states=True).hidden_states
        features = official.extract_context_feature(states, drafter.target_layer_ids)[0]
        scale = (drafter.config.dflash_config or {}).get("input_embedding_scale") or 1.0
        size, hidden, logits = drafter.block_size, [], []
        for anchor in job["anchors"]:
            block = torch.full((1, size), drafter.mask_token_id)
            block[0, 0] = given["tokens"][anchor]
            out = drafter(
                position_ids=torch.arange(anchor + size)[None],
                noise_embedding=official._raw_input_embeddings(target, block, scale),
                target_hidden=given["features"][None, :anchor],
            )
            hidden.append(out[0].clone())
            logits.append(drafter.compute_logits(out[:, 1:], target.lm_head)[0].clone())
    save_file(
        {"features": features.clone().contiguous(), "hidden": torch.stack(hidden), "logits": torch.stack(logits)},
        work / "out.safetensors",
    )
    versions = {p: importlib.metadata.version(p) for p in ("dflash", "torch", "transformers")}
    (work / "out.json").write_text(json.dumps({"tokens": tokens, "accepted": accepted, "versions": versions}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
