"""What `flexgen-helm plan` plans for: the model, the machine and the limits that its flags name."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import warn_of_limits_beyond
from flexgen_helm.config import EngineConfig, EngineOptions
from flexgen_helm.errors import UsageError
from flexgen_helm.files import existing_folder, require_writable
from flexgen_helm.units import size

if TYPE_CHECKING:
    from flexgen_helm.hardware.profile import HardwareProfile
    from flexgen_helm.planner.problem import PlanningProblem


@dataclass(frozen=True)
class PlanOptions:
    """What is to be planned, and how it is shown.

    engine: options of the engine flags.
    hardware: name or file of the machine.
    stages: machines of a pipeline.
    """

    engine: EngineOptions
    model: str
    hardware: str
    stages: int
    as_json: bool

    @cached_property
    def config(self) -> EngineConfig:
        return EngineConfig(**self.engine)

    @cached_property
    def precision(self) -> str:
        """Name of the precision of the flags or of the model's name."""
        from flexgen_helm.checkpoint.names import resolve
        from flexgen_helm.quant.precisions import Precision, precision_named

        assert not isinstance(self.config.precision, Precision)  # flags are text
        return precision_named(
            self.config.precision or str(resolve(self.model).options.get("precision", "fp16"))
        ).name

    @property
    def compares(self) -> bool:
        """Whether to show other precisions: where none was asked for, and the plan is searched."""
        return (
            self.config.fixed_policy is None
            and self.precision == "fp16"
            and self.config.precision is None
        )

    @cached_property
    def helm_name(self) -> str | None:
        """The model's name in run entries, to which --precision adds its own; None for a path: HELM
        knows names.
        """
        from flexgen_helm.checkpoint.suffixes import PREFIX, split_precision

        if Path(self.model).expanduser().exists():
            return None
        return PREFIX + split_precision(self.model.removeprefix(PREFIX))[0].replace("/", "--")


def problem_for(
    options: PlanOptions, prompt_len: int = 1, gen_len: int = 1, num_seqs: int | None = None
) -> PlanningProblem:
    """Return the planning problem of a uniform workload; num_seqs: None for one without end."""
    from flexgen_helm.checkpoint.planned_weights import planned_precision, read_model_config
    from flexgen_helm.hardware.device_profile import profile_for_device
    from flexgen_helm.hardware.profile import MEASURED
    from flexgen_helm.planner.plan import planning_problem
    from flexgen_helm.planner.workload import Workload

    config, model = options.config, options.model
    for flag, value in (
        ("--prompt-len", prompt_len),
        ("--gen-len", gen_len),
        ("--num-seqs", num_seqs),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value} is too small; it must be 1 or more")
    model_config, dtype = read_model_config(model)
    if prompt_len + gen_len > model_config.max_positions + 1:  # the last token is never fed
        raise UsageError(
            f"{prompt_len} + {gen_len} tokens are beyond the {model_config.max_positions} "
            f"positions of {model}"
        )
    profile = profile_for(config, options.hardware)
    machine = "this machine" if profile.name == MEASURED else profile.name
    profile = profile_for_device(
        profile, config.device, config.link_gb_s, config.disk_gb_s, "take --device cpu"
    )
    gpu_bytes = 0.0 if profile.gpu is None else profile.gpu.memory_bytes
    warn_of_limits_beyond(config.limits, gpu_bytes, profile.cpu.memory_bytes, machine)
    allowed = config.limits if gpu_bytes else replace(config.limits, gpu=None)
    problem = planning_problem(
        model_config,
        profile,
        Workload.uniform(prompt_len, gen_len, num_seqs or 1),
        limits=allowed,
        # weights that are not read have no published formats
        precision=options.precision
        if config.weights == "dummy"
        else planned_precision(model, options.precision),
        storage_dtype=dtype,
        overlap=config.overlap,
        cpu_attention=config.cpu_attention,
        endless=num_seqs is None,
        ranks=options.stages,
    )
    # This limit holds for computing, too, but for "sim", which computes on the host.
    if config.device != "sim" and allowed.gpu is not None:
        room = problem.workspace.room_beside(allowed.gpu)
        problem = replace(problem, limits={**problem.limits, "gpu": float(room)})
    memory = problem.limits["gpu"] + problem.limits["cpu"]
    may_use_disk = config.fixed_policy is not None or problem.stored_bytes > memory
    if options.hardware == MEASURED and may_use_disk:
        return _with_room_of_written_weights(problem, options)
    return problem  # PyTorch, which opens weights, is not imported


def _with_room_of_written_weights(
    problem: PlanningProblem, options: PlanOptions
) -> PlanningProblem:
    """Return the problem with room for weights of the model that this machine's disk has
    already.
    """
    from flexgen_helm.checkpoint.names import resolve
    from flexgen_helm.offload.weights_at_rest import bytes_at_rest

    config = options.config
    model, folder = resolve(options.model), _offload_folder(config)
    at_rest = bytes_at_rest(model, problem.precision, folder, config)
    if not at_rest:
        return problem
    say(f"the disk has {size(at_rest)} of these weights already, which need no more room")
    disk = replace(problem.hardware.disk, bytes=problem.hardware.disk.bytes + at_rest)
    limits = {**problem.limits, "disk": problem.limits["disk"] + at_rest}
    return replace(problem, hardware=replace(problem.hardware, disk=disk), limits=limits)


def _offload_folder(config: EngineConfig) -> Path:
    from flexgen_helm.paths import state_dir

    return state_dir() / "offload" if config.offload_dir is None else Path(config.offload_dir)


def profile_for(config: EngineConfig, hardware: str) -> HardwareProfile:
    """Return the machine to plan for; this machine with the memory that is free now, and the disk
    of --offload-dir with what is free there.
    """
    from flexgen_helm.engine.machine_profile import measured_profile, profile_named
    from flexgen_helm.hardware.host_memory import host_memory
    from flexgen_helm.hardware.profile import MEASURED

    if hardware != MEASURED:
        if config.offload_dir is not None:
            raise UsageError(
                f"--offload-dir is a folder of this machine, not of {hardware}; leave one of them "
                "out"
            )
        profile = profile_named(hardware)
        # a file that `flexgen-helm profile -o FILE` wrote, perhaps on another machine
        return replace(profile, name=hardware) if profile.name == MEASURED else profile
    folder = _offload_folder(config)
    require_writable(
        folder, "--offload-dir" if config.offload_dir is not None else "FLEXGEN_HELM_HOME"
    )
    profile = measured_profile(folder=folder)
    return replace(
        profile,
        cpu=replace(profile.cpu, memory_bytes=host_memory().available),
        disk=replace(profile.disk, bytes=shutil.disk_usage(existing_folder(folder)).free),
    )
