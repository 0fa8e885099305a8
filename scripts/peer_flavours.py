"""Llama 3.2 1B for torchtitan, whose registry of Llama 3 shapes begins at 8B.

torchtitan imports the module named by ``--experimental.custom_import`` before it builds the model.
Its Llama 3 has an output layer of its own, so this 1B does not tie it to the embedding as Meta's
does: 1.50 billion parameters rather than 1.24, and as many matrix products.
"""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs

llama3_args["1B"] = TransformerModelArgs(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim_multiplier=1.5,
    multiple_of=256,
    rope_theta=500000,
    rope_scaling_args=RoPEScalingArgs(scaling_factor=32.0),
)
