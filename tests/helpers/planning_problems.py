"""A small model on a simulated machine, to plan for."""

from __future__ import annotations

from dataclasses import replace

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.hardware.device_profile import simulated_gpu
from flexgen_helm.hardware.profile import load_profile
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.workload import Workload
from flexgen_helm.request import MemoryLimits

LAPTOP = load_profile("laptop")
MIB = 1 << 20


def config(name):
    return resolve(name).entry.config


def small(gpu_mib, cpu_mib, disk_mib=4000, prompt=32, output=8, count=24, **more):
    """OPT-125M (250 MB of weights) on a simulated gpu."""
    machine = simulated_gpu(replace(LAPTOP, overlap=0.8), (2.0, 2.0))
    limits = MemoryLimits(gpu=gpu_mib * MIB, cpu=cpu_mib * MIB, disk=disk_mib * MIB)
    return planning_problem(
        config("opt-125m"), machine, Workload.uniform(prompt, output, count), limits=limits, **more
    )
