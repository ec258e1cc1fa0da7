"""The search for a policy: block shapes and schedules around a linear program (the paper's 'Policy Search'). No torch.

For every block shape the nine fractions that minimize the time of a token solve

    min  T / rows      with  T = prefill pass + passes x decode pass,  pass >= every resource (see `policy.cost`)
    s.t. bytes of each tier <= its limit,  wg + wc + wd = cg + cc + cd = hg + hc + hd = 1,  T <= max_latency

by HiGHS. The best few are rounded to whole matrices and whole groups of rows, evaluated again, and the best that
still fits is taken; so what is predicted is what will be done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flexgen_helm.core.errors import MemoryLimitError
from flexgen_helm.policy.cost import CACHE, HIDDEN, ONE, WEIGHTS, Affine, BlockModel, block_model
from flexgen_helm.policy.placement import TIERS, Tier
from flexgen_helm.policy.policy import Policy, Schedule
from flexgen_helm.policy.predict import Prediction, capacity, evaluate, predict
from flexgen_helm.policy.situation import Shape, Situation
from flexgen_helm.quant.precisions import PRECISIONS

# Name of the profile of the machine at hand.
MEASURED = "measured"
# What a machine keeps for everything that is not ours: a share of its memory, and never less than this.
MARGIN_SHARE, MARGIN_BYTES = 0.1, 1 << 30
# What 'auto' chooses from. Row by row is never better, and what the diagonal schedule's growing caches cost is not in
# the model, so it is searched where it is asked for.
AUTOMATIC: tuple[Schedule, ...] = ("zigzag", "prefill-only")
_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20)
_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 128, 192, 256, 384, 512, 768, 1024)
# Candidates of the program that are rounded and evaluated again.
_ROUNDED = 12
# Two throughputs that differ by less are equal; then the smaller block is taken.
_EQUAL = 1e-6
# Times that a tier's share of the weights is lowered until its whole matrices fit.
_TRIES = 16


def less_margin(free: float, total: float) -> int:
    """What may be used of `free` bytes on a tier of `total`."""
    return max(0, int(free - max(MARGIN_BYTES, MARGIN_SHARE * total)))


@dataclass(frozen=True)
class Found:
    """A policy with its schedule, and what it costs as it will be placed."""

    policy: Policy
    schedule: Schedule
    prediction: Prediction


@dataclass(frozen=True)
class _Candidate:
    shape: Shape
    resident: bool
    fractions: Affine
    seconds_per_row: float


def search(
    situation: Situation,
    schedules: Sequence[Schedule] = AUTOMATIC,
    *,
    max_latency: float | None = None,
    fixed: Policy | None = None,
) -> Found:
    """The policy with the highest throughput. fixed: a policy whose weights lie already; only cache, hidden states
    and the block are chosen.

    Raises `MemoryLimitError` that names the tier and the missing bytes where nothing fits, or the least latency where
    no block is quick enough.
    """
    candidates = _candidates(situation, schedules, max_latency, fixed, prune=True)
    finished = [done for found in candidates[:_ROUNDED] if (done := _finish(situation, found, max_latency))]
    if not finished:  # rounding to whole matrices cost the last bytes: smaller blocks leave more
        for found in _candidates(situation, schedules, max_latency, fixed, prune=False):
            if (done := _finish(situation, found, max_latency)) is not None:
                finished.append(done)
                break
    if not finished:
        raise MemoryLimitError(explain(situation, schedules, max_latency))
    return max(finished, key=lambda done: (_rank(done.prediction.tokens_per_s), -done.policy.block_size))


def _candidates(
    situation: Situation,
    schedules: Sequence[Schedule],
    max_latency: float | None,
    fixed: Policy | None,
    prune: bool,
) -> list[_Candidate]:
    """Solutions of the program by shape, the best first. prune: leave out shapes that cannot be the best."""
    found: list[tuple[float, _Candidate]] = []
    best = np.inf
    for shape, resident in _shapes(situation, schedules):
        if resident and fixed is not None and fixed.wg + fixed.wc * (situation.home == "cpu") < 1:
            continue
        model = block_model(situation, shape, resident)
        least = _least(situation, model) if prune else 0.0
        if least > best * (1 + _EQUAL):
            continue
        solved = _solve(situation, shape, model, resident, max_latency, fixed)
        if solved is not None:
            found.append((least, solved))
            best = min(best, solved.seconds_per_row)
    # What was solved before the best was known is left out too: the order must not matter.
    kept = [solved for least, solved in found if least <= best * (1 + _EQUAL)]
    return sorted(kept, key=lambda one: (_rank(one.seconds_per_row), one.shape.rows, one.shape.num_gpu_batches))


def explain(situation: Situation, schedules: Sequence[Schedule], max_latency: float | None) -> str:
    """Why nothing fits, in a sentence with the bytes or the seconds that are missing."""
    quickest = quickest_seconds(situation, schedules)
    if quickest is not None and max_latency is not None:
        return (
            f"no block is done within {max_latency:g} s: a single sequence takes {quickest:.1f} s; raise --max-latency"
        )
    one = _one(schedules)
    model = block_model(situation, one)
    fractions, short = _least_missing(situation, model)
    tier = max(TIERS, key=lambda tier: short[tier])
    needed = max(float(form @ fractions) for form in model.memory[tier])
    limit, has = situation.limits[tier], capacity(situation, tier)
    if limit <= has - model.working[tier]:
        told = f"{needed:,.0f} where {limit:,.0f} are allowed"
    else:  # a limit above what the machine has gives nothing
        where = "this machine" if situation.hardware.name == MEASURED else situation.hardware.name
        room = "are allowed" if tier == "gpu" and _is_simulated(situation) else f"are all that {where} has"
        told = f"{needed + model.working[tier]:,.0f} where {has:,.0f} {room}"
    if short[tier] > _noise(situation):
        missing = f"{short[tier]:,} bytes more on the {tier} tier ({told})"
    else:
        missing = f"up to {max(situation.rest.matrices.values()):,} bytes more, because every matrix rests whole"
    remedies = [*_remedies(situation, one, tier, short), "take a smaller model"]
    advice = f"{', '.join(remedies[:-1])}{', or ' if remedies[1:] else ''}{remedies[-1]}"
    return f"even a block of one sequence needs {missing}: {advice}"


def _remedies(situation: Situation, one: Shape, tier: Tier, short: Mapping[Tier, int]) -> list[str]:
    """What makes a block of one sequence fit, the most obvious first; each is tried, so that none is in vain."""

    def fits(changed: Situation) -> bool:
        for resident in (False, True):
            found = _solve(changed, one, block_model(changed, one, resident), resident, None, None)
            if found is not None and _finish(changed, found, None) is not None:
                return True
        return False

    noise, found = _noise(situation), []
    # The tier that misses the bytes first: what it lacks may fit another one too.
    tiers = sorted(TIERS, key=lambda other: other != tier)
    alone = [_flag(other) for other in tiers if fits(_opened(situation, (other,)))]
    if alone:
        found.append(f"raise {' or '.join(alone)}")
    together = [other for other in TIERS if _can_be_raised(situation, other)]
    if not found and fits(_opened(situation, together)):
        found.append(_raise(together))
    opened = _opened(situation, together)
    rest = _least_missing(opened, block_model(opened, one))[1]
    if not found and max(rest["gpu"], rest["cpu"]) <= noise:
        held = [other for other in together if short[other] > noise]
        if situation.hardware.name == MEASURED:
            more = "make room on the disk or name another folder with --offload-dir"
        else:
            more = "name a machine with a larger disk"
        found.append(f"{_raise(held)} and {more}" if held else more)
    precision = PRECISIONS["4bit"]
    if situation.precision.weights is None and fits(replace(situation, precision=precision)):
        found.append(f"take --precision {precision.name}")
    return found


def _raise(tiers: Sequence[Tier]) -> str:
    return f"raise {' and '.join(map(_flag, tiers))}"


def _opened(situation: Situation, tiers: Sequence[Tier]) -> Situation:
    """With the limits of `tiers` raised as far as they should be."""
    for tier in tiers:
        if not _can_be_raised(situation, tier):
            continue
        most = _most(situation, tier)
        if tier == "gpu" and _is_simulated(situation):
            gpu = replace(situation.hardware.cpu, memory_bytes=int(most))
            situation = replace(situation, hardware=replace(situation.hardware, gpu=gpu))
        situation = replace(situation, limits={**situation.limits, tier: most})
    return situation


def _can_be_raised(situation: Situation, tier: Tier) -> bool:
    return situation.limits[tier] < _most(situation, tier)


def _most(situation: Situation, tier: Tier) -> float:
    """What a limit may be raised to: more than no limit would give takes the machine its margin."""
    has = capacity(situation, "cpu" if tier == "gpu" and _is_simulated(situation) else tier)
    return less_margin(has, has if tier != "disk" else 0)


def _is_simulated(situation: Situation) -> bool:
    """Whether the gpu is the host's processor (`plan.simulated`), whose memory is what the flag says."""
    cpu, gpu = situation.hardware.cpu, situation.hardware.gpu
    return gpu is not None and replace(gpu, memory_bytes=cpu.memory_bytes) == cpu


def _noise(situation: Situation) -> float:
    """Bytes that the solver leaves of a nothing."""
    return _EQUAL * situation.rest.num_values


def _flag(tier: Tier) -> str:
    return "--disk" if tier == "disk" else f"--{tier}-memory"


def quickest_seconds(situation: Situation, schedules: Sequence[Schedule] = AUTOMATIC) -> float | None:
    """The least seconds of any block, which is one of a single sequence; None where not even that fits."""
    one, quickest = _one(schedules), None
    for resident in (False, True):
        found = _solve(situation, one, block_model(situation, one, resident), resident, None, None)
        if found is not None:
            done = evaluate(situation, one, found.fractions)
            quickest = min(quickest or np.inf, done.prefill_s + done.decode_s)
    return quickest


def _one(schedules: Sequence[Schedule]) -> Shape:
    return Shape(1, 1, "prefill-only" if tuple(schedules) == ("prefill-only",) else "zigzag")


def _shapes(situation: Situation, schedules: Sequence[Schedule]) -> Iterator[tuple[Shape, bool]]:
    """Block shapes worth trying, large ones first (a good one early rules many out)."""
    workload, spec = situation.workload, situation.spec
    most = None if situation.endless else workload.num_sequences
    room = sum(min(situation.limits[tier], capacity(situation, tier)) for tier in TIERS)
    row_bytes = situation.kv_elements * situation.cache_bytes * (workload.prompt + workload.output) / 2
    weights = situation.resting_bytes
    fits = weights <= min(situation.limits[situation.home], capacity(situation, situation.home))
    for schedule in schedules:
        if (schedule == "prefill-only") != (workload.output == 1):
            continue
        if schedule == "diagonal" and (spec.num_layers < 1 or workload.output < 2):
            continue
        # One batch more than pipeline stages would leave them idle less often; without stages on one device a block
        # of several batches pays where its memory is small.
        for rows in reversed(_ROWS):
            if most is not None and rows >= 2 * most and rows > 1:
                continue
            for batches in reversed(_BATCHES):
                if schedule in ("prefill-only",) and batches > 1:
                    continue
                if most is not None and rows * batches >= 2 * most and batches > 1:
                    continue
                if schedule != "prefill-only" and rows * batches * row_bytes > room:
                    continue
                for resident in (True, False) if fits else (False,):
                    yield Shape(rows, batches, schedule), resident


def _least(situation: Situation, model: BlockModel) -> float:
    """A lower bound of the seconds a row: computing that no placement avoids."""
    found = 0.0
    for terms, times in ((model.prefill, 1.0), (model.decode, model.decode_passes)):
        form = terms.resources["compute"]
        found += times * float(form[ONE] + min(form[list(CACHE.values())]))
    return found / model.rows


def _solve(
    situation: Situation,
    shape: Shape,
    model: BlockModel,
    resident: bool,
    max_latency: float | None,
    fixed: Policy | None,
) -> _Candidate | None:
    """The linear program of one block shape; None where it has no solution."""
    from scipy.optimize import linprog

    share = situation.overlap_share
    phases = ((model.prefill, 1.0), (model.decode, model.decode_passes))
    # Variables: nine fractions, then the longest resource of a prefill and of a decode pass.
    cost, constant = np.zeros(11), 0.0
    upper: list[Affine] = []
    bounds: list[float] = []
    for number, (terms, times) in enumerate(phases):
        if not times:
            continue
        total = sum(terms.resources.values())
        assert isinstance(total, np.ndarray)
        cost[:9] += times * (1 - share) * total[:9]
        constant += times * (1 - share) * total[ONE]
        cost[9 + number] += times * share
        for form in (*terms.resources.values(), *terms.together):
            if form.any():
                row = np.zeros(11)
                row[:9], row[9 + number] = form[:9], -1.0
                upper.append(row)
                bounds.append(-form[ONE])
    scale = max(1e-12, float(np.abs(cost).max()))
    for tier in TIERS:
        room = min(situation.limits[tier], capacity(situation, tier) - model.working[tier])
        for form in model.memory[tier]:
            # In parts of the tier, so that bytes and seconds are of one size for the solver.
            unit = max(1.0, situation.limits[tier])
            upper.append(np.concatenate((form[:9], (0.0, 0.0))) / unit)
            bounds.append((room - form[ONE]) / unit)
    if max_latency is not None:
        upper.append(cost.copy())
        bounds.append(max_latency - constant)
    sums = np.zeros((3, 11))
    for number, kind in enumerate((WEIGHTS, CACHE, HIDDEN)):
        sums[number, list(kind.values())] = 1.0
    limits: list[tuple[float, float | None]] = [(0.0, 1.0)] * 9 + [(0.0, None)] * 2
    if situation.home == "cpu":
        for kind in (WEIGHTS, CACHE, HIDDEN):
            limits[kind["gpu"]] = (0.0, 0.0)
    if resident:
        limits[WEIGHTS[situation.home]] = (1.0, 1.0)
    if fixed is not None:
        held = dict(zip(TIERS, (fixed.wg, fixed.wc, fixed.wd)))
        if situation.home == "cpu":
            held = {"gpu": 0.0, "cpu": fixed.wg + fixed.wc, "disk": fixed.wd}
        for tier, part in held.items():
            limits[WEIGHTS[tier]] = (part, part)
    solved = linprog(cost / scale, np.array(upper), np.array(bounds), sums, np.ones(3), limits, method="highs")
    if not solved.success:
        return None
    fractions = np.append(np.clip(solved.x[:9], 0.0, 1.0), 1.0)
    return _Candidate(shape, resident, fractions, (float(solved.fun) * scale + constant) / model.rows)


def _finish(situation: Situation, candidate: _Candidate, max_latency: float | None) -> Found | None:
    """Round to what can be placed; where whole matrices do not fit a tier, some of its share goes to the next."""
    fractions = candidate.fractions.copy()
    total = situation.resting_bytes
    for _ in range(_TRIES):
        policy = _policy(candidate.shape, fractions)
        done = predict(situation, policy, candidate.shape.schedule)
        late = max_latency is not None and done.prefill_s + done.decode_s > max_latency * (1 + 1e-6)
        if done.feasible:
            return None if late else Found(policy, candidate.shape.schedule, done)
        lowered = False
        for tier, following in (("gpu", "cpu"), ("cpu", "disk")):
            short = done.missing.get(tier, 0) / total  # type: ignore[call-overload]
            part = fractions[WEIGHTS[tier]]  # type: ignore[index]
            if short and part > 0 and not candidate.resident:
                moved = min(part, 1.05 * short + 1e-4)
                fractions[WEIGHTS[tier]] -= moved  # type: ignore[index]
                fractions[WEIGHTS[following]] += moved  # type: ignore[index]
                lowered = True
        if not lowered:
            return None
    return None


def _policy(shape: Shape, fractions: Affine) -> Policy:
    """Percentages to a hundredth, which is how policies are written."""
    parts = [abs(round(float(x), 4)) for x in fractions[:9]]  # no minus zero
    pairs = [(parts[3 * kind], min(parts[3 * kind + 1], 1.0 - parts[3 * kind])) for kind in range(3)]
    return Policy(shape.gpu_batch_size, shape.num_gpu_batches, *(x for pair in pairs for x in pair))


def _least_missing(situation: Situation, model: BlockModel) -> tuple[Affine, dict[Tier, int]]:
    """Fractions that miss the fewest bytes over all tiers, and the bytes by tier."""
    from scipy.optimize import linprog

    upper, bounds = [], []
    unit = float(situation.rest.num_values)
    for place, tier in enumerate(TIERS):
        room = min(situation.limits[tier], capacity(situation, tier) - model.working[tier])
        for form in model.memory[tier]:
            slack = np.zeros(3)
            slack[place] = -1.0
            upper.append(np.concatenate((form[:9] / unit, slack)))
            bounds.append((room - form[ONE]) / unit)
    sums = np.zeros((3, 12))
    for number, kind in enumerate((WEIGHTS, CACHE, HIDDEN)):
        sums[number, list(kind.values())] = 1.0
    limits: list[tuple[float, float | None]] = [(0.0, 1.0)] * 9 + [(0.0, None)] * 3
    if situation.home == "cpu":
        limits[0] = limits[3] = limits[6] = (0.0, 0.0)
    cost = np.concatenate((np.zeros(9), np.ones(3)))
    solved = linprog(cost, np.array(upper), np.array(bounds), sums, np.ones(3), limits, method="highs")
    short = {tier: int(np.ceil(solved.x[9 + place] * unit)) for place, tier in enumerate(TIERS)}
    return np.append(solved.x[:9], 1.0), short


def _rank(value: float) -> float:
    """Rounded to parts of a million, so that noise of the solver does not choose between equals."""
    return float(f"{value:.6g}")
