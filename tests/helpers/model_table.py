"""The README's table of models, from the tests' own tiny models: `python -m tests.helpers.model_table` rewrites it.

For every family: what its tiny models switch on, and the largest difference of a log-probability between the engine
and `transformers` over all of them (prompts of up to 90 tokens side by side, scoring and greedy decoding).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flexgen_helm.checkpoint.folder import read_config
from flexgen_helm.checkpoint.names import CATALOG
from flexgen_helm.models.architectures import ARCHITECTURES
from flexgen_helm.models.config import ModelConfig
from tests.helpers.paths import ROOT

README = ROOT / "docs" / "models.md"  # the page of the table
BEGIN, END = "<!-- model table: make model-table -->", "<!-- end of the model table -->"
HEAD = "| architecture | GGUF | in the catalogue | features tested | largest difference |"


def features(spec: ModelConfig) -> Iterator[str]:
    """What this model switches on, in the field's words."""
    if spec.num_kv_heads < spec.num_heads:
        yield "grouped keys"
    if spec.windows:
        yield "sliding windows" if None not in spec.windows else "windows in some layers"
    if spec.rope is not None:
        if spec.rope.kind != "default":
            yield {"factors": "longrope"}.get(spec.rope.kind, spec.rope.kind) + " scaling"
        if spec.rope.dim is not None:
            yield "partial rotary"
    if spec.local_rope is not None:
        yield "two rotary bases"
    if spec.learned_positions:
        yield "learned positions"
    if spec.alibi:
        yield "ALiBi"
    if spec.qk_norm:
        yield "q/k norm"
    if spec.attn_softcap or spec.final_softcap:
        yield "soft caps"
    if spec.experts is not None:
        yield "experts, dense layers between" if spec.experts.dense_layers else "experts"
    if spec.residual != "pre_norm":
        kinds = {"post_norm": "post-norm", "sandwich": "norms on both sides", "parallel": "parallel residual"}
        yield kinds.get(spec.residual, spec.residual)
    if spec.embed_size != spec.hidden_size:
        yield "embedding projections"
    if spec.embed_norm:
        yield "embedding norm"
    if spec.qkv_bias or spec.mlp_bias:
        yield "biases"
    if not spec.norm_affine:
        yield "bare norms"
    yield "tied head" if spec.tied_head else "own head"


def table(differences: dict[str, float], tested: dict[str, list[ModelConfig]]) -> str:
    """Markdown; a family without a tiny model has no line and is not supported."""
    lines = [HEAD, "|---|---|---|---|---|"]
    for name, family in ARCHITECTURES.items():
        known = sorted((e for e in CATALOG.values() if e.config.architecture == name), key=lambda e: e.num_parameters)
        listed = f"`{known[0].name}` to `{known[-1].name}` ({len(known)})" if known else "by hub name or folder"
        switched = dict.fromkeys(feature for spec in tested[name] for feature in features(spec))
        formats = ", ".join(f"`{arch}`" for arch in family.gguf_architectures) or "no"
        found = f"{differences[name]:.1e}" if name in differences else ""
        lines.append(f"| `{family.architectures[0]}` | {formats} | {listed} | {', '.join(switched)} | {found} |")
    return "\n".join(lines)


def measure() -> tuple[dict[str, float], dict[str, list[ModelConfig]]]:
    """Largest difference and specs by family, over all tiny models."""
    import torch

    from flexgen_helm import Engine, GenerationRequest
    from tests.helpers.parity import prompts
    from tests.helpers.tiny_models import VARIANTS, build_tiny

    torch.set_num_threads(1)
    differences: dict[str, float] = {}
    tested: dict[str, list[ModelConfig]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            model = build_tiny(Path(scratch) / variant, variant)
            asked = prompts(17, 70, seed=17)
            requests = [GenerationRequest(prompt_token_ids=p, max_tokens=20, echo_logprobs=True) for p in asked]
            with Engine.from_pretrained(model.path) as engine:
                results, spec = engine.run(requests), engine.config
            worst = 0.0
            for prompt, result in zip(asked, results):
                ids = prompt + list(result.completions[0].token_ids)
                reference = model.logprobs(ids)
                found = [*result.prompt_logprobs[1:], *result.completions[0].logprobs]
                worst = max(worst, *(abs(x - reference[i, t].item()) for i, (x, t) in enumerate(zip(found, ids[1:]))))
            print(f"{variant:32s} {worst:.1e}", flush=True)
            differences[spec.architecture] = max(worst, differences.get(spec.architecture, 0.0))
            tested.setdefault(spec.architecture, []).append(spec)
    return differences, tested


def specs_tested(folders: dict[str, Path]) -> dict[str, list[ModelConfig]]:
    """Specs by family, read from the tiny models' folders."""
    tested: dict[str, list[ModelConfig]] = {}
    for folder in folders.values():
        family, spec, _ = read_config(folder)
        tested.setdefault(family.name, []).append(spec)
    return tested


def in_readme() -> str:
    return README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{table(*measure())}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
