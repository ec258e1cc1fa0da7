"""An entry that a `config.json` leaves out has the value that `transformers` gives it.

`save_pretrained` writes every entry, so no test of a saved model reaches these defaults. Published
files omit some.
"""

from dataclasses import replace

import pytest

from flexgen_helm.errors import FlexgenError
from flexgen_helm.models.architectures import architecture_of_config
from flexgen_helm.models.config import MoEConfig
from flexgen_helm.models.config_check import check_config
from flexgen_helm.models.decoder_config import RopeConfig
from tests.helpers.tiny_models import VARIANTS

# Every published file has them, and our reader requires them.
ALWAYS_THERE = {
    "model_type",
    "architectures",
    "vocab_size",
    "transformers_version",
    "torch_dtype",
    "dtype",
}


def read(config):
    """Our record of a configuration, or the kind of error that refuses it."""
    try:
        return architecture_of_config(config).read_config(config)
    except (FlexgenError, KeyError) as error:
        return type(error).__name__


@pytest.mark.parametrize("name", VARIANTS)
def test_an_absent_entry_means_what_transformers_takes_it_for(name):
    config = VARIANTS[name]()
    saved = config.to_dict()
    wrong = {}
    for key in saved.keys() - ALWAYS_THERE:
        without = {name: value for name, value in saved.items() if name != key}
        try:
            completed = type(config).from_dict(dict(without)).to_dict()
        except Exception:  # transformers itself needs the entry
            continue
        ours = read(without)
        if ours != "KeyError" and ours != read(completed):
            wrong[key] = completed.get(key)
    assert not wrong, f"these defaults differ from those of transformers: {wrong}"


WRONG = [
    {"num_layers": 2.0}, {"num_layers": True}, {"norm_eps": "1e-5"}, {"norm_eps": None},
    {"norm_eps": float("nan")}, {"gated_mlp": 1}, {"activation": "tanh"}, {"windows": [4]},
    {"windows": (4, "4")}, {"attn_softcap": False}, {"rope": RopeConfig(factors=(1, "2"))},
    {"experts": MoEConfig(4, 2, 8, dense_layers=(None,))},
]  # fmt: skip


@pytest.mark.parametrize("entries", WRONG, ids=str)
def test_a_value_of_another_type_is_refused_with_the_name_of_its_entry(entries):
    """No number is a bool or text, nor the other way round; a whole number may stand for another
    one.
    """
    content = VARIANTS["llama"]().to_dict()
    config = architecture_of_config({**content, "architectures": ["LlamaForCausalLM"]}).read_config(
        content
    )
    check_config(replace(config, norm_eps=1, windows=(4, None)))
    inner = {"rope": "factors", "experts": "dense layers"}
    (name,) = entries
    with pytest.raises(ValueError, match=f"^{inner.get(name, name.replace('_', ' '))} is "):
        check_config(replace(config, **entries))
