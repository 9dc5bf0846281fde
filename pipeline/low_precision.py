"""Ops that autocast runs in its low precision: those of torch's documentation of autocast op eligibility."""

LINES = (
    "__matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul multi_dot conv1d conv2d conv3d conv_transpose1d",
    "conv_transpose2d conv_transpose3d convolution gru_cell linear lstm_cell matmul mm mv prelu rnn_relu_cell",
    "rnn_tanh_cell scaled_dot_product_attention",
)
LOW = frozenset(name for line in LINES for name in line.split())
