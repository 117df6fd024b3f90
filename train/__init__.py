"""One Transformer, three objectives, any optimizer: the runs that the comparison is made of."""
