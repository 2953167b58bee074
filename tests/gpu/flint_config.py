"""The small Flint of most GPU tests, of single launches: sizes that the kernels just take."""

CONFIG = {
    "model_type": "flint",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 512,
    "num_experts": 32,
    "max_position_embeddings": 2048,
}
