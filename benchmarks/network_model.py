"""What a network between the stages of a pipeline costs. No torch.

A batch passes the stages one after the other, and a link between each two of them. Several batches follow each other,
so that stages and links work at the same time:

    one batch      m t + h (b + d)             m stages of t seconds, h links of d seconds delay and b seconds a message
    each further   + max(t, c b)               the slowest of stages and links; the busiest link has c messages

In decoding a batch starts again once its token has come back, so n batches take turns of max(the time of one batch,
n max(t, c b)).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """Links between machines. delay_s: of a message, one way; bytes_s: of one link."""

    delay_s: float
    bytes_s: float


@dataclass(frozen=True)
class Turns:
    """Seconds of a pass of several batches: until all have passed the pipeline, and of each turn in decoding."""

    once_s: float
    again_s: float


def pipeline_turns(
    pass_s: float, stages: int, batches: int, message_bytes: float, network: Network, links: int, busiest: int = 1
) -> Turns:
    """Return how long batches take to pass a pipeline.

    pass_s: of one batch through all stages, without the network.
    message_bytes: of one batch's hidden states.
    links: that a batch crosses, from where prompts are to where tokens are drawn and back.
    busiest: of them, those that are one and the same in one direction.
    """
    stage_s, message_s = pass_s / stages, message_bytes / network.bytes_s
    one = pass_s + links * (message_s + network.delay_s)
    slowest = max(stage_s, busiest * message_s)
    return Turns(one + (batches - 1) * slowest, max(one, batches * slowest))
