"""Where the host multiplies weights in 16 bits as they rest, nothing is converted, copied, or
planned for copies.
"""

from dataclasses import replace

import pytest

from flexgen_helm.hardware.profile import Curve, load_profile
from flexgen_helm.planner.machine import Machine
from flexgen_helm.planner.plan import planning_problem
from flexgen_helm.planner.policy import Policy
from flexgen_helm.planner.predict import predict
from flexgen_helm.planner.schedules import ROW
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.planner.weight_placement import keeps_copies, place_weights
from flexgen_helm.planner.workload import Workload
from flexgen_helm.quant.precisions import PRECISIONS
from tests.helpers.planning_problems import MIB, config

OPT = config("opt-125m")
ROOMY = {"gpu": 1 << 40, "cpu": 1 << 40, "disk": 1 << 40}
LAPTOP = load_profile("laptop")
# The same machine with the unit: twice the rate for weights in float16, three times for those in
# bfloat16.
_CURVE = LAPTOP.cpu.matmul_flops["float32"]
_RATES = {
    name: Curve(tuple((rows, factor * rate) for rows, rate in _CURVE.points))
    for name, factor in (("float32", 2.0), ("float32 x bfloat16", 3.0))
}
UNIT = replace(LAPTOP, cpu=replace(LAPTOP.cpu, matmul_flops=_RATES, upcast_elements_s=float("inf")))


def problem(hardware, storage_dtype="float16", precision="fp16"):
    return planning_problem(
        OPT,
        hardware,
        Workload.uniform(64, 512, 32),
        precision=precision,
        storage_dtype=storage_dtype,
    )


def test_copies_are_kept_where_they_are_of_use_and_fit():
    converts, as_stored = (
        Machine(ROOMY, "cpu"),
        Machine(ROOMY, "cpu", multiplied_as_stored="float16"),
    )
    model = StorageSizes(OPT)
    assert keeps_copies(model, converts) and place_weights(model, converts).compute_copies
    assert not keeps_copies(model, as_stored) and not place_weights(model, as_stored).compute_copies
    # Copies of packed matrices would take more memory than 16 bits do.
    packed = StorageSizes(OPT, PRECISIONS["4bit"])
    assert keeps_copies(packed, converts) and not keeps_copies(packed, as_stored)
    assert not keeps_copies(model, replace(converts, limits={**ROOMY, "cpu": 700 * MIB}))


def test_nothing_is_converted_and_half_of_the_bytes_are_read():
    policy, tight = Policy(8, 8, 0, 1, 0, 1, 0, 1), {"gpu": 0.0, "cpu": 800.0 * MIB, "disk": 1e12}

    def seconds(hardware, **changes):
        cpu = replace(hardware.cpu, **changes)
        asked = replace(problem(replace(hardware, cpu=cpu)), limits=tight)
        return predict(asked, policy, ROW, rounded=False).seconds["decode"]

    assert seconds(LAPTOP)["convert"] > 0 == seconds(UNIT)["convert"]
    # Products that take no time but that of reading the weights.
    fast = Curve(((1, 1e30),))
    reading = [
        seconds(hardware, matmul_flops={"float32": fast}, step_s=0.0)["products"]
        for hardware in (LAPTOP, UNIT)
    ]
    assert reading[1] == pytest.approx(reading[0] / 2, rel=1e-6)


@pytest.mark.parametrize(
    "hardware, storage, precision, factor",
    [
        (LAPTOP, "bfloat16", "fp16", 1),
        (UNIT, "float16", "fp16", 2),
        (UNIT, "bfloat16", "fp16", 3),
        (UNIT, "bfloat16", "4bit", 2),
    ],
)
def test_products_have_the_rate_of_their_weights(hardware, storage, precision, factor):
    asked = problem(hardware, storage, precision)
    assert asked.product_flops.at(77) == pytest.approx(factor * _CURVE.at(77))
