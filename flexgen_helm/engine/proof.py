"""A model proves itself where it is opened: a small one of its kind equals `transformers`, or it is
refused.

    key            what decides: kind of configuration, class, files of transformers, our models/,
                   torch; on a GPU also the GPU, its driver, and our modules that compute or copy
                   there
    proved         by CI (`proved.json`), or here before (`proofs.json` in the home folder): nothing
                   is computed
    else           a small model runs, whole by `transformers` on the host, and by the engine, both
                   in float32
    equal          with the first seed: remembered; else two more are tried, and if two of three
                   differ: refused by name

What the small model (`small_model`) does not reach on a GPU, kernels of 16 bits and of packed
weights, every process compares with plain PyTorch before it uses it (`kernel_checks`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flexgen_helm.engine.opening import OpenedModel
from flexgen_helm.engine.small_model import (
    FOLDER_PREFIX,
    HOST,
    SEEDS,
    difference_of_miniature,
    is_proving,
)
from flexgen_helm.errors import Interrupted, UnprovedModelError
from flexgen_helm.identity import own_digest
from flexgen_helm.models.config import ModelConfig
from flexgen_helm.models.miniature import kind_text
from flexgen_helm.paths import read_state, state_dir, state_lock, update_state
from flexgen_helm.progress import ProgressPhase, report
from flexgen_helm.system_errors import system_error

if TYPE_CHECKING:
    from flexgen_helm.engine.engine import Engine

# Largest difference of a log-probability in nats; of a GPU, whose libraries sum in other orders.
TOLERANCE, _DEVICE_TOLERANCE = 1e-4, 1e-3
_PROOFS = "proofs.json"
_TABLE = Path(__file__).with_name("proved.json")


@dataclass(frozen=True)
class ProofKey:
    """What decides whether a model's values are right.

    class_name: of `transformers`, or the architecture of a record of our own.
    code: digest of `transformers`' files; "" where a record of our own computes.
    kind: of the configuration (`kind_text`).
    device: all else that decides on a GPU; "" where the host computes.
    """

    class_name: str
    code: str
    kind: str
    device: str = ""

    @property
    def digest(self) -> str:
        """A name for all that decides; our own modules and PyTorch included."""
        parts = [
            self.class_name,
            self.code,
            self.kind,
            own_digest("models"),
            torch.__version__.partition("+")[0],
        ]
        parts += [self.device] if self.device else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def proof_key(
    content: Mapping[str, Any], config: ModelConfig, device: torch.device = HOST
) -> ProofKey:
    """Return the key of a model; content: of `config.json`."""
    return ProofKey(
        config.class_name, config.values_digest, kind_text(content), _device_text(device)
    )


@cache
def _device_text(device: torch.device) -> str:
    """Name the GPU, its driver, and our code that computes or copies there; "" for the host."""
    if device.type == "cpu":
        return ""
    driver = Path("/proc/driver/nvidia/version")
    return "; ".join(
        (
            torch.cuda.get_device_name(device),
            driver.read_text(encoding="utf-8").partition("\n")[0] if driver.is_file() else "",
            *map(own_digest, ("engine", "kernels", "kv_cache", "offload")),
        )
    )


@cache
def proved_table() -> dict[str, Any]:
    """Return `proved.json`: `digests` that CI has proved, and `tested`, releases by package."""
    table: dict[str, Any] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table


def require_proof(model: OpenedModel, engine_class: type[Engine]) -> bool | None:
    """Prove a model where that has not been done, and return whether it is; None where there is
    nothing to compare.

    With `--unverified` nothing is computed, and what is not proved passes.

    engine_class: computes the small model; `Engine` proves models itself, and so is no import of
        this module.
    Raises `UnprovedModelError` for a model that differs from `transformers`, or cannot be compared.
    """
    content = model.checkpoint.config_content
    # GGUF files have no such configuration, dummy weights no values
    if content is None or is_proving.get():
        return None
    key = proof_key(content, model.checkpoint.config, model.device)
    if is_proved(key):
        return True
    if model.options.unverified:
        return False
    # Other processes with the same home wait; in a home that cannot be written, each proves for
    # itself.
    with state_lock(f"{_PROOFS}.running"):
        for folder in state_dir().glob(f"{FOLDER_PREFIX}*"):  # of a process that was killed
            shutil.rmtree(folder, ignore_errors=True)
        if not is_proved(key):  # by another process meanwhile
            report(ProgressPhase("prove", model.name))
            _prove(key, content, model, engine_class)
    return True


def is_proved(key: ProofKey) -> bool:
    """Return whether CI has proved it, or this machine before."""
    return key.digest in proved_table()["digests"] or key.digest in read_state(_PROOFS)


def _prove(
    key: ProofKey, content: Mapping[str, Any], model: OpenedModel, engine_class: type[Engine]
) -> None:
    """Compare small models with up to three seeds, and remember that they are equal. Raises as
    `require_proof` does.
    """
    config, name, device = model.checkpoint.config, model.name, model.device
    tolerance = TOLERANCE if device.type == "cpu" else _DEVICE_TOLERANCE
    differences: list[float] = []
    for seed in SEEDS:
        try:
            differences.append(difference_of_miniature(content, config, seed, engine_class, device))
        except Interrupted:
            raise
        except Exception as error:  # whatever building or running a model raises
            if system_error(error):
                raise
            reason = str(error).partition("\n")[0][:200] or type(error).__name__
            raise _refusal(
                key, name, f"could not be compared with transformers' own forward pass: {reason}"
            ) from error
        if differences[0] < tolerance:  # of the first seed
            break
    # not `>=`: nan is wrong, too
    wrong = [difference for difference in differences if not difference < tolerance]
    if len(wrong) > 1:
        largest = max(filter(math.isfinite, wrong), default=math.nan)
        raise _refusal(
            key, name, f"differs from transformers' own forward pass by up to {largest:.2g} nats"
        )
    proved = {"class": key.class_name, "difference": min(differences), **_versions()}
    update_state(_PROOFS, lambda content: content.update({key.digest: proved}))


def _refusal(key: ProofKey, name: str, what: str) -> UnprovedModelError:
    versions = " and ".join(f"{package} {version}" for package, version in _versions().items())
    known, where, advice = proved_table()["tested"], "", ""
    if key.device:
        where, advice = " on this GPU", "take --device cpu, "
    return UnprovedModelError(
        f"{name} ({key.class_name}) is not computed with {versions}{where}: a small model of its "
        f"kind {what}; install transformers {known['transformers'][-1]} with torch "
        f"{known['torch'][-1]}, which are tested, {advice}or add --unverified to compute it all "
        "the same"
    )


def _versions() -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in ("transformers", "torch")}
