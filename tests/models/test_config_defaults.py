"""An entry that a `config.json` leaves out has the value that `transformers` gives it.

`save_pretrained` writes every entry, so no test of a saved model reaches these defaults. Published files omit some.
"""

from __future__ import annotations

from typing import Any

import pytest

from flexgen_helm.errors import FlexgenError
from flexgen_helm.models.architectures import architecture_of_config
from flexgen_helm.models.decoder_config import DecoderConfig
from tests.helpers.tiny_models import VARIANTS

# Every published file has them, and our reader requires them.
ALWAYS_THERE = {"model_type", "architectures", "vocab_size", "transformers_version", "torch_dtype", "dtype"}


def read(config: dict[str, Any]) -> DecoderConfig | str:
    """Our record of a configuration, or the kind of error that refuses it."""
    try:
        return architecture_of_config(config).read_config(config)
    except (FlexgenError, KeyError) as error:
        return type(error).__name__


@pytest.mark.parametrize("name", VARIANTS)
def test_an_absent_entry_means_what_transformers_takes_it_for(name: str) -> None:
    config = VARIANTS[name]()
    saved = config.to_dict()
    wrong = {}
    for key in saved.keys() - ALWAYS_THERE:
        without = {other: value for other, value in saved.items() if other != key}
        try:
            completed = type(config).from_dict(dict(without)).to_dict()
        except Exception:  # transformers itself needs the entry
            continue
        ours = read(without)
        if ours != "KeyError" and ours != read(completed):
            wrong[key] = completed.get(key)
    assert not wrong, f"these defaults differ from those of transformers: {wrong}"
