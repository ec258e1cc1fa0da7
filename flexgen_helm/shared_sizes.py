"""Sizes, counts, shares and times that several packages share. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from flexgen_helm.tiers import Tier

# --- Sequences ---
# Sequences of one cache block: enough to make one attention call worth its overhead, few enough
# that sequences of similar length (the queue is sorted) share a capacity and that their memory is
# freed soon.
BLOCK_SEQUENCES = 32
# Sequences of one cache block where cache and weights are on the compute device: each block is one
# more call a layer, 0.2 ms for a 135M model.
LARGE_BLOCK_SEQUENCES = 128
# Sequences that decode together with resident weights: a CPU's products are near their full rate at
# a hundred.
MAX_SEQUENCES: Mapping[Tier, int] = {"cpu": 128, "gpu": 512}
# Sequences that decode together where answers may be long: the one that ends last decides how many
# passes a run takes, so all begin early.
LONG_MAX_SEQUENCES = 512
# Blocks of a searched policy that run at once: the search counts every answer with its expected
# length, and on average running answers have half of it.
LONG_BLOCKS = 2

# --- Tokens ---
# Tokens of one batch with resident weights on a host: enough for the full product rate, few enough
# to stay in its caches. Converting packed weights for each batch takes as long as 6 rows of their
# products.
BATCH_TOKENS = 1024
# Tokens of one batch with streamed weights, which are upcast anew for every batch: fewer and larger
# batches pay. Also under a policy where experts are streamed: their products have the rows of a
# whole pass, and memory is for its tokens.
STREAMED_BATCH_TOKENS = 2048
# Tokens of one batch at most where a policy counts sequences, which bounds the workspace of their
# prompts; and on a device, where converting weights takes as long as 100 to 1,000 rows.
MAX_BATCH_TOKENS = 4096
# Prompt tokens that join a pass with resident weights. Interleaved decoding reads the weights once
# more for each pass (about 2 %), and results arrive steadily instead of at the end of a block.
PASS_TOKENS = 4 * BATCH_TOKENS
# Tokens of a page of the growing caches of long answers: a small part of them, and copying costs 2
# to 5 %.
LONG_PAGE_TOKENS = 64
# Answers that may end early and may have more tokens than this get their cache by pages. Shorter
# ones get it at once: there is little to be gained, and reserving never has to be taken back.
LONG_ANSWER_TOKENS = 128
# Queries of a prompt whose scores exist at once where no fused kernel attends: they bound the
# workspace.
SCORE_TOKENS = 1024
# Queries of a prompt whose masks exist at once, for the same reason.
QUERY_CHUNK_TOKENS = 256
# Tokens of several prompts that are quantized together.
QUANTIZED_TOKENS = 4096

# --- Seconds ---
# Seconds that a drawn token waits at most to be written.
KEEP_EVERY_S = 10.0
# Seconds after which the hidden states of a pass without decoding are kept.
KEEP_STATES_EVERY_S = 600.0

# --- Bytes ---
# Direct I/O requires addresses, offsets and lengths that are multiples of this.
ALIGNMENT = 4096
# Smallest staging ring: three units of 1 MiB. One is used, one has arrived, and one arrives.
MIN_STAGING_BYTES = 3 << 20
# Pinned memory of a thread that copies between a device and memory that is not pinned, piece by
# piece: a piece of this size takes a millisecond.
COPY_BUFFER_BYTES = 8 << 20
# Bytes of rows that a thread gathers at once from the places that have parts of them.
GATHER_BYTES = 4 << 20
# Bytes that may wait in memory to be stored: the disk stays busy while the next batch computes, and
# a slow disk holds computing up before it fills the memory.
MAX_PENDING_STORE_BYTES = 64 << 20
# Transfers that no ledger counts (`TransferManager.peak_transfer_bytes`): stores that wait and
# their buffer, and fetches and theirs.
MAX_TRANSFER_BYTES = 4 * MAX_PENDING_STORE_BYTES

# --- Elements ---
# Elements of a matrix that are upcast or dequantized at once on the CPU: 4 MiB in float32, which
# stay in its cache.
HOST_UPCAST_ELEMENTS = 1 << 20
# Elements upcast at once on a device, where each tile is two launches: the largest matrices
# of a 70B model whole, 512 MiB in 16 bits.
DEVICE_UPCAST_ELEMENTS = 256 << 20
# Probabilities in float64 from which tokens are drawn at once: vocabulary by sequences, at least of
# one sequence. On CPUs they stay in the caches; on a GPU few large kernels take the place of many
# small ones.
SAMPLED_ELEMENTS: Mapping[Tier, int] = {"cpu": 1 << 17, "gpu": 1 << 21}

# --- Counts ---
# Fewest slots for offloaded experts, as of the staging ring.
MIN_EXPERT_SLOTS = 3
# Threads that load offloaded weights: while one's unit crosses the second link of its way, the next
# is on the first.
NUM_LOADERS = 2
# Lanes for each rank of a pipeline where sequences need one pass only: ranks are idle at its
# beginning and its end, a fifth of the time at most.
PREFILL_LANES = 4

# --- Shares ---
# Of a layer's experts: from this one on, the next layer is taken to need all of its own.
ALL_EXPERTS_FROM = 0.9
# Free bytes that hidden states of waiting batches may take where no policy says so.
ACTIVATIONS_SHARE = 0.1
# Free bytes of the compute tier that hidden states may take where offloaded experts are read once
# for all tokens that have room there.
EXPERTS_SHARE = 0.5
# Share of what is free on the compute tier that two layers of an offloaded cache block may take:
# where its slots grow by pages because answers may become long, and elsewhere.
STAGED_CACHE_SHARE, MAX_STAGED_CACHE_SHARE = 0.25, 0.5
# Share of free memory for copies of weights in the compute dtype; the KV cache keeps the rest.
COPIES_SHARE = 0.5


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_read_bytes(num_bytes: int) -> int:
    """Bound the memory of an aligned read, which may begin before the bytes and end behind them."""
    return aligned(num_bytes) + 2 * ALIGNMENT
