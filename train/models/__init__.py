"""GPT, ViT and DiT: one pre-norm, bias-free Transformer with three ways in and out."""
