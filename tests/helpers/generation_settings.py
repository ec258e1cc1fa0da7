"""Settings of `generation_config.json` that change greedy answers, one kind at a time."""

GREEDY = [
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 0.4},
    {"encoder_no_repeat_ngram_size": 1},
    {"min_new_tokens": 6, "min_length": 90},
    {"min_length": 30, "exponential_decay_length_penalty": [3, 1.6]},
    {"bad_words_ids": [[7], [9, 11]], "suppress_tokens": [*range(100, 200)]},
    {"begin_suppress_tokens": [*range(160)], "sequence_bias": [[[5], 4.0], [[5, 6], 9.0]]},
    {"forced_bos_token_id": 9},
]
