"""Classes of `transformers` that run by its modules although it does not list them as causal
language models.
"""

# They also see or hear, and their language model alone gives their answers to text. Each is
# compared with its own forward pass (`tests/models/test_transformers_backend.py`). Others may
# compute logits in another way than their language model: those of Cohere's vision models are not
# scaled.
MULTI_PART_CLASSES = frozenset({
    "AriaForConditionalGeneration", "DeepseekVLForConditionalGeneration",
    "DeepseekVLHybridForConditionalGeneration", "Exaone4_5_ForConditionalGeneration",
    "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "GlmAsrForConditionalGeneration", "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration", "HyperCLOVAXVisionV2ForConditionalGeneration",
    "Idefics2ForConditionalGeneration", "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration", "JanusForConditionalGeneration",
    "Lfm2VlForConditionalGeneration", "Lfm3VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration", "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration",
    "LlavaNextVideoForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "Ovis2ForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "SmolVLMForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration", "VideoLlavaForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
})  # fmt: skip

# Causal language models that the list of `transformers` lacks.
UNLISTED_CLASSES = frozenset({"Mistral4ForCausalLM"})
