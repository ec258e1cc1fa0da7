"""A request by token ids, for prompts that text cannot carry: a window of a document may begin inside a word."""

from __future__ import annotations

from dataclasses import dataclass, field

from helm.common.request import Request


@dataclass(frozen=True)
class TokenRequest(Request):
    """Our client takes `prompt_token_ids` as they are, without BOS; `prompt` is their text, for people and for
    HELM's token counts. HELM hands requests on untouched, and writes the ids beside the prompt into its files."""

    prompt_token_ids: tuple[int, ...] = field(default=(), repr=False)  # HELM puts the request into error messages
