"""What `flexgen-helm plan` plans for: the model, the machine and the limits that its flags name."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import say_what_limits_lack
from flexgen_helm.config import EngineConfig
from flexgen_helm.errors import UsageError
from flexgen_helm.files import existing_folder, require_writable
from flexgen_helm.units import size

if TYPE_CHECKING:
    from flexgen_helm.hardware.profile import HardwareProfile
    from flexgen_helm.planner.problem import PlanningProblem


def precision_name(config: EngineConfig, model: str) -> str:
    """Return the precision of the flags or of the model's name."""
    from flexgen_helm.checkpoint.names import resolve
    from flexgen_helm.quant.precisions import Precision, precision_named

    assert not isinstance(config.precision, Precision)  # flags are text
    return precision_named(config.precision or str(resolve(model).options.get("precision", "fp16"))).name


def problem_for(
    config: EngineConfig,
    model: str,
    prompt_len: int,
    gen_len: int,
    num_seqs: int | None,
    hardware: str,
    precision: str,
    stages: int,
) -> PlanningProblem:
    from flexgen_helm.checkpoint.names import read_model_config
    from flexgen_helm.planner.plan import planning_problem, simulated_gpu
    from flexgen_helm.planner.problem import MEASURED
    from flexgen_helm.planner.workload import Workload

    for flag, value in (("--prompt-len", prompt_len), ("--gen-len", gen_len), ("--num-seqs", num_seqs)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is no length; it must be 1 or more")
    model_config, dtype = read_model_config(model)
    if prompt_len + gen_len > model_config.max_positions:
        raise UsageError(
            f"{prompt_len} + {gen_len} tokens are beyond the {model_config.max_positions} positions of {model}"
        )
    profile = profile_for(config, hardware)
    machine = "this machine" if profile.name == MEASURED else profile.name
    if config.device == "sim":
        profile = simulated_gpu(profile, config.link_gb_s, config.disk_gb_s)
    elif config.device.startswith("cpu"):
        profile = replace(profile, gpu=None, link=None)
    elif config.device.startswith("cuda") and profile.gpu is None:
        raise UsageError(f"device {config.device!r} was asked for and {machine} has no usable GPU; take --device cpu")
    say_what_limits_lack(config.limits, profile.gpu is not None, profile.cpu.memory_bytes, machine)
    problem = planning_problem(
        model_config,
        profile,
        Workload.uniform(prompt_len, gen_len, num_seqs or 1),
        precision=precision,
        storage_dtype=dtype,
        limits=config.limits,
        overlap=config.overlap,
        cpu_attention=config.cpu_attention,
        endless=num_seqs is None,
        counts_workspace=config.device != "sim",
    )
    problem = replace(problem, stages=stages)
    return _with_room_of_weights(problem, config, model) if hardware == "measured" else problem


def _with_room_of_weights(problem: PlanningProblem, config: EngineConfig, model: str) -> PlanningProblem:
    """Return the problem with more disk where this machine's disk has weights of the model already, as a run has."""
    memory = sum(problem.limits[tier] for tier in ("gpu", "cpu"))
    if config.fixed_policy is None and problem.stored_bytes <= memory:
        return problem  # and PyTorch, which opens weights, is not imported
    from flexgen_helm.checkpoint.names import resolve
    from flexgen_helm.offload.at_rest import bytes_at_rest

    disk, limit = problem.hardware.disk, config.limits.disk
    at_rest = bytes_at_rest(
        resolve(model), problem.precision, _offload_folder(config), limit is None, config.weights, config.seed
    )
    if not at_rest:
        return problem
    say(f"the disk has {size(at_rest)} of these weights already, which need no more room")
    hardware = replace(problem.hardware, disk=replace(disk, bytes=disk.bytes + at_rest))
    limits = {**problem.limits, "disk": problem.limits["disk"] + at_rest}
    return replace(problem, hardware=hardware, limits=limits)


def _offload_folder(config: EngineConfig) -> Path:
    from flexgen_helm.checkpoint.paths import state_dir

    return state_dir() / "offload" if config.offload_dir is None else Path(config.offload_dir)


def profile_for(config: EngineConfig, hardware: str) -> HardwareProfile:
    """Return the machine to plan for; this machine's disk is that of --offload-dir, with what is free there now."""
    from flexgen_helm.engine.machine_profile import measured_profile, profile_named

    if hardware != "measured":
        if config.offload_dir is not None:
            raise UsageError(f"--offload-dir is a folder of this machine, not of {hardware}; leave one of them out")
        return profile_named(hardware)
    folder = _offload_folder(config)
    require_writable(folder, "--offload-dir" if config.offload_dir is not None else "FLEXGEN_HELM_HOME")
    profile = measured_profile(folder=folder)
    return replace(profile, disk=replace(profile.disk, bytes=shutil.disk_usage(existing_folder(folder)).free))
