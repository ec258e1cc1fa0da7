"""The table of docs/models.md, from the tests' own tiny models:
`python -m tests.helpers.model_table` rewrites it.

For every architecture: what its tiny models switch on, and the largest difference of a
log-probability between the engine and `transformers` over all of them (prompts of up to 90 tokens
in one batch, scoring and greedy decoding).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from flexgen_helm.checkpoint.catalog import CATALOG
from flexgen_helm.checkpoint.folder import read_config
from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.decoder_config import DecoderConfig
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs/models.md"
BEGIN, END = "<!-- model table: make model-table -->", "<!-- end of the model table -->"
HEAD = "| architecture | GGUF | in the catalog | features tested | largest difference |"

# What a field that differs from its default is called; without an entry by its own name. Empty: not
# shown.
WORDS = {
    "residual": {
        "post_norm": "post-norm",
        "sandwich": "norms on both sides",
        "parallel": "parallel residual",
        "reordered_norm": "norms behind both blocks",
    },
    "norm_affine": "norms without weights",
    "final_norm": "",
    "norm_bias": "norms without biases",
    "qkv_bias": "biases",
    "out_bias": "biases",
    "mlp_bias": "biases",
    "tied_head": "",
    "position_offset": "",
    "qk_norm": "q/k norm",
    "qk_norm_all_heads": "q/k norm over all heads",
    "local_rope": "two rotary bases",
    "alibi": "ALiBi",
    "embed_norm": "embedding norm",
    "embed_scale": "scaled embeddings",
    "norm_plus_one": "norms of 1 + weight",
    "attn_scale": "own attention scale",
    "attn_softcap": "soft caps",
    "final_softcap": "soft caps",
}


def features(config: DecoderConfig) -> Iterator[str]:
    """What this model switches on, in the field's words."""
    if config.num_kv_heads < config.num_heads:
        yield "grouped keys"
    if config.learned_positions:
        yield "learned positions"
    if config.rope is not None and config.rope.kind != "default":
        yield {"factors": "longrope"}.get(config.rope.kind, config.rope.kind) + " scaling"
    if config.rope is not None and config.rope.dim is not None:
        yield "partial rotary"
    if config.projects_embeddings:
        yield "embedding projections"
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is MISSING or value == field.default:
            continue
        words = WORDS.get(field.name, field.name.replace("_", " "))
        if field.name == "windows":
            words = "windows in some layers" if None in config.windows else "sliding windows"
        if config.experts is not None and field.name == "experts" and config.experts.dense_layers:
            words = "experts, dense layers between"
        if words:
            yield words if isinstance(words, str) else words.get(value, value)
    yield "tied head" if config.tied_head else "own head"


def table(differences: dict[str, float], tested: dict[str, list[DecoderConfig]]) -> str:
    """Markdown; every architecture must have a tiny model."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for name, architecture in ARCHITECTURES.items():
        entries = [entry for entry in CATALOG.values() if entry.config.architecture == name]
        entries.sort(key=lambda entry: entry.config.num_parameters)
        listed = (
            f"`{entries[0].name}` to `{entries[-1].name}` ({len(entries)})"
            if entries
            else "by hub name or folder"
        )
        assert name in tested, (
            f"{name} has no tiny model: add one to VARIANTS in tests/helpers/tiny_models.py"
        )
        switched_on = dict.fromkeys(
            feature for config in tested[name] for feature in features(config)
        )
        gguf = ", ".join(f"`{gguf_name}`" for gguf_name in architecture.gguf_names) or "no"
        difference = f"{differences[name]:.1e}" if name in differences else ""
        lines.append(
            f"| `{architecture.hf_names[0]}` | {gguf} | {listed} | {', '.join(switched_on)} | "
            f"{difference} |"
        )
    return "\n".join(lines)


def measure() -> tuple[dict[str, float], dict[str, list[DecoderConfig]]]:
    """Largest difference and records by architecture, over all tiny models."""
    import torch

    from flexgen_helm import Engine, GenerationRequest
    from tests.helpers.parity import differences, prompts
    from tests.helpers.tiny_models import VARIANTS, build_tiny

    torch.set_num_threads(1)
    largest: dict[str, float] = {}
    tested: dict[str, list[DecoderConfig]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            model = build_tiny(Path(scratch) / variant, variant)
            token_ids = prompts(17, 70, seed=17)
            requests = [
                GenerationRequest(prompt_token_ids=p, max_tokens=20, echo_logprobs=True)
                for p in token_ids
            ]
            with Engine.from_pretrained(model.path) as engine:
                results, config = engine.run(requests), engine.model_config
            compared = (differences(model.logprobs, *pair) for pair in zip(token_ids, results))
            worst = max(difference for of_prompt in compared for difference in of_prompt)
            print(f"{variant:32s} {worst:.1e}", flush=True)
            largest[config.architecture] = max(worst, largest.get(config.architecture, 0.0))
            tested.setdefault(config.architecture, []).append(config)
    return largest, tested


def tested_configs(folders: Iterable[Path]) -> dict[str, list[DecoderConfig]]:
    """Records by architecture, read from the tiny models' folders."""
    tested: dict[str, list[DecoderConfig]] = {}
    for folder in folders:
        architecture, config, _ = read_config(folder)
        tested.setdefault(architecture.name, []).append(config)
    return tested


def written_table() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def rewrite(page: Path, begin: str, end: str, text: str) -> None:
    """Put a text between two lines of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rewrite(PAGE, BEGIN, END, table(*measure()))
